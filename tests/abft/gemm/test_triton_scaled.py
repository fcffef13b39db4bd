"""Scaled and grouped products in the verification kernel, against fp64 and the reference."""

# First, as it skips this file where Triton cannot run.
import triton_device  # noqa: F401  # isort: skip

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from case_loops import for_each
from interpreted_driver import core, interpreting
from triton_cases import random, ratios
from triton_device import CUDA, DEVICE, MARKS

from holdfast.abft.gemm.ahead_of_time import prepare
from holdfast.abft.triton.tolerance import Tolerance

pytestmark = [*MARKS, pytest.mark.skipif(core is None, reason="the native core is not built")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
M, K, N = 40, 48, 70
AGREEMENT = 0.02  # of a threshold, between the kernel and fp64


@pytest.fixture(autouse=True)
def _launches() -> Iterator[None]:
    """Launches run on the device, or in the interpreter."""
    if CUDA:
        prepare(torch.device("cuda", torch.cuda.current_device()))
        yield
    else:
        with interpreting():
            yield


class Checked:
    """The checks of products of two operands, by the reference and by the kernel."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        addend: torch.Tensor | None = None,
        **rest: torch.Tensor,
    ) -> None:
        self.a, self.b, self.addend, self.rest = a, b, addend, rest
        self.encoding = core.kernel_encode(b, rest.get("column_scale"))

    def by_kernel(self, c: torch.Tensor) -> float:
        """The largest ``|D| / T``."""
        slot = torch.zeros(1, dtype=torch.int32, device=c.device)
        tolerance = Tolerance.of(self.a.dtype, c.dtype, self.a.shape[-1], c.shape[-1])
        of_a = {name: self.rest[name] for name in {"row_scale", "ends"} & set(self.rest)}
        core.kernel_judge(c, slot, self.a, self.encoding, self.addend, 1.0, 1.0, tolerance, **of_a)
        return float(slot.view(torch.float32))

    def by_reference(self, c: torch.Tensor) -> float:
        """The largest ``|D| / T``."""
        slot = torch.zeros(1, dtype=torch.int32, device=c.device)
        core.device_judge("aten", c, self.a, self.b, self.addend, 1.0, 1.0, slot, **self.rest)
        return float(slot.view(torch.float32))


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def scales(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of rows and columns between 1/64 and 64, not all of them contiguous, or two of all."""
    if kind == "one":
        return torch.tensor([3.0], device=DEVICE), torch.tensor(0.02, device=DEVICE)
    draw = random(2, M + N, dtype=FP32, seed=5).mul(2).clamp(-6, 6).exp2()
    return draw[:, :M].T[:, :1], draw[1:, M:]


@for_each(
    "left, right, stored, kind, addend",
    [
        (E4M3, E4M3, BF16, "each", BF16),
        (E5M2, E4M3, FP16, "one", None),
        (E4M3, E5M2, FP32, "each", FP32),
    ],
)
def test_scaled_products(
    left: torch.dtype,
    right: torch.dtype,
    stored: torch.dtype,
    kind: str,
    addend: torch.dtype | None,
) -> None:
    a, b = random(M, K, dtype=left), random(K, N, dtype=right, seed=1, layout="columns")
    row_scale, column_scale = scales(kind)
    wide = row_scale.double() * a.double(), b.double() * column_scale.double()
    bias = None if addend is None else random(N, dtype=addend, seed=2)
    exact = wide[0] @ wide[1] + (0.0 if bias is None else bias.double())
    c = exact.to(stored)
    checked = Checked(a, b, bias, row_scale=row_scale, column_scale=column_scale)
    expected, thresholds = ratios(c, *wide, bias, operand=left)
    assert checked.by_kernel(c) < 1
    for ratio in (checked.by_kernel(c), checked.by_reference(c)):
        assert abs(ratio - float(expected.max())) < AGREEMENT
    for row in (0, M - 1):
        struck = c.clone()
        struck[row, 7 * row % N] += 2.2 * float(thresholds[row]) * (-1) ** row
        found = float(ratios(struck, *wide, bias, operand=left)[0].max())
        assert found > 1
        assert checked.by_kernel(struck) == pytest.approx(found, rel=0.01)


GROUPS = {
    "few": (20, 20, 36),  # one is empty, one ends inside a tile, and some rows are in none
    "many": (0,) * 62 + (3, 9, 38),  # more than are counted at a time
    "none": (0, 0),
}
LAID_OUT = [
    *(("few", BF16, "rows"), ("few", FP32, "columns")),
    *(("many", BF16, "columns"), ("none", FP16, "rows")),
]


@for_each("name, dtype, layout", LAID_OUT)
def test_rows_in_groups(name: str, dtype: torch.dtype, layout: str) -> None:
    limits = GROUPS[name]
    a = random(M, K, dtype=dtype, layout=layout)
    b = random(len(limits), K, N, dtype=dtype, seed=1)
    c = torch.full((M, N), torch.nan, dtype=dtype, device=DEVICE)
    found, thresholds = torch.zeros(M), torch.ones(M)
    for group, (first, last) in enumerate(pairwise((0, *limits))):
        own = slice(first, last)
        c[own] = (a[own].double() @ b[group].double()).to(dtype)
        found[own], thresholds[own] = ratios(c[own], a[own], b[group])
    a[limits[-1] :] = torch.nan  # of rows that are in no group nothing is read
    checked = Checked(a, b, ends=ends(*limits))
    for ratio in (checked.by_kernel(c), checked.by_reference(c)):
        assert ratio < 1
        assert abs(ratio - float(found.max())) < AGREEMENT
    for row in {0, 19, limits[-1] - 1} & set(range(limits[-1])):
        struck = c.clone()
        struck[row, 7 * row % N] -= 2.2 * float(thresholds[row])
        assert checked.by_kernel(struck) > 1


@for_each("dtype, limits", [(BF16, (20, 20, 45)), (FP32, (K,)), (FP16, (0, 12, 24, K))])
def test_columns_in_groups(dtype: torch.dtype, limits: tuple[int, ...]) -> None:
    """A group without columns has a product of zeros."""
    a, b = random(M, K, dtype=dtype, layout="columns"), random(K, N, dtype=dtype, seed=1)
    checked = Checked(a, b, ends=ends(*limits))
    parts = [slice(first, last) for first, last in pairwise((0, *limits))]
    c = torch.stack([(a[:, own].double() @ b[own].double()).to(dtype) for own in parts])
    assert checked.by_kernel(c) < 1
    assert abs(checked.by_kernel(c) - checked.by_reference(c)) < AGREEMENT
    thresholds = core.device_thresholds(c, a, b, None, 1.0, 1.0, **checked.rest)
    for group in (0, len(limits) - 1):
        struck = c.clone()
        struck[group, 9, N - 1] += 2.2 * float(thresholds[group, 9]) + 1e-30
        found = checked.by_reference(struck)
        assert found > 1
        assert checked.by_kernel(struck) == pytest.approx(found, rel=0.01)

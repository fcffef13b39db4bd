"""Known-answer test of the checks of a device, run before its products are first verified.

A miscompiled kernel, or one that a device computes wrong, would report clean rows for ever, or
faults in every step. So each check judges a product that is right, and the same with one element
changed by a known multiple of its row's threshold, which plain torch on CPU computed.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.gemm.raw import raw
from holdfast.abft.thresholds.rounding import FLOAT8

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIZES = (67, 130, 95)  # M, K and N: no multiples of a tile
GROUP = 20  # size of the first of two groups
STRIKE = 40.0  # the change of the struck element, in thresholds: far above the row's own rounding
ACCURACY = 0.05  # relative difference of |D| / T between the device and the reference


class _Case(NamedTuple):
    """Operands and an addend of a product, and scales or ends of groups by their names."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    addend: torch.Tensor | None
    rest: dict[str, torch.Tensor]


def failure(device: torch.device, backend: str) -> str:
    """Return what a device's checks do wrong; an empty string if they work.

    Products of fp64, fp32, fp16 and bf16 by rows and columns are judged, scaled ones of fp8 where
    the device multiplies it, and grouped ones.

    Args:
        device: Device to test.
        backend: Name of the backend that verifies there, ``kernels`` or ``aten``.

    Guarantees: takes well under a second once the kernels are compiled. Not covered: batches, sums
    that one check leaves to another, and faults of the device that come and go.
    """
    try:
        with raw():  # its own products are neither verified nor struck
            found = (each for case in _cases(device) for each in _failures(case, device, backend))
            return next(found, "")
    except Exception as error:  # whatever it is, protection is lost and not the training
        return f"the checks failed with {error!r}"


def _failures(case: _Case, device: torch.device, backend: str) -> Iterator[str]:
    c, name = _exact(case), case.name
    if not (clean := _ratio(backend, c, case, device)) < 1:
        yield f"{name} that are right were found to exceed thresholds {clean:.3g} times"
    rows, given = c.flatten(0, -2), (case.a, case.b, case.addend, 1.0, 1.0)
    row, column = len(rows) // 2, c.shape[-1] // 3
    thresholds = configured_core().device_thresholds(c, *given, **case.rest)
    rows[row, column] += STRIKE * float(thresholds.flatten()[row])
    expected = _ratio("aten", c, case, torch.device("cpu"))
    if not abs((ratio := _ratio(backend, c, case, device)) / expected - 1) < ACCURACY:
        yield f"a fault of {expected:.3g} thresholds in {name} was found to be {ratio:.3g}"
    rows[-1, -1] = torch.nan
    if not math.isnan(ratio := _ratio(backend, c, case, device)):
        yield f"NaN in {name} was found to be {ratio:.3g} thresholds"


def _cases(device: torch.device) -> Iterator[_Case]:
    """Draw the operands of every kind of product; the same in every run."""
    generator, (rows, inner, columns) = torch.Generator().manual_seed(0), SIZES

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for dtype in DTYPES:
        a, b, addend = (
            draw(*s, dtype=dtype) for s in ((rows, inner), (inner, columns), (columns,))
        )
        yield _Case(f"{dtype} products", a, b, addend, {})
        a, b = (each.mT.contiguous().mT for each in (a, b))
        yield _Case(f"{dtype} products of transposed operands", a, b, addend, {})
    # Older devices multiply no fp8, and Triton compiles nothing that reads it for them.
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        for dtype in FLOAT8:
            a, b = draw(rows, inner, dtype=dtype), draw(columns, inner, dtype=dtype).T
            scales = {"row_scale": draw(rows, 1).exp(), "column_scale": draw(1, columns).exp()}
            yield _Case(f"scaled {dtype} products", a, b, draw(columns).bfloat16(), scales)
    for kind, length, *batch in (("rows", rows, 2), ("inner dimensions", inner)):
        a = draw(rows, inner, dtype=torch.bfloat16)
        b = draw(*batch, inner, columns, dtype=torch.bfloat16)
        ends = torch.tensor((GROUP, length), dtype=torch.int32)
        yield _Case(f"products in groups of {kind}", a, b, None, {"ends": ends})


def _exact(case: _Case) -> torch.Tensor:
    """Compute the product in fp64, rounded once; that of fp8 to bf16."""
    one, (a, b) = torch.ones(()), (case.a.double(), case.b.double())
    a, b = case.rest.get("row_scale", one) * a, b * case.rest.get("column_scale", one)
    if "ends" in case.rest:
        parts = [slice(*each) for each in pairwise((0, *case.rest["ends"].tolist()))]
        if b.dim() == 3:
            c = torch.cat([a[part] @ each for part, each in zip(parts, b, strict=True)])
        else:
            c = torch.stack([a[:, part] @ b[part] for part in parts])
    else:
        c = a @ b
    c = c if case.addend is None else c + case.addend.double()
    return c.to(torch.bfloat16 if case.a.dtype in FLOAT8 else case.a.dtype)


def _ratio(backend: str, c: torch.Tensor, case: _Case, device: torch.device) -> float:
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    addend = None if case.addend is None else case.addend.to(device)
    given = c.to(device), case.a.to(device), case.b.to(device), addend, 1.0, 1.0, slot
    rest = {name: each.to(device) for name, each in case.rest.items()}
    configured_core().device_judge(backend, *given, **rest)
    return slot.view(torch.float32).item()

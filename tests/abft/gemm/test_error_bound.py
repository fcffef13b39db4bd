"""What the row threshold says and misses: masks, structured data, and errors that repeat."""

import math
from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from struck import kinds, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft import policy
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm import suspects
from holdfast.abft.gemm.cpu import encode, verify
from holdfast.abft.gemm.reference import encode_rows_reference, verify_rows_reference
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm


def test_no_prefix_of_the_signs_hides_a_constant() -> None:
    prefix = signs(1 << 20).cumsum(0).abs()
    root = torch.arange(1, len(prefix) + 1).double().sqrt()
    assert prefix[15:].min() >= 3
    assert ((prefix / root)[15:] >= 0.5).all()
    assert ((prefix / root)[15:] <= 2.26).all()


@for_each("columns", [16, 30, 32, 34, 36, 64])
def test_a_constant_added_to_a_row_is_repaired(columns: int) -> None:
    a, b = torch.randn(20, 24), torch.randn(24, columns)
    clean = a @ b
    with holdfast.protect(nn.Identity()), struck((3, slice(None)), lambda old: old + 0.5):
        assert torch.equal(a @ b, clean)
    assert kinds() == ["gemm_fault"]


MASKED = [
    (torch.float32, torch.finfo(torch.float32).min, 1e30),
    (torch.float32, -1e9, 100.0),
    (torch.float16, -65504.0, 200.0),
    (torch.bfloat16, -1e9, 100.0),
    (torch.float64, -1e9, 1e-6),
]


@for_each(("dtype", "mask", "change"), MASKED)
@for_each("batched", [False, True])
def test_a_fault_beside_a_finite_mask_is_repaired(
    dtype: torch.dtype, mask: float, change: float, batched: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(s, generator=generator).to(dtype) for s in ((20, 32), (32, 24)))
    addend = torch.zeros(20, 24, dtype=dtype)
    addend[:, -5:] = mask
    op = torch.addmm
    if batched:
        a, b, addend = (t.expand(2, *t.shape).contiguous() for t in (a, b, addend))
        op = torch.baddbmm
    clean = op(addend, a, b)
    dismissed = policy.process.false_alarms
    for verifying in (False, True):
        with holdfast.protect(nn.Identity(), verify=verifying):
            assert torch.equal(op(addend, a, b), clean)  # silent on clean data
            with struck((0, 4, 1), lambda old: old + change):
                repaired = torch.equal(op(addend, a, b), clean)
        assert repaired is verifying
    assert kinds() == ["gemm_fault"]
    assert policy.process.false_alarms == dismissed


def test_a_fault_under_a_finite_mask_is_repaired() -> None:
    a, b, addend = torch.randn(20, 32), torch.randn(32, 24), torch.zeros(20, 24)
    addend[:, -5:] = -1e9
    clean = torch.addmm(addend, a, b)
    with holdfast.protect(nn.Identity()), struck((4, -1), 0.0):
        assert torch.equal(torch.addmm(addend, a, b), clean)
    assert kinds() == ["gemm_fault"]


def test_a_large_addend_that_cancels_is_no_contradiction() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(s, generator=generator) * 1e4 for s in ((24, 512), (512, 40)))
    addend = torch.randn(24, 40, generator=generator) * 5e4
    with holdfast.protect(nn.Identity()):
        assert torch.equal(torch.addmm(addend, a, b), torch.addmm(addend, a, b))
    assert kinds() == ["extreme_input"] * len(kinds())


def opposite_scales() -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of A and rows of B with opposite scales over six decades, rows of B with a mean."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-3, 3, 512)
    a = torch.randn(64, 512, generator=generator) * scale
    b = (torch.randn(512, 64, generator=generator)) / scale.unsqueeze(1)
    return a, b


def test_the_reported_line_is_the_threshold_in_force() -> None:
    a, b = opposite_scales()
    with holdfast.protect(nn.Identity()) as protection:
        product = a @ b
        (site,) = protection.report().sites
    over = product.clone()
    over[0, 0] += 1e3
    for find in (verify, verify_rows_reference):
        _, threshold, _ = find(over, a, *encode(b), b=b)[:, 0, 0]
        rms = product[0].double().square().mean().sqrt()
        assert site.line == pytest.approx(float(threshold / rms), rel=1e-3)


def test_the_threshold_in_force_is_at_most_the_worst_case_bound() -> None:
    a, b = opposite_scales()
    rows = verify(a @ b + 1e3, a, *encode(b), b=b)[1, 0]
    gamma = 2 * math.expm1(514 * 2**-24)
    worst = gamma * (a.double().abs() @ b.double().abs()).sum(-1)
    assert (rows <= worst * 1.001).all()
    for native, reference in zip(
        rows, verify_rows_reference(a @ b + 1e3, a, *encode(b), b=b)[1, 0], strict=True
    ):
        assert float(native) == pytest.approx(float(reference), rel=1e-6)


def test_rows_that_almost_repeat_do_not_count_as_repeated() -> None:
    b = 1 + 1e-6 * torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    native, reference = encode(b)[1][0, -2], encode_rows_reference(b)[1][0, -2]
    assert native == reference
    repeated = b.clone()
    repeated[7] = repeated[6]
    assert encode(repeated)[1][0, -2] == encode_rows_reference(repeated)[1][0, -2] > native


def smooth(rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.linspace(0, 1, rows)
    wave = torch.outer(torch.arange(1, rows + 1).float(), t)
    return (2 * math.pi * wave).sin(), (2 * math.pi * wave.t()).cos()


def periodic(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    a = torch.rand(128, 2, generator=generator).repeat(1, 512).to(dtype)
    return a, torch.rand(2, 64, generator=generator).repeat(512, 1).to(dtype)


def hilbert() -> tuple[torch.Tensor, torch.Tensor]:
    i, j = torch.arange(40.0).unsqueeze(1), torch.arange(16_384.0)
    return 1 / (i + j + 1), 1 / (j.unsqueeze(1) + 1)


STRUCTURED: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "smooth": smooth,
    "periodic": lambda: periodic(torch.float32),
    "periodic fp64": lambda: periodic(torch.float64),
    "hilbert": hilbert,
}


def noting(calls: list[str], name: str) -> Callable[..., object]:
    """A function of ``suspects`` that also notes that it was called."""
    function = getattr(suspects, name)

    def noted(*args: object) -> object:
        calls.append(name)
        return function(*args)

    return noted


@for_each("name", STRUCTURED)
def test_suspect_rows_of_structured_data_cost_one_more_product(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = STRUCTURED[name]()
    clean = a @ b
    more: list[str] = []
    for kernel in ("transposed", "moved", "exact_rows", "settle_by_recomputing"):
        monkeypatch.setattr(suspects, kernel, noting(more, kernel))
    with holdfast.protect(nn.Identity()):
        assert torch.equal(a @ b, clean)
    assert kinds() == []
    assert len(more) <= 1
    assert set(more) <= {"transposed", "moved"}


@for_each("inner", [64, 1024, 4096, 16_384])
@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16])
@for_each("times", [3.0, -20.0])
def test_a_repeated_error_of_three_thresholds_is_persistent(
    inner: int, dtype: torch.dtype, times: float
) -> None:
    generator = torch.Generator().manual_seed(inner)
    a = torch.randn(20, inner, generator=generator).to(dtype)
    b = torch.randn(inner, 48, generator=generator).to(dtype)
    gemm = Gemm(None, a, b, 1.0, 1.0, *encode(b))
    wrong = a @ b
    threshold = verify(wrong, a, gemm.row_sum, gemm.statistics, b=b)[1, 0, 7]
    wrong[7, 5] += (times * threshold).to(dtype)
    rows = verify(wrong, a, gemm.row_sum, gemm.statistics, b=b)
    suspect = suspects.SuspectProduct((0, "mm", 0, 0), gemm, wrong, rows, False, wrong.clone)
    with pytest.raises(UncorrectableFault, match="row 7, column 5 repeats a wrong value"):
        suspects.resolve(suspect)
    assert kinds() == ["gemm_persistent"]
    events.clear()

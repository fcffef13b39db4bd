"""The kernel that verifies finished products: as fp64 measures, silent when clean, sure of faults.

Each launch comes from the native core, which packs the parameters.
"""

# First, as it skips this file where Triton cannot run.
import triton_device  # noqa: F401  # isort: skip

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from case_loops import for_each
from gemm_distributions import DISTRIBUTIONS
from interpreted_driver import Interpreter, core, interpreting
from triton_cases import operands, product, random, ratios, spread
from triton_device import CUDA, DEVICE, MARKS

from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm import cuda as passes
from holdfast.abft.gemm.ahead_of_time import prepare
from holdfast.abft.triton.tolerance import Tolerance

pytestmark = [*MARKS, pytest.mark.skipif(core is None, reason="the native core is not built")]

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAID_OUT = [(dtype, "rows") for dtype in DTYPES]
LAID_OUT += [(torch.bfloat16, "columns"), (torch.float32, "columns"), (torch.bfloat16, "strided")]
M, K, N = 19, 56, 150
# What the sums of the kernel may differ from those of fp64 by, as a part of the threshold. Sums of
# fp64 products round as the product does.
EXACT = dict.fromkeys(DTYPES, 0.02) | {torch.float64: 0.4}

Sums = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def launches() -> Iterator[Interpreter | None]:
    """Launches run on the device, or in the interpreter."""
    if CUDA:
        prepare(torch.device("cuda", torch.cuda.current_device()))
        yield None
    else:
        with interpreting() as interpreter:
            yield interpreter


def judged(
    c: torch.Tensor,
    a: torch.Tensor,
    encoding: Sums,
    addend: torch.Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
    **sharing: Any,
) -> tuple[float, tuple[Sums | None, Sums | None]]:
    """The slot after one verdict, and what was shared."""
    slot = torch.zeros(1, dtype=torch.int32, device=c.device)
    tolerance = Tolerance.of(a.dtype, c.dtype, a.shape[-1], c.shape[-1])
    shared = core.kernel_judge(c, slot, a, encoding, addend, beta, alpha, tolerance, **sharing)
    return float(slot.view(torch.float32)), shared


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    return values.mT.contiguous().mT if layout == "columns" else values


@for_each("dtype, layout", LAID_OUT)
def test_the_largest_ratio_is_that_of_fp64(dtype: torch.dtype, layout: str) -> None:
    a, b, c = operands(dtype, M, K, N, layout)
    c = laid_out(c, layout)
    encoding = core.kernel_encode(laid_out(b, layout))
    expected = float(ratios(c, a, b)[0].max())
    assert abs(judged(c, a, encoding)[0] - expected) < EXACT[c.dtype]
    c[7, 5] += 9.0
    expected = float(ratios(c, a, b)[0].max())
    assert expected > 2
    assert judged(c, a, encoding)[0] == pytest.approx(expected, rel=0.01)


@for_each("dtype", DTYPES)
def test_addends_alpha_and_beta(dtype: torch.dtype) -> None:
    a, b, _ = operands(dtype, M, K, N)
    encoding = core.kernel_encode(b)
    bias, whole = random(N, dtype=dtype, seed=3), random(M, N, dtype=dtype, seed=4)
    for addend, beta, alpha in ((30 * bias, 1.0, 1.0), (whole, -2.0, 0.5), (whole, 0.0, 2.0)):
        out = torch.addmm(addend, a, b, beta=beta, alpha=alpha)
        expected = float(ratios(out, a, b, addend, beta, alpha)[0].max())
        assert expected < 1
        assert abs(judged(out, a, encoding, addend, beta, alpha)[0] - expected) < EXACT[dtype]
        out[3, N - 1] += 9.0
        expected = float(ratios(out, a, b, addend, beta, alpha)[0].max())
        assert judged(out, a, encoding, addend, beta, alpha)[0] == pytest.approx(expected, rel=0.01)


@for_each("dtype, layout", LAID_OUT)
def test_encodings_are_those_of_fp64(dtype: torch.dtype, layout: str) -> None:
    for inner, columns in [(13, 150), (9, 1100), (5, 1), (1, 40)]:
        b = random(inner, columns, dtype=dtype, layout=layout)
        row_sum, statistics = core.kernel_encode(b)
        wide = dtype.itemsize >= 4
        assert row_sum.dtype == (torch.float64 if wide else torch.float32)
        terms = b.double() * signs(columns).to(b.device)
        # Higham's bound for a sum of no more than 16 levels.
        bound = 16 * torch.finfo(row_sum.dtype).eps / 2 * terms.abs().sum(-1)
        assert ((row_sum[0].double() - terms.sum(-1)).abs() <= bound).all()
        torch.testing.assert_close(statistics[0].double(), spread(b), rtol=1e-3, atol=0)


@pytest.mark.usefixtures("unwritten_is_nan")
@for_each("dtype, layout", LAID_OUT)
def test_one_launch_encodes_a_weight_in_both_directions(
    launches: Interpreter | None, dtype: torch.dtype, layout: str
) -> None:
    repeated = torch.full((33, 150), 0.1, dtype=dtype, device=DEVICE)
    for b in (random(70, 140, dtype=dtype, layout=layout), laid_out(repeated, layout)):
        found = core.kernel_encode_both(b)
        if launches is not None:
            assert len(launches.launches) == 1
            launches.launches.clear()
        for (sums, spreads), copy, matrix in zip(found[::2], found[1::2], (b, b.mT), strict=True):
            row_sum, statistics = core.kernel_encode(matrix)
            exact = (matrix.double() * signs(matrix.shape[1]).to(b.device)).abs().sum(-1)
            bound = 32 * torch.finfo(sums.dtype).eps / 2 * exact
            assert ((sums - row_sum)[0].double().abs() <= bound).all()
            torch.testing.assert_close(spreads, statistics, rtol=1e-5, atol=0)
            assert torch.equal(sums, copy[0])
            assert torch.equal(spreads, copy[1])
        if launches is not None:
            launches.launches.clear()


def test_rows_that_repeat_have_a_wider_spread() -> None:
    b = torch.full((32, 96), 0.1, device=DEVICE)
    assert (core.kernel_encode(b)[1][0] > 10 * spread(b)).all()
    b[::2] *= 2
    torch.testing.assert_close(core.kernel_encode(b)[1][0], spread(b), rtol=1e-6, atol=0)


@for_each("dtype", DTYPES)
def test_every_fault_of_twice_the_threshold_is_found(dtype: torch.dtype) -> None:
    a, b, c = operands(dtype, M, K, N)
    encoding = core.kernel_encode(b)
    thresholds = ratios(c, a, b)[1]
    assert judged(c, a, encoding)[0] < 1
    for row in range(0, M, 2):
        struck, one = c[row : row + 1].clone(), a[row : row + 1]
        column = (0, N - 1, 7 * row)[row % 3]
        struck[0, column] += 2.2 * float(thresholds[row]) * (-1) ** row
        assert (struck != c[row]).sum() == 1  # with the detector off it reaches the output
        assert judged(struck, one, encoding)[0] > 1


@for_each("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_infinite_ratios(value: float) -> None:
    a, b, c = operands(torch.bfloat16, M, K, N)
    encoding = core.kernel_encode(b)
    c[4, 9] = value
    assert math.isnan(judged(c, a, encoding)[0])  # finite operands cannot have it
    a, b, _ = operands(torch.float32, M, K, N)
    a[18, 0] = value
    assert judged(product(a, b), a, core.kernel_encode(b))[0] == math.inf


def test_zeros_of_either_sign_are_silent() -> None:
    a = torch.zeros(3, 8, dtype=torch.float64, device=DEVICE)
    b = -torch.zeros(8, 5, dtype=torch.float64, device=DEVICE)
    assert judged(a @ b, a, core.kernel_encode(b))[0] < 1


@for_each("distribution, dtype", zip(DISTRIBUTIONS, cycle(DTYPES), strict=False))
def test_no_distribution_raises_a_suspicion(distribution: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (t.to(DEVICE) for t in DISTRIBUTIONS[distribution](16, 64, 48, dtype, generator))
    assert judged(product(a, b), a, core.kernel_encode(b))[0] < 1


def test_many_clean_rows_are_silent() -> None:
    a, b, c = operands(torch.bfloat16, 1024, 64, 64)
    assert judged(c, a, core.kernel_encode(b))[0] < 1


def test_rows_so_small_that_squared_tolerances_underflow_are_silent() -> None:
    a, b = (1e-10 * x for x in operands(torch.float32, M, K, N)[:2])
    c, encoding = product(a, b), core.kernel_encode(b)
    assert judged(c, a, encoding)[0] < 1
    c[3, 5] *= 1.01
    assert judged(c, a, encoding)[0] > 1


def test_sums_of_equal_terms_drift_in_one_direction() -> None:
    # Summed in order, as a plain kernel does: each step rounds the same way as the one before.
    row = random(64, dtype=torch.float32)
    row -= row.mean()
    a, b = torch.full((4, 256), 0.7, device=DEVICE), row.expand(256, 64)
    c = torch.zeros(4, 64, device=DEVICE)
    for _ in range(256):
        c += 0.7 * row
    assert judged(c, a, core.kernel_encode(b))[0] < 1


def test_batches_of_products() -> None:
    a = random(1, M, K, dtype=torch.float16).expand(3, M, K)
    b = random(3, K, N, dtype=torch.float16, seed=1)
    c, encoding = product(a, b), core.kernel_encode(b)
    for matrix in range(3):
        alone = core.kernel_encode(b[matrix])
        assert torch.equal(encoding[0][matrix], alone[0][0])
    expected = float(ratios(c, a, b)[0].max())
    assert abs(judged(c, a, encoding)[0] - expected) < EXACT[c.dtype]
    c[2, 18, 0] += 9.0
    expected = float(ratios(c, a, b)[0].max())
    assert judged(c, a, encoding)[0] == pytest.approx(expected, rel=0.01)


@for_each("shape", [(1, 1, 1), (2, 1, 3), (1, 300, 1), (65, 16, 8), (0, 3, 4), (3, 0, 4)])
def test_small_and_empty_products(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    for dtype in (torch.float32, torch.bfloat16):
        a, b = random(rows, inner, dtype=dtype), random(inner, columns, dtype=dtype, seed=1)
        encoding = core.kernel_encode(b)
        c = product(a, b)
        assert judged(c, a, encoding)[0] < 1
        if rows and inner:
            c[-1, -1] += 50.0
            assert judged(c, a, encoding)[0] > 1


@pytest.mark.usefixtures("unwritten_is_nan")
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_what_later_products_need_comes_from_the_same_pass(dtype: torch.dtype) -> None:
    """Y = X Wᵀ encodes X, and dX = dY W sums columns of dY, so that dW = dYᵀ X reads neither."""
    x, weight = random(70, 20, dtype=dtype), random(140, 20, dtype=dtype, seed=1)
    grad = random(70, 140, dtype=dtype, seed=2)
    ratio, (of_x, _) = judged(
        product(x, weight.mT), x, core.kernel_encode(weight.mT), encode_a=True
    )
    assert ratio < 1
    assert of_x is not None
    for ours, alone in zip(of_x, core.kernel_encode(x), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)
    of_w = core.kernel_encode(weight)
    across = (of_x[0][0], of_x[1][0])
    ratio, (_, sums) = judged(product(grad, weight), grad, of_w, across=across)
    assert ratio == pytest.approx(judged(product(grad, weight), grad, of_w)[0], abs=1e-3)
    assert sums is not None
    wide = grad.double()
    torch.testing.assert_close(sums[0].double(), wide.mT @ across[0].double(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        sums[1].double(), wide.square().mT @ across[1].double(), rtol=1e-3, atol=0
    )
    grad_weight = product(grad.mT, x)
    expected = float(ratios(grad_weight, grad.mT, x)[0].max())
    assert abs(judged(grad_weight, grad.mT, of_x, known=sums)[0] - expected) < EXACT[dtype]
    grad_weight[100, 3] += 60.0
    expected = float(ratios(grad_weight, grad.mT, x)[0].max())
    assert judged(grad_weight, grad.mT, of_x, known=sums)[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.usefixtures("unwritten_is_nan")
@for_each("dtype, tokens, outputs", [(torch.bfloat16, 70, 140), (torch.float32, 136, 24)])
def test_a_check_of_dw_that_comes_first_sums_what_that_of_dx_needs(
    launches: Interpreter | None, dtype: torch.dtype, tokens: int, outputs: int
) -> None:
    """Without a bias dW = dYᵀ X comes first; the check of dX = dY W then reads nothing of dY."""
    x, weight = random(tokens, 20, dtype=dtype), random(outputs, 20, dtype=dtype, seed=1)
    grad = random(tokens, outputs, dtype=dtype, seed=2)
    of_x, of_w = core.kernel_encode(x), core.kernel_encode(weight)
    across = (of_w[0][0], of_w[1][0])
    for fault in (0.0, 60.0):
        grad_weight, grad_x = product(grad.mT, x), product(grad, weight)
        grad_weight[outputs - 2, 3] += fault
        grad_x[tokens - 1, 3] += fault
        ratio, (_, sums) = judged(grad_weight, grad.mT, of_x, across=across)
        if launches is not None:
            assert launches.launches[-1].request.variant.turned
        assert sums is not None
        for found, of in (
            (ratio, (grad_weight, grad.mT, x)),
            (judged(grad_x, grad, of_w, known=sums)[0], (grad_x, grad, weight)),
        ):
            expected = float(ratios(*of)[0].max())
            assert (expected > 1) == (fault > 0)
            assert found == pytest.approx(expected, rel=0.01, abs=EXACT[dtype])
    wide = grad.double(), grad.double().square()
    for found, values, by in zip(sums, wide, across, strict=True):
        torch.testing.assert_close(found.double(), values @ by.double(), rtol=1e-3, atol=1e-3)


def test_a_slot_keeps_the_largest_ratio_and_counters_end_at_zero(launches: Interpreter) -> None:
    a, b, c = operands(torch.float32, 70, 40, 30)
    encoding, slot = core.kernel_encode(b), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    tolerance = Tolerance.of(a.dtype, c.dtype, 40, 30)
    damaged = c.clone()
    damaged[5, 5] += 1.0
    core.kernel_judge(damaged, slot, a, encoding, None, 1.0, 1.0, tolerance)
    found = int(slot)
    core.kernel_judge(c, slot, a, encoding, None, 1.0, 1.0, tolerance)
    assert int(slot) == found > 0
    core.kernel_judge(damaged, slot.zero_(), a, encoding, None, 1.0, 1.0, tolerance)
    assert int(slot) == found


# The encoder of blocks of columns, for products that are verified in the accumulator.


@for_each("dtype", [*DTYPES[1:], torch.float8_e4m3fn])
def test_blocks_are_the_checksums_of_their_columns(dtype: torch.dtype) -> None:
    b = random(40, 150, dtype=dtype)
    encoded = passes.encode(b, block=64)
    assert encoded.block == 64
    assert encoded.sums.shape == (1, 3, 2, 40)
    signed = b.double() * signs(150).to(b.device)
    for index, columns in enumerate(signed.split(64, -1)):
        bound = 16 * torch.finfo(torch.float32).eps / 2 * columns.abs().sum(-1)
        assert ((encoded.sums[0, index, 0].double() - columns.sum(-1)).abs() <= bound).all()


@pytest.mark.usefixtures("unwritten_is_nan")
@for_each("shape", [(40, 150), (4, 0), (0, 4)])
def test_nothing_is_left_unwritten(shape: tuple[int, int]) -> None:
    b = random(*shape, dtype=torch.float16)
    assert passes.encode(b, block=64).sums.isfinite().all()
    assert core.kernel_encode(b)[0].isfinite().all()

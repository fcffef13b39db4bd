"""The Triton verification of a finished product: silent on clean data, sure on damaged data."""

from itertools import cycle

import torch
from case_loops import for_each
from gemm_distributions import DISTRIBUTIONS
from triton_cases import (
    DEVICE,
    DTYPES,
    FP8,
    LAID_OUT,
    MARKS,
    OUTPUT,
    product,
    random,
    reference,
)

from holdfast.abft.gemm import cuda as passes
from holdfast.abft.gemm.cuda_types import Mode
from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.abft.triton.tolerance import Tolerance

pytestmark = MARKS

# Single and half precision in turn: the interpreter takes a second for each.
ALTERNATING = list(zip(DISTRIBUTIONS, cycle([torch.float32, torch.bfloat16])))

MODES: tuple[Mode, ...] = ("recompute", "checksum", "detect")
M, K, N = 19, 200, 150


def _operands(dtype: torch.dtype, layout: str = "rows") -> tuple[torch.Tensor, ...]:
    a, b = random(M, K, dtype=dtype, layout=layout), random(K, N, dtype=dtype, seed=1)
    return a, b, product(a, b)


def _verify(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, mode: Mode) -> passes.Verdict:
    return passes.verify(c, a, passes.encode(b, weighted=mode == "checksum"), b, mode=mode)


@for_each("dtype, layout", LAID_OUT[:-1])
def test_rows_are_measured_as_in_fp64(dtype: torch.dtype, layout: str) -> None:
    a, b, c = _operands(dtype, layout)
    c = c.mT.contiguous().mT if layout == "columns" else c
    rows = _verify(c, a, b, "detect").rows
    assert rows is not None
    expected = reference(c, a, b, Tolerance.of(dtype, c.dtype, K, N))
    residual, threshold, energy = rows.double()
    # The pass itself computes far more finely than what it has to judge.
    assert ((residual - expected[0]).abs() < 0.02 * expected[1]).all()
    torch.testing.assert_close(threshold, expected[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(energy, expected[2], rtol=1e-5, atol=0)


@for_each("dtype", DTYPES[:3])
def test_the_threshold_is_that_of_the_registry(dtype: torch.dtype) -> None:
    a, b, c = _operands(dtype)
    rows = _verify(c, a, b, "detect").rows
    assert rows is not None
    ratio = rows[1].double() / REGISTRY["rounding"](Product(a, b, c, dtype))
    # Nearly: for 16 bits the registry bounds the walk by the largest row of B.
    assert 0.98 < float(ratio.min()) <= float(ratio.max()) < 1.02


@for_each("mode", MODES)
@for_each("dtype", DTYPES)
def test_clean_rows_are_silent_and_keep_their_bits(dtype: torch.dtype, mode: Mode) -> None:
    a, b, c = _operands(dtype)
    before = c.clone()
    verdict = _verify(c, a, b, mode)
    assert verdict.counts.tolist() == [0, 0]
    assert verdict.status.shape == (1, M)
    assert not verdict.status.any()
    assert torch.equal(c, before)


@for_each("distribution, dtype", ALTERNATING)
def test_no_distribution_raises_a_suspicion(distribution: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    operands = DISTRIBUTIONS[distribution](48, 256, 64, dtype, generator)
    a, b = (t.to(DEVICE) for t in operands)
    c = product(a, b)
    before = c.clone()
    assert _verify(c, a, b, "recompute").counts.tolist() == [0, 0]
    assert torch.equal(c, before)


def test_rows_so_small_that_squared_tolerances_underflow_are_silent() -> None:
    a, b = (1e-10 * x for x in _operands(torch.float32)[:2])
    c = product(a, b)
    assert _verify(c, a, b, "detect").counts.tolist() == [0, 0]
    c[3, 5] *= 1.01
    assert _verify(c, a, b, "detect").counts.tolist() == [1, 0]


def test_sums_of_equal_terms_drift_in_one_direction() -> None:
    # Summed in order, as a plain kernel does: each step rounds the same way as the one before.
    row = random(64, dtype=torch.float32)
    row -= row.mean()
    a = torch.full((4, 2048), 0.7, device=DEVICE)
    b = row.expand(2048, 64)
    c = torch.zeros(4, 64, device=DEVICE)
    for _ in range(2048):
        c += 0.7 * row
    checksums = passes.encode(b)
    assert not passes.verify(c, a, checksums, mode="detect").status.any()
    walking = Tolerance.of(torch.float32, torch.float32, 2048, 64)._replace(drift=0.0)
    assert passes.verify(c, a, checksums, mode="detect", tolerance=walking).status.all()


@for_each("mode", ["recompute", "checksum"])
def test_batches(mode: Mode) -> None:
    a = random(1, M, K, dtype=torch.float16).expand(3, M, K)
    b = random(3, K, N, dtype=torch.float16, seed=1)
    c = product(a, b)
    damaged = c.clone()
    damaged[1, 4, 7], damaged[2, 18, 0] = 500.0, torch.inf
    verdict = _verify(damaged, a, b, mode)
    assert verdict.counts.tolist() == [2, 2]
    assert verdict.status.nonzero().tolist() == [[1, 4], [2, 18]]
    torch.testing.assert_close(damaged, c, rtol=1e-2, atol=0.2)


def test_counts_add_up_over_calls() -> None:
    a, b, c = _operands(torch.bfloat16)
    checksums, counts = passes.encode(b), torch.zeros(2, dtype=torch.int32, device=c.device)
    for row in (1, 7):
        c[row, 3] = 1e4
        passes.verify(c, a, checksums, b, counts=counts)
    assert counts.tolist() == [2, 2]


def test_a_given_tolerance_is_used() -> None:
    a, b, c = _operands(torch.bfloat16)
    blind = Tolerance(scale=1.0, output=0.0, walk=0.0, drift=0.0, floor=1e30)
    c[3, 3] = 1e6
    checksums = passes.encode(b)
    assert not passes.verify(c, a, checksums, b, tolerance=blind).status.any()
    assert passes.verify(c, a, checksums, b).status.any()


@for_each("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (2, 1, 3)])
def test_small_and_empty_products(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b = random(rows, inner, dtype=FP8), random(inner, columns, dtype=FP8, seed=1)
    c = product(a, b).to(OUTPUT[FP8])
    for mode in MODES:
        verdict = _verify(c, a, b, mode)
        assert verdict.status.shape == (1, rows)
        assert not verdict.status.any()

"""The Triton verification of a finished product: silent when clean, faults found and repaired."""

from itertools import cycle

import pytest
import torch
from case_loops import for_each
from gemm_distributions import DISTRIBUTIONS
from triton_cases import (
    DTYPES,
    FP8,
    LAID_OUT,
    OUTPUT,
    exact,
    faults,
    operands,
    product,
    random,
    reference,
    spread,
    verified,
)
from triton_device import DEVICE, MARKS

from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm import cuda as passes
from holdfast.abft.gemm.cuda import RowStatus
from holdfast.abft.gemm.cuda_types import Mode
from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.abft.triton.tolerance import Tolerance

pytestmark = MARKS

# Single and half precision in turn: the interpreter takes a second for each.
ALTERNATING = list(zip(DISTRIBUTIONS, cycle([torch.float32, torch.bfloat16])))

MODES: tuple[Mode, ...] = ("recompute", "detect")
M, K, N = 19, 200, 150


@for_each("dtype, layout", LAID_OUT[:-1])
def test_rows_are_measured_as_in_fp64(dtype: torch.dtype, layout: str) -> None:
    a, b, c = operands(dtype, M, K, N, layout)
    c = c.mT.contiguous().mT if layout == "columns" else c
    rows = verified(c, a, b, "detect").rows
    assert rows is not None
    expected = reference(c, a, b, Tolerance.of(dtype, c.dtype, K, N))
    residual, threshold, energy = rows.double()
    # The pass itself computes far more finely than what it has to judge.
    assert ((residual - expected[0]).abs() < 0.02 * expected[1]).all()
    torch.testing.assert_close(threshold, expected[1], rtol=1e-3, atol=0)
    torch.testing.assert_close(energy, expected[2], rtol=1e-5, atol=0)


@for_each("dtype", DTYPES[:3])
def test_the_threshold_is_that_of_the_registry(dtype: torch.dtype) -> None:
    a, b, c = operands(dtype, M, K, N)
    rows = verified(c, a, b, "detect").rows
    assert rows is not None
    ratio = rows[1].double() / REGISTRY["rounding"](Product(a, b, c, dtype))
    # Nearly: for 16 bits the registry bounds the walk by the largest row of B.
    assert 0.98 < float(ratio.min()) <= float(ratio.max()) < 1.02


@for_each("mode", MODES)
@for_each("dtype", DTYPES)
def test_clean_rows_are_silent_and_keep_their_bits(dtype: torch.dtype, mode: Mode) -> None:
    a, b, c = operands(dtype, M, K, N)
    before = c.clone()
    verdict = verified(c, a, b, mode)
    assert verdict.counts.tolist() == [0, 0]
    assert verdict.status.shape == (1, M)
    assert not verdict.status.any()
    assert torch.equal(c, before)


@for_each("distribution, dtype", ALTERNATING)
def test_no_distribution_raises_a_suspicion(distribution: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (t.to(DEVICE) for t in DISTRIBUTIONS[distribution](48, 256, 64, dtype, generator))
    c = product(a, b)
    before = c.clone()
    assert verified(c, a, b, "recompute").counts.tolist() == [0, 0]
    assert torch.equal(c, before)
    assert passes.matmul_online(a, b)[1].counts.tolist() == [0, 0]


def test_rows_so_small_that_squared_tolerances_underflow_are_silent() -> None:
    a, b = (1e-10 * x for x in operands(torch.float32, M, K, N)[:2])
    c = product(a, b)
    assert verified(c, a, b, "detect").counts.tolist() == [0, 0]
    c[3, 5] *= 1.01
    assert verified(c, a, b, "detect").counts.tolist() == [1, 0]


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


def test_batches() -> None:
    a = random(1, M, K, dtype=torch.float16).expand(3, M, K)
    b = random(3, K, N, dtype=torch.float16, seed=1)
    c = product(a, b)
    damaged = c.clone()
    damaged[1, 4, 7], damaged[2, 18, 0] = 500.0, torch.inf
    verdict = verified(damaged, a, b, "recompute")
    assert verdict.counts.tolist() == [2, 2]
    assert verdict.status.nonzero().tolist() == [[1, 4], [2, 18]]
    torch.testing.assert_close(damaged, c, rtol=1e-2, atol=0.2)


def test_counts_add_up_over_calls_and_a_given_tolerance_is_used() -> None:
    a, b, c = operands(torch.bfloat16, M, K, N)
    checksums, counts = passes.encode(b), torch.zeros(2, dtype=torch.int32, device=c.device)
    blind = Tolerance(scale=1.0, output=0.0, walk=0.0, drift=0.0, floor=1e30)
    for row in (1, 7):
        c[row, 3] = 1e4
        assert not passes.verify(c, a, checksums, b, tolerance=blind).status.any()
        passes.verify(c, a, checksums, b, counts=counts)
    assert counts.tolist() == [2, 2]


@for_each("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (1, 1, 1), (2, 1, 3)])
def test_small_and_empty_products(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    a, b = random(rows, inner, dtype=FP8), random(inner, columns, dtype=FP8, seed=1)
    c = product(a, b).to(OUTPUT[FP8])
    for mode in MODES:
        verdict = verified(c, a, b, mode)
        assert verdict.status.shape == (1, rows)
        assert not verdict.status.any()


def _damage(c: torch.Tensor) -> tuple[torch.Tensor, list[int], list[str]]:
    """A copy with one fault a row, in changing columns; rows 0, 2, … stay clean."""
    damaged, rows, kinds = c.clone(), [], []
    for index, kind in enumerate(faults(c[0, 0])):
        row, column = (2 * index + 1) % c.shape[0], (0, c.shape[1] - 1, 7 * index)[index % 3]
        damaged[row, column] = faults(c[row, column])[kind]
        rows.append(row)
        kinds.append(kind)
    return damaged, rows, kinds


def _certain(c: torch.Tensor, damaged: torch.Tensor, rows: list[int], verdict: passes.Verdict):
    """Of the damaged rows those whose change exceeds twice the clean row's threshold."""
    assert verdict.rows is not None
    change = (damaged.double() - c.double()).abs().nan_to_num(torch.inf).amax(-1)
    return [row for row in rows if change[row] > 2 * verdict.rows[1, 0, row]]


@for_each("dtype", DTYPES)
def test_faults_are_found_and_repaired(dtype: torch.dtype) -> None:
    a, b, c = operands(dtype, 24, K, N)
    clean = verified(c, a, b, "detect")
    damaged, rows, kinds = _damage(c)
    certain = _certain(c, damaged, rows, clean)
    assert len(certain) >= len(rows) - 2, kinds  # not every low exponent flip is large
    assert not torch.equal(damaged, c)  # with the detector off they reach the output

    detected = damaged.clone()
    verdict = verified(detected, a, b, "detect")
    suspects = verdict.status[0].nonzero().flatten().tolist()
    assert set(certain) <= set(suspects) <= set(rows)
    assert verdict.counts.tolist() == [len(suspects), 0]
    assert torch.equal(detected.nan_to_num(3.0), damaged.nan_to_num(3.0))

    clean_rows = [row for row in range(24) if row not in rows]
    repaired = damaged.clone()
    verdict = verified(repaired, a, b, "recompute")
    status = verdict.status[0]
    assert (status[certain] == RowStatus.CORRECTED).all(), kinds
    assert not status[clean_rows].any()
    assert verdict.counts.tolist() == [len(suspects), int((status == 2).sum())]
    assert torch.equal(repaired[clean_rows], c[clean_rows])
    assert verified(repaired, a, b, "detect").counts.tolist() == [0, 0]
    # At most each side's rounding.
    limit = 4 * torch.finfo(c.dtype).eps / 2 * c.double().abs() + 1e-5 * N
    assert ((repaired.double() - exact(a, b)).abs() <= limit)[certain].all()


def test_a_fault_at_every_position_of_a_row() -> None:
    columns = 70
    a = random(1, K, dtype=torch.float32).expand(columns, K)
    b = random(K, columns, dtype=torch.float32, seed=1)
    c = product(a, b)
    damaged = c + 5 * torch.eye(columns, device=c.device)
    verdict = verified(damaged, a, b, "recompute")
    assert (verdict.status == RowStatus.CORRECTED).all()
    torch.testing.assert_close(damaged, c, rtol=1e-5, atol=1e-4)


def test_two_faults_in_a_row() -> None:
    a, b, c = operands(torch.float32, M, K, N)
    for columns in ([3, 4], [0, N - 1], [8, 64]):
        damaged = c.clone()
        damaged[5, columns] += c.new_tensor([40.0, 70.0])
        verdict = verified(damaged, a, b, "recompute")
        assert verdict.counts.tolist() == [1, 1]
        assert verdict.status[0].nonzero().flatten().tolist() == [5]
        torch.testing.assert_close(damaged, c, rtol=1e-5, atol=1e-4)


def test_a_damaged_checksum_leaves_the_product_alone() -> None:
    a, b, c = operands(torch.bfloat16, M, K, N)
    before = c.clone()
    for row in (0, 1):  # the signed sums, and the spread, which must not hide what is there
        checksums = passes.encode(b)
        checksums.sums[0, 0, row, 17] = torch.nan if row else 1e4
        verdict = passes.verify(c, a, checksums, b)
        assert verdict.counts[0] > M // 2
        assert (verdict.status != RowStatus.CORRECTED).all()
        assert torch.equal(c, before)


@for_each("mode", MODES)
def test_an_operand_that_is_not_finite_is_no_fault_of_the_product(mode: Mode) -> None:
    for value in (torch.nan, torch.inf):
        a, b, _ = operands(torch.float16, M, K, N)
        a[4, 9] = value
        c = product(a, b)
        before = c.clone()
        verdict = verified(c, a, b, mode)
        assert verdict.status[0].nonzero().flatten().tolist() == [4]
        assert verdict.status[0, 4] == RowStatus.SUSPECT
        assert torch.equal(c.nan_to_num(7.0), before.nan_to_num(7.0))


# The encoder, against fp64 arithmetic.
SHAPES = [(37, 150), (64, 1100), (5, 1), (1, 40)]


def _within_summation_error(actual: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype) -> bool:
    """Higham's bound for a sum of no more than 16 levels: 16 u Σ|terms|."""
    bound = 16 * torch.finfo(dtype).eps / 2 * terms.abs().sum(-1)
    return bool(((actual.double() - terms.sum(-1)).abs() <= bound).all())


@for_each("dtype, layout", LAID_OUT)
def test_whole_rows(dtype: torch.dtype, layout: str) -> None:
    for inner, columns in SHAPES:
        b = random(inner, columns, dtype=dtype, layout=layout)
        sums = passes.encode(b).sums
        assert sums.shape == (1, 1, 2, inner)
        assert sums.dtype == (torch.float64 if dtype == torch.float32 else torch.float32)
        signed = b.double() * signs(columns).to(b.device)
        assert _within_summation_error(sums[0, 0, 0], signed, sums.dtype)
        torch.testing.assert_close(sums[0, 0, 1].double(), spread(b), rtol=1e-3, atol=0)


@for_each("dtype", DTYPES)
def test_blocks_are_the_checksums_of_their_columns(dtype: torch.dtype) -> None:
    b = random(40, 150, dtype=dtype)
    encoded = passes.encode(b, block=64)
    assert encoded.block == 64
    assert encoded.sums.shape == (1, 3, 2, 40)
    assert encoded.sums.dtype == torch.float32
    signed = b.double() * signs(150).to(b.device)
    for index, columns in enumerate(signed.split(64, -1)):
        assert _within_summation_error(encoded.sums[0, index, 0], columns, torch.float32)


def test_batches_broadcast_ones_included() -> None:
    b = random(3, 33, 70, dtype=torch.float16)
    each = torch.cat([passes.encode(matrix).sums for matrix in b])
    assert torch.equal(passes.encode(b).sums, each)
    repeated = passes.encode(b[:1].expand(2, 33, 70)).sums
    assert torch.equal(repeated, each[:1].expand(2, *each.shape[1:]))


def test_rows_that_repeat_have_a_wider_spread() -> None:
    b = torch.full((32, 96), 0.1, device=random(1, 1, dtype=FP8).device)
    drifting, repeating = spread(b), passes.encode(b).sums[0, 0, 1]
    assert (repeating > 10 * drifting).all()
    b[::2] *= 2
    torch.testing.assert_close(passes.encode(b).sums[0, 0, 1], spread(b), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("unwritten_is_nan")
@for_each("shape", [(40, 150), (4, 0), (0, 4)])
def test_nothing_is_left_unwritten(shape: tuple[int, int]) -> None:
    assert passes.encode(random(*shape, dtype=torch.float16)).sums.isfinite().all()

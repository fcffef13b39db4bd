"""The Triton GEMM that verifies its accumulator: right, silent, and sure of small faults."""

from functools import partial

import pytest
import torch
from case_loops import for_each
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
    ratios,
)
from triton_device import DEVICE, MARKS

from holdfast import events
from holdfast.abft import policy
from holdfast.abft.gemm import cuda as passes
from holdfast.abft.gemm.cuda import RowStatus
from holdfast.abft.gemm.op import MATMUL
from holdfast.abft.gemm.row_tolerances import tile_tolerances
from holdfast.abft.thresholds import REGISTRY
from holdfast.abft.triton.tolerance import Tolerance
from holdfast.errors import UncorrectableFault

pytestmark = MARKS


M, K, N = 70, 200, 150
BLOCK = 64


def _faults(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32, device=DEVICE)


def _online(a: torch.Tensor, b: torch.Tensor, **options) -> tuple[torch.Tensor, passes.Verdict]:
    return passes.matmul_online(a, b, passes.encode(b, block=BLOCK), **options)


@for_each("dtype, layout", LAID_OUT)
def test_the_product_is_right(dtype: torch.dtype, layout: str) -> None:
    for m, k, n in [(M, K, N), (1, 7, 1), (65, 16, 64)]:
        a = random(m, k, dtype=dtype, layout=layout)
        b = random(k, n, dtype=dtype, seed=1, layout="columns" if layout == "columns" else "rows")
        truth = exact(a, b)
        c, verdict = passes.matmul_online(a, b)
        assert c.dtype == OUTPUT[dtype]
        error, torchs = ((x.double() - truth).abs().max() for x in (c, product(a, b)))
        unit = torch.finfo(c.dtype).eps / 2
        assert error <= 2 * torchs + unit * truth.abs().max()
        assert not verdict.status.any()


@for_each("dtype", DTYPES)
def test_verified_and_unverified_have_the_same_bits(dtype: torch.dtype) -> None:
    a, b, _ = operands(dtype, M, K, N)
    c, verdict = _online(a, b)
    assert torch.equal(c, passes.matmul(a, b, block=BLOCK))
    assert verdict.counts.tolist() == [0, 0]
    assert verdict.status.shape == (3, M)
    assert not verdict.status.any()


@for_each("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_output_may_have_another_dtype(out_dtype: torch.dtype) -> None:
    a, b, _ = operands(torch.float16, M, K, N)
    c, _ = passes.matmul_online(a, b, out_dtype=out_dtype)
    # The interpreter cuts bf16 off where a device rounds to nearest.
    unit = torch.finfo(out_dtype).eps if out_dtype == torch.bfloat16 else 0.0
    accumulator = passes.matmul(a, b, out_dtype=torch.float32)
    assert c.dtype == out_dtype
    torch.testing.assert_close(c, accumulator.to(out_dtype), rtol=unit, atol=0)


@for_each("dtype", DTYPES)
def test_faults_in_the_accumulator_are_found_and_repaired(dtype: torch.dtype) -> None:
    a, b, _ = operands(dtype, M, K, N)
    clean, _ = _online(a, b)
    accumulator = passes.matmul(a, b, block=BLOCK, out_dtype=torch.float32)
    struck = []
    for index, kind in enumerate(faults(accumulator[0, 0])):
        row, column = 5 * index, (0, N - 1, 9 * index)[index % 3]
        struck.append((row, column, float(faults(accumulator[row, column])[kind]), 1))
    injected = _faults(*struck)

    damaged, verdict = _online(a, b, mode="detect", faults=injected)
    assert not torch.equal(damaged, clean)  # without repair they reach the output
    places = sorted((column // BLOCK, row) for row, column, _, _ in struck)
    assert verdict.status.nonzero().tolist() == [list(place) for place in places]
    assert verdict.counts.tolist() == [len(struck), 0]

    repaired, verdict = _online(a, b, faults=injected)
    assert torch.equal(repaired, clean)
    assert verdict.counts.tolist() == [len(struck), len(struck)]
    assert verdict.status.nonzero().tolist() == [list(place) for place in places]
    assert int(verdict.status.max()) == RowStatus.CORRECTED


def test_a_fault_far_below_the_outputs_rounding_is_seen() -> None:
    a, b = random(M, 1024, dtype=torch.bfloat16), random(1024, N, dtype=torch.bfloat16, seed=1)
    accumulator = passes.matmul(a, b, out_dtype=torch.float32, block=BLOCK)
    small = float(ratios(accumulator.bfloat16(), a, b)[1][8]) / 100  # of what the output hides
    injected = _faults((8, 70, float(accumulator[8, 70]) + small, 1))
    _, verdict = _online(a, b, faults=injected)
    assert verdict.status.nonzero().tolist() == [[1, 8]]
    assert verdict.counts.tolist() == [1, 1]


def test_several_faults_in_one_tile_and_one_row() -> None:
    a, b, _ = operands(torch.float16, M, K, N)
    clean, _ = _online(a, b)
    injected = _faults((3, 5, 1e3, 1), (3, 6, -1e3, 1), (3, 100, 1e3, 1), (4, 5, torch.nan, 1))
    c, verdict = _online(a, b, faults=injected)
    assert torch.equal(c, clean)
    assert verdict.counts.tolist() == [3, 3]


def test_a_fault_that_persists_is_reported_as_such() -> None:
    a, b, _ = operands(torch.float32, M, K, N)
    clean, _ = _online(a, b)
    c, verdict = _online(a, b, faults=_faults((66, 149, 1e4, 99), (0, 149, 1e4, 1)))
    assert verdict.counts.tolist() == [2, 1]
    assert verdict.status[2, 66] == RowStatus.SUSPECT
    assert verdict.status[2, 0] == RowStatus.CORRECTED
    assert float(c[66, 149]) == 1e4
    c[66, 149] = clean[66, 149]
    assert torch.equal(c, clean)


def test_a_damaged_checksum_leaves_the_product_right() -> None:
    a, b, _ = operands(torch.float16, M, K, N)
    clean, _ = _online(a, b)
    for plane in (0, 1):
        checksums = passes.encode(b, block=BLOCK)
        checksums.sums[0, 1, plane, 30] = torch.nan if plane else 1e4
        c, verdict = passes.matmul_online(a, b, checksums)
        assert torch.equal(c, clean)
        assert (verdict.status[1] == RowStatus.SUSPECT).sum() > M // 2
        assert not verdict.status[[0, 2]].any()


def test_an_operand_that_is_not_finite_is_reported_and_multiplied() -> None:
    a, b, _ = operands(torch.float16, M, K, N)
    a[4, 9] = torch.inf
    c, verdict = _online(a, b)
    assert verdict.status.nonzero().tolist() == [[0, 4], [1, 4], [2, 4]]
    assert verdict.counts.tolist() == [3, 0]
    assert torch.equal(c[4].isfinite(), torch.zeros(N, dtype=torch.bool, device=DEVICE))


def test_long_sums_are_predicted_in_parts() -> None:
    a, b = random(3, 2100, dtype=FP8), random(2100, 40, dtype=FP8, seed=1)
    c, verdict = passes.matmul_online(a, b, out_dtype=torch.float32)
    assert not verdict.status.any()
    torch.testing.assert_close(c.double(), exact(a, b), rtol=1e-4, atol=1e-3)
    _, verdict = passes.matmul_online(a, b, faults=_faults((1, 7, 50.0, 1)))
    assert verdict.counts.tolist() == [1, 1]


def test_counts_and_tolerance_can_be_given() -> None:
    a, b, _ = operands(torch.float32, M, K, N)
    counts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    injected = _faults((1, 1, 1e4, 1))
    for _ in range(2):
        passes.matmul_online(a, b, counts=counts, faults=injected)
    assert counts.tolist() == [2, 2]
    blind = Tolerance(scale=1.0, output=0.0, walk=0.0, drift=0.0, floor=1e30)
    c, verdict = passes.matmul_online(a, b, tolerance=blind, faults=injected)
    assert not verdict.status.any()
    assert float(c[1, 1]) == 1e4


@for_each("method", [name for name in REGISTRY if name != "rounding"])
def test_a_published_threshold_bounds_the_rows_of_each_tile(method: str) -> None:
    dtype, threshold = torch.bfloat16 if method == "vabft" else torch.float32, REGISTRY[method]
    a, b, _ = operands(dtype, M, K, N)
    accumulator = passes.matmul(a, b, block=BLOCK, out_dtype=torch.float32)
    clean, verdict = _online(a, b, threshold=threshold)
    assert torch.equal(clean, passes.matmul(a, b, block=BLOCK))
    assert not verdict.status.any()
    bounds = tile_tolerances(a, b, BLOCK, threshold, dtype)
    above = float(accumulator[8, 70] + 4 * bounds[1, 8])
    below = float(accumulator[9, 140] + bounds[2, 9] / 8)
    injected = _faults((8, 70, above, 1), (9, 140, below, 1))
    found, verdict = _online(a, b, threshold=threshold, faults=injected)
    assert verdict.status.nonzero().tolist() == [[1, 8]]
    assert torch.equal(found[:, :128], clean[:, :128])


@pytest.mark.usefixtures("unwritten_is_nan")
@for_each("shape", [(M, K, N), (1, 1, 1), (0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_nothing_is_left_unwritten(shape: tuple[int, int, int]) -> None:
    a, b, _ = operands(torch.float32, *shape)
    c, verdict = passes.matmul_online(a, b)
    torch.testing.assert_close(c.double(), exact(a, b), rtol=1e-5, atol=1e-4)
    assert not verdict.status.any()


@pytest.mark.parametrize("correction", ["recompute", "checksum", "detect"])
def test_the_registered_product_leaves_its_suspect_rows_to_the_policy(
    correction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (triton,) = (each for each in MATMUL.implementations if each.name == "triton")
    multiply = triton.load()
    assert not triton.enabled
    a, b = operands(torch.float32, M, K, N)[:2]
    stacked = torch.stack([a, a])
    assert torch.equal(multiply(stacked, b[None])[1], passes.matmul(a, b))
    assert not events.recent()
    injected = _faults((8, 70, 3e3, 1))
    faulty = partial(passes.matmul_online, faults=injected)
    monkeypatch.setattr(passes, "matmul_online", faulty)
    monkeypatch.setattr(policy.process, "correction", correction)
    assert not torch.equal(faulty(a, b, mode="detect")[0], passes.matmul(a, b))
    if correction == "detect":
        with pytest.raises(UncorrectableFault, match="row 8 differs from its recomputation"):
            multiply(a, b)
        return
    assert torch.equal(multiply(stacked, b), passes.matmul(stacked.flatten(0, 1), b).view(2, M, N))
    (event,) = events.recent()
    assert (event.kind, event.rung) == ("gemm_fault", "correct")
    assert event.detail["index"] == [0, 8, 70]

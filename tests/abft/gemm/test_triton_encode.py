"""The Triton encoder against fp64 arithmetic."""

import torch
from case_loops import for_each
from triton_cases import DTYPES, FP8, LAID_OUT, MARKS, random, spread

from holdfast.abft.checksums.positions import encoding
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm import cuda as passes

pytestmark = MARKS

EPS = torch.finfo(torch.float32).eps
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


@for_each("dtype", DTYPES)
def test_weighted_checksums_are_those_of_the_position_code(dtype: torch.dtype) -> None:
    for inner, columns in [(37, 150), (64, 3)]:
        b = random(2, inner, columns, dtype=dtype)
        weighted = passes.encode(b, weighted=True).weighted
        table = encoding(columns, accumulate=torch.float64).table[1:].to(b.device)
        terms = b.double().unsqueeze(1) * table[:, None]
        assert weighted is not None
        assert weighted.shape == (2, len(table), inner)
        bound = columns * EPS / 2 * terms.abs().sum(-1)
        assert ((weighted - terms.sum(-1)).abs() <= bound).all()


def test_rows_that_repeat_have_a_wider_spread() -> None:
    b = torch.full((32, 96), 0.1, device=random(1, 1, dtype=FP8).device)
    drifting, repeating = spread(b), passes.encode(b).sums[0, 0, 1]
    assert (repeating > 10 * drifting).all()
    b[::2] *= 2
    torch.testing.assert_close(passes.encode(b).sums[0, 0, 1], spread(b), rtol=1e-6, atol=0)


def test_the_same_bits_every_time() -> None:
    b = random(100, 300, dtype=torch.bfloat16)
    assert torch.equal(passes.encode(b).sums, passes.encode(b.clone()).sums)


def test_nothing_is_left_unwritten() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        for shape in [(40, 150), (4, 0), (0, 4)]:
            encoded = passes.encode(random(*shape, dtype=torch.float16), weighted=True)
            assert encoded.weighted is not None
            assert encoded.sums.isfinite().all()
            assert encoded.weighted.isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)

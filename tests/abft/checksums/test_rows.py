"""Row checksums, and the fixed sequence of random signs that weighs them."""

import math

import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.abft.checksums.rows import encode_rows, fingerprint, row_residual, self_consistent
from holdfast.abft.checksums.weights import ones, signs


@given(
    m=st.integers(1, 9),
    k=st.integers(1, 9),
    n=st.integers(1, 9),
    batch=st.integers(0, 3),
    beta=st.sampled_from([0.0, 1.0, -0.5]),
    alpha=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_the_residual_of_integers_is_exactly_zero(
    m: int, k: int, n: int, batch: int, beta: float, alpha: float
) -> None:
    lead = (batch,) if batch else ()
    a, b = (torch.randint(-9, 9, (*lead, *s)).double() for s in ((m, k), (k, n)))
    addend = torch.randint(-9, 9, (n,)).double()
    c = beta * addend + alpha * (a @ b)
    assert not row_residual(c, a, encode_rows(b), addend, beta, alpha).any()


@given(row=st.integers(0, 4), column=st.integers(0, 6), change=st.sampled_from([1.0, -3.0, 1e9]))
def test_the_residual_is_the_change_in_its_own_row_only(
    row: int, column: int, change: float
) -> None:
    a, b = torch.randint(-9, 9, (5, 3)).double(), torch.randint(-9, 9, (3, 7)).double()
    c = a @ b
    c[row, column] += change
    expected = torch.zeros(5, dtype=torch.float64)
    expected[row] = change * signs(7)[column]
    assert torch.equal(row_residual(c, a, encode_rows(b)), expected)


def test_an_addend_that_is_not_added_does_not_count() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    nothing = torch.full((4,), torch.nan)
    assert not row_residual(a @ b, a, encode_rows(b), nothing, beta=0.0).any()


def encoded(row_sum: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """An encoding with these row sums and statistics of its own."""
    sums = torch.tensor([row_sum], dtype=torch.float64)
    statistics = torch.arange(len(row_sum) + 1, dtype=torch.float64).unsqueeze(0)
    check = fingerprint(torch.cat([sums, statistics], -1))
    return sums, torch.cat([statistics, check.unsqueeze(-1)], -1)


@for_each("bit", range(64))
@for_each("part", [0, 1])
@for_each("entry", [0, 5])
def test_every_single_bit_of_an_encoding_is_watched(bit: int, part: int, entry: int) -> None:
    # Entry 5 is far larger: a plain sum would round the damage of the others away.
    encoding = encoded([1e-9, 2.0, -3.0, 0.0, 5e-300, 1e15])
    assert self_consistent(*encoding)
    encoding[part].view(torch.int64)[0, entry] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert not self_consistent(*encoding)
    assert self_consistent(*encoded([torch.nan, torch.inf, -torch.inf]))


# The fixed sequence of random signs.
@for_each("count", [0, 1, 63, 4096, 4097, 131_072])
def test_signs_are_plus_and_minus_one(count: int) -> None:
    row = signs(count)
    assert row.shape == (count,)
    assert torch.equal(row, signs(131_072)[:count])  # of one sequence
    assert row.dtype is torch.float64
    assert torch.equal(row.abs(), ones(count))
    row.zero_()
    assert torch.equal(signs(count).abs(), ones(count))  # a copy is the caller's own


@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_every_dtype_holds_the_same_signs(dtype: torch.dtype) -> None:
    assert signs(100, dtype).dtype is dtype
    assert torch.equal(signs(100, dtype).double(), signs(100))
    assert torch.equal(ones(100, dtype), torch.ones(100, dtype=dtype))


def test_the_sequence_never_changes() -> None:
    """Stored checksums outlive the process that made them."""
    leading = (signs(32) > 0).long() @ (1 << torch.arange(32))
    assert int(leading) == 0x9F2B43FB


@for_each("count", [1 << power for power in range(6, 18)])
def test_a_constant_shift_of_a_row_shows_in_its_checksum(count: int) -> None:
    assert abs(float(signs(count).sum())) >= 0.45 * math.sqrt(count)


def test_the_signs_look_independent() -> None:
    row, count = signs(131_072), 131_072
    five_sigma = 5 * math.sqrt(count)
    assert abs(float(row.sum())) < five_sigma
    for lag in range(1, 65):
        assert abs(float((row[lag:] * row[:-lag]).sum())) < five_sigma

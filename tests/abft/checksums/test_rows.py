import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.abft.checksums.rows import encode_rows, fingerprint, row_residual, self_consistent
from holdfast.abft.checksums.weights import signs


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


def test_a_vector_with_nan_and_inf_is_consistent_with_itself() -> None:
    assert self_consistent(*encoded([torch.nan, torch.inf, -torch.inf]))

"""``due``: exactly the planned share of executions, evenly spread, decided without randomness."""

from fractions import Fraction
from math import ceil, floor, inf, nan

import pytest
from case_loops import for_each
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.abft.frequency import due

SHARES = st.one_of(
    st.floats(0.0, 1.0),
    st.fractions(0, 1, max_denominator=50).map(float),
    st.sampled_from([0.0, 5e-324, 1e-300, 0.1, 1 / 3, 0.5, 1 - 2**-53, 1.0]),
)


@given(SHARES, st.integers(0, 300))
@example(0.1, 300)
def test_after_n_executions_exactly_the_ceiling_of_the_share_was_checked(
    frequency: float, n: int
) -> None:
    checked = sum(due(count, frequency) for count in range(n))
    assert checked == ceil(n * Fraction(frequency))


@given(SHARES, st.one_of(st.integers(0, 1000), st.integers(2**53, 2**70)), st.integers(0, 200))
def test_any_window_holds_the_floor_or_the_ceiling_of_its_share(
    frequency: float, start: int, n: int
) -> None:
    checked = sum(due(count, frequency) for count in range(start, start + n))
    share = n * Fraction(frequency)
    assert floor(share) <= checked <= ceil(share)


@for_each("frequency", [-0.1, 1.0000000000000002, nan, inf, -inf])
def test_a_frequency_that_is_no_share_is_refused(frequency: float) -> None:
    with pytest.raises(ValueError, match=r"frequency = .* between 0 \(never\) and 1"):
        due(0, frequency)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count = -1 must be at least 0"):
        due(-1, 0.5)

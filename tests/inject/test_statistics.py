"""Intervals of rates: known values, bounds that hold for all counts, and true coverage."""

import math
from math import comb

import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.inject.statistics import Rate, rule_of_three, wilson_interval

counts = st.integers(1, 100_000).flatmap(
    lambda trials: st.tuples(st.integers(0, trials), st.just(trials))
)


@for_each(
    ("count", "trials", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3; and the closed form at ends
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0000),
    ],
)
def test_known_intervals(count, trials, low, high):
    assert wilson_interval(count, trials) == pytest.approx((low, high), abs=5e-5)
    z = 2.5758293035489004  # 99 %
    assert wilson_interval(0, 100, 0.99)[1] == pytest.approx(z * z / (100 + z * z), rel=1e-12)


@given(counts)
def test_an_interval_holds_its_rate_and_stays_within_bounds(case):
    count, trials = case
    low, high = wilson_interval(count, trials)
    assert 0 <= low <= count / trials <= high <= 1
    assert (low == 0) == (count == 0)
    assert (high == 1) == (count == trials)


def test_it_covers_the_true_rate_as_often_as_it_says():
    """Exactly, over all outcomes: on average 95 %, and never far below."""
    trials, coverage = 60, []
    intervals = [wilson_interval(count, trials) for count in range(trials + 1)]
    for rate in (step / 400 for step in range(4, 397)):
        covered = [n for n, (low, high) in enumerate(intervals) if low <= rate <= high]
        coverage.append(
            sum(comb(trials, n) * rate**n * (1 - rate) ** (trials - n) for n in covered)
        )
    assert sum(coverage) / len(coverage) == pytest.approx(0.95, abs=0.01)
    assert min(coverage) > 0.83


def test_without_trials_nothing_is_known():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert rule_of_three(0) == 1.0
    assert math.isnan(Rate(0, 0).value)
    assert Rate(0, 0).upper == 1.0


def test_a_rate_uses_the_rule_of_three_at_zero_only():
    assert Rate(0, 300).upper == rule_of_three(300) == 0.01
    assert rule_of_three(2) == 1.0
    exact = -math.expm1(math.log(0.05) / 3000)
    assert exact <= rule_of_three(3000) < 1.02 * exact
    assert Rate(1, 300).upper == wilson_interval(1, 300)[1]
    assert Rate(3, 4).value == 0.75
    assert Rate(3, 4).interval == wilson_interval(3, 4)


def test_impossible_counts_and_confidences_are_refused():
    for count, trials in ((-1, 5), (6, 5), (0, -1)):
        for measure in (wilson_interval, Rate):
            with pytest.raises(ValueError, match=f"{count}.*{trials}"):
                measure(count, trials)
    for confidence in (0.0, 1.0, 95.0, -0.5):
        with pytest.raises(ValueError, match="confidence"):
            wilson_interval(1, 2, confidence)

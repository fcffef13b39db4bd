"""Majorities of units, the order in which they shadow each other, and how soon they name."""

import math
import random
from collections import Counter

import pytest

from holdfast.errors import ConfigError
from holdfast.replay import expected_steps_to_name
from holdfast.replay.majority import MAX_ROUNDS, Run, is_sampled, judge, part_for, schedule


def _runs(text: str) -> list[Run]:
    """Runs written as ``target by outcome``; a trailing ! is a faulty one."""
    runs = []
    for words in text.split(", "):
        target, by, what = words.split()
        outcome = ((what.rstrip("!"),),)
        runs.append(Run(int(target), int(by), outcome, faulty=what.endswith("!")))
    return runs


@pytest.mark.parametrize(
    ("runs", "accused", "undecided"),
    [
        ("0 0 a, 0 1 a", {}, ()),
        ("0 0 x, 0 1 a", {}, (0,)),
        ("0 0 x, 0 1 a, 0 2 a", {0: 1}, ()),
        ("0 0 a, 0 1 x, 0 2 a", {1: 1}, ()),
        ("0 0 x, 0 0 x, 0 1 a, 0 1 a", {}, (0,)),
        ("0 0 x, 0 0 a, 0 1 a", {0: 1}, ()),
        ("0 0 a, 0 0 a, 0 1 x, 0 1 a", {1: 1}, ()),
        ("0 0 x, 0 1 y, 0 2 a", {}, (0,)),
        ("0 0 x, 0 1 a, 0 2 a, 1 1 b, 1 0 y, 1 2 b", {0: 2}, ()),
        ("0 0 x, 0 1 x, 0 2 a, 0 3 a", {}, (0,)),
        ("0 0 a, 0 1 a!", {}, (0,)),
        ("0 0 a, 0 1 x!, 0 2 a", {1: 1}, ()),
    ],
)
def test_two_different_units_that_agree_outvote_the_rest(
    runs: str, accused: dict[int, int], undecided: tuple[int, ...]
) -> None:
    judged = judge(_runs(runs))
    assert (judged.accused(), judged.undecided) == (accused, undecided)


def test_a_group_computed_otherwise_than_the_whole_says_is_wrong() -> None:
    whole = (("all", "first", "second"),)
    runs = [Run(0, 0, whole), Run(0, 1, (("x",),), part=1), Run(0, 2, whole)]
    assert judge(runs).wrong == (runs[1],)
    agreed = Run(0, 1, (("second",),), part=1)
    assert judge([runs[0], agreed, runs[2]]).wrong == ()
    # What is known of one group says nothing about the whole.
    assert judge(runs[:2]).undecided == (0,)


@pytest.mark.parametrize("units", [2, 3, 4, 7])
def test_each_unit_is_in_turn_the_shadow_of_each_other(units: int) -> None:
    first = Counter(schedule(units, 0, step)[0] for step in range(600 * (units - 1)))
    assert set(first) == set(range(1, units))
    assert all(480 < count < 720 for count in first.values())
    for step in range(50):
        shifts = schedule(units, 1, step)
        assert len(shifts) == MAX_ROUNDS
        others = [shift for shift in shifts if shift]
        assert len(set(others)) == min(units - 1, MAX_ROUNDS)


def test_the_sampled_share_is_what_was_asked_and_the_groups_take_turns() -> None:
    sampled = [is_sampled(0.25, 3, step) for step in range(4000)]
    assert 900 < sum(sampled) < 1100
    assert sampled == [is_sampled(0.25, 3, step) for step in range(4000)]
    assert sampled != [is_sampled(0.25, 4, step) for step in range(4000)]
    assert not any(is_sampled(0.0, 3, step) for step in range(100))
    assert set(Counter(part_for(4, 0, step) for step in range(200))) == set(range(4))


def _steps_to_name(draw: random.Random, rate: float, ranks: int, error_rate: float) -> int:
    """One run until the faulty rank 0 is named, as audits go."""
    step = 0
    while True:
        step += 1
        if draw.random() >= rate:
            continue
        # Each unit's own pass, then its passes for others, until all are judged.
        runs = _passes(draw, 0, ranks, error_rate)
        for shift in schedule(ranks, 0, step):
            runs += _passes(draw, shift, ranks, error_rate)
            judged = judge(runs)
            if not judged.undecided:
                break
        assert set(judged.accused()) <= {0}
        if judged.accused():
            return step


def _passes(draw: random.Random, shift: int, ranks: int, error_rate: float) -> list[Run]:
    outcomes = ["wrong" if draw.random() < error_rate else "right", *["right"] * (ranks - 1)]
    return [Run((n + shift) % ranks, n, ((what,),)) for n, what in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("rate", "ranks", "error_rate"), [(0.5, 3, 1.0), (0.2, 4, 1.0), (0.5, 4, 0.3), (1.0, 3, 0.1)]
)
def test_it_takes_the_expected_steps(rate: float, ranks: int, error_rate: float) -> None:
    draw, trials = random.Random(1), 600
    taken = [_steps_to_name(draw, rate, ranks, error_rate) for _ in range(trials)]
    said = expected_steps_to_name(rate, ranks, error_rate)
    spread = said.expected / math.sqrt(trials)  # a geometric wait's deviation is about its mean
    assert sum(taken) / trials == pytest.approx(said.expected, abs=4 * spread)
    within = sum(said.low <= steps <= said.high for steps in taken)
    assert within >= 0.93 * trials


def test_what_is_expected_at_the_rates_that_are_used() -> None:
    said = expected_steps_to_name(0.01, 8)
    assert (said.expected, said.low, said.high) == (pytest.approx(100), 3, 368)
    assert expected_steps_to_name(1.0, 3).high == 1
    assert expected_steps_to_name(0.01, 2).expected == math.inf


@pytest.mark.parametrize(
    "wrong", [(0.0, 3, 1.0), (1.5, 3, 1.0), (0.1, 1, 1.0), (0.1, 3, 0.0), (0.1, 3, 2.0)]
)
def test_impossible_rates_are_refused(wrong: tuple[float, int, float]) -> None:
    with pytest.raises(ConfigError, match="rates in"):
        expected_steps_to_name(*wrong)

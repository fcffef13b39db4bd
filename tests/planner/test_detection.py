"""Detectors: what they miss, by counting; how long a device errs; the cheapest that suffice."""

import random
from dataclasses import replace
from math import exp, factorial

import pytest
from case_loops import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.planner.detection import (
    MONTH_S,
    Looks,
    at_least,
    erring,
    least_looks,
    missed,
    silent_faults,
)
from holdfast.planner.fleet import (
    Detection,
    Devices,
    Faults,
    FaultyDevice,
    LadderCosts,
    LadderQuestion,
    Model,
    Target,
)

QUESTION = LadderQuestion(Devices(1024), Model(10.0, 1e11))
SHARES = st.floats(0.0, 1.0)


def undetected(question: LadderQuestion, looks: Looks) -> float:
    step_s = question.model.step_s + looks.cost_s(question)
    return silent_faults(question, looks, step_s).undetected


def test_shares_missed_by_hand() -> None:
    question = replace(
        QUESTION,
        detection=Detection(check_coverage=0.8, shadowed_share=0.5),
        faulty_device=FaultyDevice(matmul_share=0.25, repeats_share=0.1),
    )
    found = missed(question, Looks(check=0.5, audit=0.2, shadow=0.4))
    assert found.matmul == pytest.approx(0.6 * 0.8 * 0.8)
    assert found.outside == pytest.approx(0.8 * 0.8)
    assert found.faulty_device == pytest.approx((0.25 * 0.6 + 0.75) * (1 - 0.2 * 0.9) * 0.8)
    assert found.checked == pytest.approx(0.4)


@for_each("mean", [1e-9, 0.3, 2.0, 40.0])
@for_each("count", [1, 2, 5])
def test_poisson_tails(mean: float, count: int) -> None:
    terms = [exp(-mean) * mean**i / factorial(i) for i in range(count, 150)]
    assert at_least(count, mean) == pytest.approx(sum(terms), rel=1e-12)


@for_each("evict_after", [1, 3])
@for_each("found_per_s", [1e-9, 1e-6, 1e-3])
def test_how_long_a_device_errs_is_what_is_drawn(evict_after: int, found_per_s: float) -> None:
    draw, total, evicted, trials = random.Random(1), 0.0, 0, 20_000
    for _ in range(trials):
        left_s = MONTH_S * draw.random()
        until_s = draw.gammavariate(evict_after, 1 / found_per_s)
        total += min(left_s, until_s)
        evicted += until_s < left_s
    expected_s, replaced = erring(found_per_s, evict_after, MONTH_S)
    assert total / trials == pytest.approx(expected_s, rel=0.02)
    assert evicted / trials == pytest.approx(replaced, abs=0.02)


def test_a_device_that_nobody_sees_errs_for_half_of_the_window() -> None:
    assert erring(0.0, 3, 100.0) == (50.0, 0.0)
    assert erring(1e-9, 3, 2000.0)[0] == pytest.approx(erring(0.0, 3, 2000.0)[0], rel=1e-5)


@st.composite
def questions(draw: st.DrawFn) -> LadderQuestion:
    days = st.floats(10.0, 1e6)
    kinds = ("matmul", "outside", "faulty_device")
    return replace(
        QUESTION,
        faults={**QUESTION.faults, **{kind: Faults(draw(days)) for kind in kinds}},
        costs=LadderCosts(
            check_s_per_step=draw(st.floats(0.01, 2.0)),
            audit_s_per_step=draw(st.floats(1.0, 12.0)),
            shadow_s_per_step=draw(st.floats(0.1, 12.0)),
        ),
        faulty_device=FaultyDevice(draw(st.floats(1e-4, 1.0)), draw(SHARES), draw(SHARES)),
        detection=Detection(draw(st.floats(0.5, 1.0)), draw(st.floats(0.01, 1.0))),
        target=Target(draw(st.floats(1e-3, 1e3))),
    )


@settings(max_examples=12)  # each tries 13³ combinations
@given(questions())
def test_the_cheapest_shares_meet_the_target_and_no_grid_point_is_cheaper(
    question: LadderQuestion,
) -> None:
    target, best = question.undetected_target, least_looks(question)
    if undetected(question, Looks(1, 1, 1)) > target:
        assert best == Looks(1, 1, 1)
        return
    assert undetected(question, best) <= target * (1 + 1e-9)
    grid = [i / 12 for i in range(13)]
    cheapest = min(
        looks.cost_s(question)
        for check in grid
        for audit in grid
        for shadow in grid
        if undetected(question, looks := Looks(check, audit, shadow)) <= target
    )
    assert best.cost_s(question) <= cheapest * 1.0001

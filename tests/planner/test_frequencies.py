"""Algorithm 1 against brute force and against 90-digit arithmetic, and what it must never do."""

import itertools
from collections.abc import Sequence
from math import exp, inf

import mpmath
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.planner.attention import SECTIONS, AttentionSize, CheckCosts, gemm_flops
from holdfast.planner.frequencies import (
    ErrorRates,
    FrequencyPlan,
    Section,
    attention_failure,
    bearable_factor,
    plan_frequencies,
    sections_of,
    several_errors,
)
from holdfast.planner.vulnerability import ERROR_TYPES, parse, published

SIZE = AttentionSize.of_model("bert-base", 16, 128)
FLOPS = gemm_flops(SIZE)
COSTS = CheckCosts({"S_AS": 3.0, "S_CL": 4.0, "S_O": 1.0})
STEP = 1 / 16


def close(value: float, rel: float = 1e-9) -> object:
    """Relative alone: ``pytest.approx`` adds 1e-12, more than most probabilities here."""
    return pytest.approx(value, rel=rel, abs=0.0)


def rates_of(rate: float) -> ErrorRates:
    return ErrorRates(rate, rate, rate)


def exact_failure(
    rates: ErrorRates, phi: dict[str, dict[str, float]], frequencies: dict[str, float]
) -> mpmath.mpf:
    """1 − FC_att as section 4.5 writes it (with H corrected), in 90 digits."""
    with mpmath.workdps(90):
        coverage = mpmath.mpf(1)
        for name, gemms in SECTIONS.items():
            f = mpmath.mpf(frequencies[name])
            mean = {
                (gemm, kind): mpmath.mpf(getattr(rates, kind)) * FLOPS[gemm]
                for gemm in gemms
                for kind in ERROR_TYPES
            }
            free = mpmath.fprod(mpmath.exp(-value) for value in mean.values())
            covered = free
            for (gemm, kind), value in mean.items():
                single = free * value
                covered += single * (f + (1 - f) * (1 - mpmath.mpf(phi[gemm][kind])))
            coverage *= covered
        return 1 - coverage


def sections(phi: dict[str, dict[str, float]], rates: ErrorRates) -> tuple[Section, ...]:
    return sections_of(SIZE, rates, phi, COSTS)


PROBABILITY = st.floats(0.0, 1.0)
TABLES = st.fixed_dictionaries(
    {gemm: st.fixed_dictionaries(dict.fromkeys(ERROR_TYPES, PROBABILITY)) for gemm in FLOPS}
)
RATE = st.one_of(st.just(0.0), st.floats(1e-30, 1e-14))  # up to 3e-4 errors an execution
RATES = st.builds(ErrorRates, RATE, RATE, RATE)
FREQUENCIES = st.fixed_dictionaries(dict.fromkeys(SECTIONS, PROBABILITY))


# At f = 1 only two errors at once are left, some 1e-28: 1 − FC in doubles would be 0.
@example(published("bert-base"), rates_of(13e-25), dict.fromkeys(SECTIONS, 1.0))
@given(TABLES, RATES, FREQUENCIES)
def test_failure_is_the_papers_formula_to_twelve_digits(
    phi: dict[str, dict[str, float]], rates: ErrorRates, frequencies: dict[str, float]
) -> None:
    found = attention_failure(sections(phi, rates), frequencies)
    expected = exact_failure(rates, phi, frequencies)
    assert found == close(float(expected), rel=1e-12)


def test_the_formula_itself_has_the_corrected_h() -> None:
    """One certain harm, never checked: the coverage is that of no error at all."""
    harmful = {gemm: dict.fromkeys(ERROR_TYPES, 1.0) for gemm in FLOPS}
    harmless = {gemm: dict.fromkeys(ERROR_TYPES, 0.0) for gemm in FLOPS}
    rates, never = rates_of(1e-12), dict.fromkeys(SECTIONS, 0.0)
    mean = rates.total * sum(FLOPS.values())
    assert attention_failure(sections(harmful, rates), never) == close(1 - exp(-mean))
    always = dict.fromkeys(SECTIONS, 1.0)
    assert attention_failure(sections(harmless, rates), never) == close(
        attention_failure(sections(harmful, rates), always)
    )


@example(0.0)
@given(st.floats(1e-30, 600.0))
def test_two_or_more_errors_to_fourteen_digits(mean: float) -> None:
    with mpmath.workdps(90):
        exact = 1 - mpmath.exp(-mpmath.mpf(mean)) * (1 + mpmath.mpf(mean))
    assert several_errors(mean) == close(float(exact), rel=2e-14)


RISKS = st.builds(
    Section,
    name=st.just(""),
    unavoidable=st.floats(0.0, 1e-14),
    exposed=st.one_of(st.just(0.0), st.floats(1e-13, 1e-10)),
    cost=st.one_of(st.just(0.0), st.floats(0.01, 10.0)),
)
TARGETS = st.floats(1e-15, 3e-10)
THREE = st.lists(RISKS, min_size=1, max_size=3).map(
    lambda found: [Section(f"S{i}", s.unavoidable, s.exposed, s.cost) for i, s in enumerate(found)]
)


def best_on_a_grid(found: Sequence[Section], target: float) -> float:
    """The least cost of all combinations of frequencies 0, STEP, … 1 that meet the target."""
    grid = [step * STEP for step in range(round(1 / STEP) + 1)]
    costs = [inf]
    for chosen in itertools.product(grid, repeat=len(found)):
        frequencies = {s.name: f for s, f in zip(found, chosen, strict=True)}
        if attention_failure(found, frequencies) <= target:
            costs.append(sum(s.cost * frequencies[s.name] for s in found))
    return min(costs)


def first_order_slack(found: Sequence[Section]) -> float:
    """What greedy may lose: 1 − Π(1 − x) of failures up to 3e-10 is their sum to a share of 3e-10,
    and so much of the exposed risk may end up with the dearest section instead of the cheapest.
    """
    dearest = max((s.cost / s.exposed for s in found if s.exposed), default=0.0)
    return 3e-10 * sum(s.exposed for s in found) * dearest


@given(THREE, TARGETS)
def test_the_greedy_plan_is_the_cheapest(found: list[Section], target: float) -> None:
    """No grid point beats it; and it beats the best one by less than the grid's step."""
    plan, best = plan_frequencies(found, target), best_on_a_grid(found, target)
    if not plan.feasible:
        assert best == inf
        return
    assert plan.cost <= best + first_order_slack(found) + 1e-12
    assert best <= plan.cost + STEP * plan.full_cost + 1e-12


@example([Section("S0", 0.0, 3.278239186601371e-11, 0.0)], 1e-15)  # f near 1: floats are coarse
@example([Section("S0", 4e-15, 8.312360512903192e-05, 0.0)], 1e-9)
@given(THREE, TARGETS)
def test_a_plan_keeps_its_promises(found: list[Section], target: float) -> None:
    plan = plan_frequencies(found, target)
    assert all(0.0 <= f <= 1.0 for f in plan.frequencies.values())
    assert plan.least_failure <= plan.failure * (1 + 1e-12)
    assert plan.failure <= plan.unchecked_failure
    assert plan.cost <= plan.full_cost * (1 + 1e-15)
    assert plan.failure == attention_failure(found, plan.frequencies)
    if plan.feasible:
        assert plan.failure <= target * (1 + 1e-14)
    else:
        assert plan.failure == close(plan.least_failure, rel=1e-12)
    if plan.unchecked_failure <= target:
        assert plan.cost == 0.0
        assert set(plan.frequencies.values()) == {0.0}
    elif plan.feasible and plan.cost > 0:
        assert plan.failure == close(target, rel=1e-9) or _only_free_ones(found, plan)


def _only_free_ones(found: list[Section], plan: FrequencyPlan) -> bool:
    return all(s.cost == 0.0 for s in found if plan.frequencies[s.name] > 0)


def test_partial_last_and_full_first_by_gain_for_cost() -> None:
    """Worked by hand: gains 6, 3, 1 and costs 3, 1, 0.6 (by cost: 2, 3, 5/3); 10 must become 5."""
    found = [
        Section("a", 0.0, 6e-12, 3.0),
        Section("b", 0.0, 3e-12, 1.0),
        Section("c", 0.0, 1e-12, 0.6),
    ]
    plan = plan_frequencies(found, 5e-12)
    assert plan.frequencies == {"a": close(1 / 3), "b": 1.0, "c": 0.0}
    assert plan.cost == close(2.0)
    assert plan.unchecked_failure == close(1e-11)
    assert plan.failure == close(5e-12, rel=1e-12)


def test_an_infeasible_target_says_so_and_comes_as_close_as_it_can() -> None:
    found = [Section("a", 2e-9, 1e-8, 1.0), Section("b", 0.0, 1e-8, 1.0)]
    plan = plan_frequencies(found, 1e-9)
    assert not plan.feasible
    assert plan.frequencies == {"a": 1.0, "b": 1.0}
    assert plan.failure == plan.least_failure == close(2e-9)


def test_bearable_factors_bracket_where_checks_are_needed_and_where_they_no_longer_suffice() -> (
    None
):
    phi, rates, target = published("bert-base"), rates_of(13e-25), 1e-11
    onset = bearable_factor(SIZE, rates, phi, target, 0.0)
    limit = bearable_factor(SIZE, rates, phi, target, 1.0)
    assert 1 < onset < limit
    below, above = (sections(phi, rates.scaled(onset * by)) for by in (1 - 1e-9, 1 + 1e-9))
    assert plan_frequencies(below, target).cost == 0 < plan_frequencies(above, target).cost
    below, above = (sections(phi, rates.scaled(limit * by)) for by in (1 - 1e-9, 1 + 1e-9))
    assert plan_frequencies(below, target).feasible
    assert not plan_frequencies(above, target).feasible
    assert bearable_factor(SIZE, rates_of(0.0), phi, target, 0.0) == inf


def test_absurd_rates_are_certain_failures_and_no_rates_need_no_checks() -> None:
    plan = plan_frequencies(sections(published(), rates_of(1.0)), 1e-11)
    assert not plan.feasible
    assert plan.failure == plan.least_failure == plan.unchecked_failure == 1.0
    plan = plan_frequencies(sections(published(), rates_of(0.0)), 1e-300)
    assert (plan.feasible, plan.failure, plan.cost) == (True, 0.0, 0.0)


def test_vulnerable_types_alone_expose() -> None:
    """Near-INF errors only, harmful in S_O only."""
    none = dict.fromkeys(ERROR_TYPES, 0.0)
    table = dict.fromkeys(FLOPS, none) | {"O": none | {"near_inf": 0.25}}
    found = sections_of(SIZE, ErrorRates(1e-24, 1e-24, 4e-24), parse({"m": table}), COSTS)
    exposed = {section.name: section.exposed for section in found}
    assert exposed == {"S_AS": 0.0, "S_CL": 0.0, "S_O": close(1e-24 * FLOPS["O"])}

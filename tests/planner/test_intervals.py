"""Appendix A against brute force, against 60-digit arithmetic and against simulation."""

import random
from math import comb, sqrt

import mpmath
import pytest
from case_loops import for_each
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.planner.intervals import (
    every,
    interval_s,
    job_rate,
    log_bearable,
    memory_loss_rate,
    overhead,
    several_failures,
    stall_s,
)

TIMES = st.floats(0.0, 1e9)


def close(value: float, rel: float = 1e-12) -> object:
    """Relative alone: ``pytest.approx`` adds 1e-12, more than most probabilities here."""
    return pytest.approx(value, rel=rel, abs=0.0)


@given(TIMES, TIMES)
def test_equation_8_is_what_saving_takes_beyond_computing(saving: float, compute: float) -> None:
    assert stall_s(saving, compute) == pytest.approx(
        (abs(saving - compute) + saving - compute) / 2, rel=1e-12, abs=1e-6
    )
    assert stall_s(saving, compute) >= 0
    assert (stall_s(saving, compute) == 0) == (saving <= compute)


def test_equation_4_by_hand() -> None:
    """A save of 2 s each 100 s; a failure each 1,000 s costs 50 s of work and 30 s of restart."""
    assert overhead(100.0, 2.0, 30.0, 1e-3) == close(0.02 + 0.08)


@given(st.floats(1e-6, 1e3), st.floats(1e-9, 1e-3), st.floats(0.0, 1e4), st.floats(0.01, 100.0))
def test_no_other_interval_is_better_by_equation_4(
    save: float, rate: float, restart: float, factor: float
) -> None:
    best = interval_s(save, rate)
    if save > 0.5 / rate:
        assert best == close(1 / rate)
        return
    assert best == close(sqrt(2 * save / rate))
    least = overhead(best, save, restart, rate)
    assert least <= overhead(best * factor, save, restart, rate) * (1 + 1e-12)


@example(0.0, 1.0, 1e6)
@example(1e-12, 5.0, 1.0)
@given(st.floats(0.0, 50.0), st.floats(0.5, 10.0), st.floats(101.0, 1e5))
def test_steps_are_the_best_whole_number(save: float, step: float, mttf: float) -> None:
    chosen = every(save, step, mttf)
    ours = overhead(chosen * step, save, 0.0, 1 / mttf)
    others = [overhead(count * step, save, 0.0, 1 / mttf) for count in range(1, 2 * chosen + 3)]
    assert ours <= min(others) * (1 + 1e-12)


def test_a_step_is_the_least_and_the_mean_time_to_a_failure_the_most() -> None:
    assert every(-1e-3, 0.7, 1e6) == 1
    assert every(1e-9, 100.0, 10.0) == 1
    assert every(1e6, 1.0, 1000.0) == 1000


@given(st.floats(0.0, 1e3), st.floats(1e-3, 10.0), st.floats(0.0, 1e5))
def test_saves_are_no_closer_than_their_floor(save: float, step: float, floor: float) -> None:
    steps = every(save, step, 1e6, floor)
    assert steps * step >= floor * (1 - 1e-11)
    assert steps >= every(save, step, 1e6)
    if steps > every(save, step, 1e6):
        assert (steps - 1) * step < floor


def test_a_floor_of_a_whole_number_of_steps_is_that_number() -> None:
    assert every(0.0, 0.1, 1e6, 0.3) == 3
    assert every(0.0, 0.7, 1e6, 2.1) == 3


def exact_tail(probability: float, nodes: int, parities: int) -> mpmath.mpf:
    """Equation 7 as printed, for any number of parities, in 400 digits."""
    with mpmath.workdps(400):
        p = mpmath.mpf(probability)
        terms = (comb(nodes, i) * p**i * (1 - p) ** (nodes - i) for i in range(parities + 1))
        return 1 - mpmath.fsum(terms)


PROBABILITIES = st.one_of(
    st.floats(1e-40, 1e-3), st.floats(1e-3, 1.0), st.sampled_from([1e-60, 1e-16, 1e-8, 0.5])
)


@example(1e-4, 6, 1)
@example(1e-12, 384, 2)
@example(1 - 2**-53, 3, 1)
@example(1e-9, 10**6, 2)
@given(PROBABILITIES, st.integers(1, 400), st.integers(0, 4))
def test_equation_7_loses_no_digits(probability: float, nodes: int, parities: int) -> None:
    parities = min(parities, nodes)
    expected = exact_tail(probability, nodes, parities)
    assert several_failures(probability, nodes, parities) == close(float(expected))


def test_as_printed_equation_7_loses_them_all() -> None:
    p, n = 1e-10, 6
    printed = 1 - (1 - p) ** n - n * p * (1 - p) ** (n - 1)
    exact = float(exact_tail(p, n, 1))
    assert abs(printed - exact) > 10 * exact
    assert several_failures(p, n) == close(exact) == close(15 * p * p, rel=1e-9)


@given(st.floats(1e-30, 500.0), st.integers(1, 100), st.integers(0, 4))
def test_what_is_borne_keeps_its_digits_far_from_1_too(
    hazard: float, nodes: int, parities: int
) -> None:
    parities = min(parities, nodes - 1)
    with mpmath.workdps(600):
        alive = mpmath.exp(-mpmath.mpf(hazard))
        terms = (
            comb(nodes, i) * (1 - alive) ** i * alive ** (nodes - i) for i in range(parities + 1)
        )
        expected = mpmath.log(mpmath.fsum(terms))
    if expected > -700:
        assert log_bearable(hazard, nodes, parities) == close(float(expected))


def losses_counted(nodes: int, parities: int, window: float, failures: int) -> float:
    """Losses per unit of time of nodes that each fail once in a unit, event by event.

    A node that fails opens a window, at whose end all are whole again; the snapshots are lost if
    more than ``parities`` nodes failed in it.
    """
    draw = random.Random(11)
    now, losses, ends, lost = 0.0, 0, -1.0, set[int]()
    for _ in range(failures):
        now += draw.expovariate(nodes)
        if now > ends:
            losses += len(lost) > parities
            lost, ends = set(), now + window
        lost.add(draw.randrange(nodes))
    return losses / now


@for_each(("parities", "window"), [(1, 0.002), (2, 0.04)])
def test_the_rate_at_which_memory_is_lost_is_what_is_counted(parities: int, window: float) -> None:
    """Windows take a share n λ w of the time, in which no new one opens."""
    nodes, failures = 6, 300_000
    expected = memory_loss_rate(1.0, nodes, parities, window) / (1 + nodes * window)
    found = losses_counted(nodes, parities, window, failures)
    count = expected * failures / nodes
    assert count > 1500
    assert found == close(expected, rel=5 / sqrt(count))


def test_the_rate_is_twice_that_of_equation_7_within_fixed_windows() -> None:
    rate, window = 1e-6, 10.0
    fixed = several_failures(rate * window, 8) / window
    assert memory_loss_rate(rate, 8, 1, window) == close(2 * fixed, rel=1e-3)
    assert memory_loss_rate(rate, 8, 2, window) == close(
        3 * several_failures(rate * window, 8, 2) / window, rel=1e-3
    )


def test_without_parity_any_lost_node_loses_memory() -> None:
    assert memory_loss_rate(1e-6, 8, 0, 60.0) == job_rate(1e-6, 8) == close(8e-6)

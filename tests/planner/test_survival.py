"""Survival against 60-digit arithmetic, figure 8's values, and its own inverse."""

from dataclasses import replace
from math import gamma, inf, log

import mpmath
import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.survival import Survival, weibull_rate

FIGURE_8 = Survival(3072, 6, hardware=1e-4, software=1e-5, shape=1.3)

FLEETS = st.builds(
    lambda groups, group, hardware, software, shape, smp: Survival(
        groups * group, group, hardware, software, shape, smp
    ),
    st.integers(1, 600),
    st.integers(2, 16),
    st.floats(1e-9, 1e-2),
    st.floats(0.0, 1e-2),
    st.floats(0.5, 3.0),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e-4)),
)
DAYS = st.floats(1e-3, 1e3)


def exact_snapshots(fleet: Survival, time: float, parities: int) -> mpmath.mpf:
    """Equation 2 as printed, with any parities, in 60 digits."""
    with mpmath.workdps(60):
        age = mpmath.mpf(time) ** mpmath.mpf(fleet.shape)
        alive = mpmath.exp(-mpmath.mpf(fleet.hardware) * age)
        n = fleet.group
        group = mpmath.fsum(
            mpmath.binomial(n, i) * (1 - alive) ** i * alive ** (n - i) for i in range(parities + 1)
        )
        smp = mpmath.exp(-mpmath.mpf(fleet.smp) * age)
        return group ** (fleet.nodes // n) * smp**fleet.nodes


def exact_checkpoints(fleet: Survival, time: float) -> mpmath.mpf:
    """Equation 3 in 60 digits."""
    with mpmath.workdps(60):
        age = mpmath.mpf(time) ** mpmath.mpf(fleet.shape)
        rate = mpmath.mpf(fleet.hardware) + mpmath.mpf(fleet.software)
        return mpmath.exp(-fleet.nodes * rate * age)


@given(FLEETS, DAYS, st.integers(0, 2))
def test_equations_2_and_3_are_met(fleet: Survival, time: float, parities: int) -> None:
    for found, exact in (
        (fleet.with_snapshots(time, parities), exact_snapshots(fleet, time, parities)),
        (fleet.with_checkpoints(time), exact_checkpoints(fleet, time)),
    ):
        if exact > 1e-200:
            magnitude = 1 + abs(float(mpmath.log(exact)))  # digits that any double of e^x loses
            assert found == pytest.approx(float(exact), rel=1e-12 * magnitude, abs=0.0)
        else:
            assert found <= 1e-190


@for_each(
    ("shape", "snapshots", "checkpoints"),
    [(1.0, 37.29, 0.3118), (1.3, 16.178, 0.4080), (1.5, 11.16, 0.4598), (2.0, 6.107, 0.5584)],
)
def test_figure_8(shape: float, snapshots: float, checkpoints: float) -> None:
    """The equations' own days at 0.9; the paper reads 16.22 and 0.5 off its curves of c = 1.3."""
    fleet = replace(FIGURE_8, shape=shape)
    assert fleet.time_with_snapshots(0.9) == pytest.approx(snapshots, rel=2e-4)
    assert fleet.time_with_checkpoints(0.9) == pytest.approx(checkpoints, rel=2e-4)


SURVIVALS = st.one_of(st.floats(0.001, 0.999), st.sampled_from([1e-9, 1 - 1e-9, 1 - 1e-15]))


@given(FLEETS, SURVIVALS, st.integers(0, 2))
def test_the_time_to_a_survival_is_where_it_is_reached(
    fleet: Survival, probability: float, parities: int
) -> None:
    days = fleet.time_with_checkpoints(probability)
    assert fleet.with_checkpoints(days) == pytest.approx(probability, rel=1e-9)
    if parities == fleet.group and fleet.smp == 0.0:
        return
    days = fleet.time_with_snapshots(probability, parities)
    assert fleet.with_snapshots(days, parities) == pytest.approx(probability, rel=1e-9)
    exact = exact_snapshots(fleet, days, parities)
    assert float(mpmath.log(exact)) == pytest.approx(log(probability), rel=1e-9, abs=0.0)


def test_nothing_is_lost_where_nothing_fails() -> None:
    still = Survival(8, 4, hardware=0.0)
    assert still.with_snapshots(1e9) == still.with_checkpoints(1e9) == 1.0
    assert still.time_with_snapshots(0.9) == still.time_with_checkpoints(0.9) == inf
    software = Survival(8, 4, hardware=0.0, software=1.0)
    assert software.time_with_snapshots(0.5) == inf
    assert software.time_with_checkpoints(0.5) == pytest.approx(log(2) / 8)


def test_as_many_parities_as_nodes_leave_the_smps_alone_to_fail() -> None:
    assert Survival(4, 2, hardware=1.0).time_with_snapshots(0.5, 2) == inf
    weak = Survival(4, 2, hardware=1.0, smp=0.1)
    assert weak.time_with_snapshots(0.5, 2) == pytest.approx(log(2) / 0.4)


def test_all_survival_is_gone_in_the_end() -> None:
    fleet = Survival(8, 4, hardware=1.0, shape=3.0)
    assert fleet.with_snapshots(1e200) == fleet.with_checkpoints(1e200) == 0.0


@given(st.floats(0.1, 1e6), st.floats(0.3, 5.0))
def test_a_weibull_rate_has_the_mean_it_was_made_from(mean: float, shape: float) -> None:
    """E[t] = λ^{−1/c} Γ(1 + 1/c)."""
    rate = weibull_rate(mean, shape)
    assert rate ** (-1 / shape) * gamma(1 + 1 / shape) == pytest.approx(mean)
    assert weibull_rate(inf, shape) == 0.0

"""The plan of the whole ladder: by hand, its hours, its neighbours, its order."""

from dataclasses import replace
from math import exp, expm1, inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.planner.detection import MONTH_S, Looks
from holdfast.planner.fleet import Devices, Faults, LadderCosts, LadderQuestion, Model, Target
from holdfast.planner.intervals import every
from holdfast.planner.ladder import (
    HOURS,
    Configuration,
    expected,
    plan_checkpoints,
    plan_ladder,
    stall_of,
    timing,
)

NEVER = Faults(inf)
QUIET = dict.fromkeys(("matmul", "outside", "faulty_device"), NEVER)
COSTS = LadderCosts(
    check_s_per_step=0.1,
    snapshot_stall_s=0.05,
    parity_stall_s=0.03,
    snapshot_s=2.0,
    restore_s=5.0,
    rebuild_s=20.0,
    persist_s=40.0,
    reload_s=80.0,
    restart_s=60.0,
    checkpoint_stall_s=0.05,
)
NONE = Looks(0, 0, 0)


def asked(devices: int, crash_days: float = 400.0, node_days: float = 200.0) -> LadderQuestion:
    """A fleet whose devices compute right."""
    fleet = LadderQuestion(Devices(1024, 8, 8), Model(2.0, 1e10), costs=COSTS).resized(devices)
    failing = {"crash": Faults(crash_days), "node_loss": Faults(node_days, per="node")}
    return replace(fleet, faults={**QUIET, **failing})


def test_intervals_are_those_of_the_square_root_with_a_floor_of_a_step() -> None:
    question = asked(1024)
    plan = plan_ladder(question).configuration
    failures = 1024 / (400 * 86_400) + 128 / (200 * 86_400)
    assert plan.looks == NONE
    assert plan.parities == 1
    assert plan.snapshot_steps == every(0.08, 2.0, 1 / failures)
    assert plan.snapshot_steps == round((2 * 0.08 / failures) ** 0.5 / 2.0)
    assert plan.persist_steps % plan.snapshot_steps == 0
    free = replace(question, costs=replace(COSTS, snapshot_stall_s=0.0, parity_stall_s=0.0))
    assert plan_ladder(free).configuration.snapshot_steps == 1


def test_checkpoints_alone_wait_for_the_disk() -> None:
    plan = plan_checkpoints(asked(1024)).configuration
    assert (plan.parities, plan.snapshot_steps, plan.looks) == (None, None, NONE)
    assert plan.persist_steps * 2.0 >= 40.0 / 0.1


def test_persisting_is_never_put_off_for_longer_than_was_asked() -> None:
    rare = asked(8, node_days=1e9)
    rare = replace(rare, costs=replace(rare.costs, persist_stall_s=1.0))
    daily = plan_ladder(rare).configuration
    snapshot_s = daily.save_steps * 2.0
    assert 0.99 * 24 * 3600 <= daily.persist_steps * 2.0 <= 24 * 3600 + snapshot_s
    hourly = replace(rare, target=Target(persist_at_least_every_h=1.0))
    assert plan_ladder(hourly).configuration.persist_steps * 2.0 <= 3600 + snapshot_s


def test_an_expectation_by_hand() -> None:
    """Crashes alone: e^{−λR} of a second does not restart, λT/(e^{λT} − 1) of it is kept."""
    question = replace(asked(8), faults={**QUIET, "crash": Faults(2.0), "node_loss": NEVER})
    rate = 8 / (2 * 86_400)
    month = expected(question, Configuration(Looks(0.5, 0, 0), 0, 100, 100))
    cycle_s = 100 * 2.05 + 0.05
    running = exp(-rate * 65)
    kept = running * rate * cycle_s / expm1(rate * cycle_s) * exp(-rate * 2.0)
    assert month.restarting_h == pytest.approx(730 * (1 - running))
    assert month.recomputing_h == pytest.approx(730 * (running - kept))
    assert month.training_h == pytest.approx(730 * kept * 200 / cycle_s)
    assert month.detecting_h == pytest.approx(730 * kept * 5 / cycle_s)
    assert month.saving_h == pytest.approx(730 * kept * 0.05 / cycle_s)
    assert month.failures == pytest.approx(rate * MONTH_S)
    assert month.overhead == pytest.approx(5.05 / 200)


@st.composite
def situations(draw: st.DrawFn) -> tuple[LadderQuestion, Configuration]:
    devices = draw(st.sampled_from([1, 2, 8, 48, 1000, 16_384, 100_000]))
    question = asked(devices, draw(st.floats(20, 1e5)), draw(st.floats(20, 1e5)))
    kinds = {kind: Faults(draw(st.floats(50, 1e6))) for kind in QUIET}
    question = replace(question, faults={**question.faults, **kinds})
    looks = Looks(*(draw(st.floats(0, 1)) for _ in range(3)))
    parities = draw(st.sampled_from([None, *question.parities]))
    steps = draw(st.integers(1, 500))
    times = draw(st.integers(1, 50))
    if parities is None:
        return question, Configuration(looks, None, None, steps)
    return question, Configuration(looks, parities, steps, steps * times)


@given(situations())
def test_hours_add_up_and_none_is_negative(case: tuple[LadderQuestion, Configuration]) -> None:
    month = expected(*case)
    hours = (
        *(month.training_h, month.detecting_h, month.saving_h),
        *(month.recomputing_h, month.restarting_h, month.repairing_h),
    )
    assert min(hours) >= 0
    assert sum(hours) == pytest.approx(730)
    assert month.lost_h == pytest.approx(730 - month.training_h)
    assert month.undetected_faults >= 0


@given(
    situations(),
    st.floats(1.1, 10.0),
    st.sampled_from(["crash", "node_loss", "outside", "restart_s", "reload_s", "persist_s"]),
)
def test_more_faults_and_slower_recovery_never_lose_less(
    case: tuple[LadderQuestion, Configuration], factor: float, name: str
) -> None:
    question, found = case
    if name in question.faults:
        often = replace(question.faults[name], mttf_days=question.faults[name].mttf_days / factor)
        worse = replace(question, faults={**question.faults, name: often})
    else:
        slower = {name: getattr(question.costs, name) * factor}
        worse = replace(question, costs=replace(question.costs, **slower))
    before = expected(question, found).lost_h
    # Where hardly a minute of the month is computed, faulty devices are not found within it, and
    # evictions that do not happen can outweigh what was made worse.
    assume(before < 0.99 * HOURS)
    assert expected(worse, found).lost_h >= before - 1e-9


def test_more_parities_stall_more_and_are_taken_where_nodes_are_lost() -> None:
    question = asked(1024)
    assert stall_of(question, 2) == pytest.approx(0.11)
    assert plan_ladder(question).configuration.parities == 1
    stable = asked(1024, node_days=1e7)
    assert plan_ladder(stable).configuration.parities == 0
    assert plan_ladder(asked(8)).configuration.parities == 0  # a node alone has no parity


def test_a_plan_loses_less_than_checkpoints_alone_and_more_so_in_large_fleets() -> None:
    saved = [
        plan_checkpoints(asked(count)).month.lost_h - plan_ladder(asked(count)).month.lost_h
        for count in (8, 64, 1024, 16_384)
    ]
    assert saved == sorted(saved)
    assert saved[0] > 0


def test_it_says_where_failures_are_too_frequent_for_its_formulas() -> None:
    assert plan_ladder(asked(1024)).doubts == ()
    often = plan_ladder(asked(100_000, crash_days=50.0, node_days=50.0))
    assert any("failures are not rare" in doubt for doubt in often.doubts)
    assert any("lost while one is rebuilt" in doubt for doubt in often.doubts)
    few = replace(asked(8), faults={**asked(8).faults, "crash": Faults(9.0, "device", 3.0)})
    assert any("far from Poisson" in doubt for doubt in plan_ladder(few).doubts)


def test_an_infeasible_target_is_said() -> None:
    question = LadderQuestion(Devices(8), Model(2.0, 1e10), costs=COSTS)
    assert plan_ladder(question).feasible
    assert not plan_checkpoints(question).feasible
    strict = replace(
        question, target=Target(1e-12), detection=replace(question.detection, shadowed_share=0.1)
    )
    assert not plan_ladder(strict).feasible


def test_times_without_snapshots_are_those_of_the_disk() -> None:
    time = timing(asked(1024), Configuration(NONE, None, None, 10))
    assert time.restore_s == time.rebuild_s == time.reload_s == 140.0
    assert time.save_delay_s == time.persist_delay_s == 40.0

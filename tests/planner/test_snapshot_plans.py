"""Snapshots and checkpoints planned together: by hand, by brute force, and by a simulated job."""

import random
from dataclasses import asdict, replace

import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.snapshots import (
    Costs,
    Fleet,
    Lost,
    SnapshotPlan,
    Speeds,
    plan_snapshots,
    snapshot_costs,
)

FLEET = Fleet(16, 8, mttf_s=1e6, software_mttf_s=4e6)
COSTS = Costs(
    snapshot_stall_s=0.4,
    persist_stall_s=0.0,
    persist_s=100.0,
    restart_s=20.0,
    rebuild_s=5.0,
    reload_s=40.0,
)
SPEEDS = Speeds(copy_bytes_s=4e9, disk_bytes_s=1e9, network_bytes_s=2e9)


def test_a_plan_by_hand() -> None:
    """√(2 · 0.4 · 50,000) / 2 = 100 steps; 100 s are 50 steps of disk, so each snapshot."""
    plan = plan_snapshots(FLEET, COSTS, step_s=2.0)
    assert plan.failures_per_s == pytest.approx(16 * 1.25e-6)
    assert (plan.snapshot_steps, plan.persist_steps) == (100, 100)
    losses = 2 * 8e-6 * 7 * 1e-6 * 25
    assert plan.memory_losses_per_s == pytest.approx(losses, rel=1e-4)
    rebuilt = plan.failures_per_s - plan.memory_losses_per_s
    assert plan.lost.saving == pytest.approx(0.4 / 200)
    assert plan.lost.recomputing == pytest.approx(2e-5 * 100)
    assert plan.lost.restarting == pytest.approx(rebuilt * 25 + losses * 60, rel=1e-4)
    assert plan.lost.total == pytest.approx(0.0045, rel=1e-3)
    assert plan.lost.hours_per_month == pytest.approx(730 * 0.0045 / 1.0045, rel=1e-3)


def test_checkpoints_alone_by_hand() -> None:
    """Every failure returns to the checkpoint: √(2 · 10 · 50,000) = 1,000 s."""
    plan = plan_snapshots(FLEET, replace(COSTS, persist_stall_s=10.0), 2.0, parities=None)
    assert (plan.parities, plan.snapshot_steps, plan.persist_steps) == (None, None, 500)
    assert plan.memory_losses_per_s == plan.failures_per_s
    assert plan.lost == Lost(
        pytest.approx(0.01), pytest.approx(2e-5 * 500), pytest.approx(2e-5 * 60)
    )


def test_free_snapshots_are_taken_each_step_and_persisted_as_the_disk_allows() -> None:
    plan = plan_snapshots(FLEET, replace(COSTS, snapshot_stall_s=0.0), 0.7)
    assert (plan.snapshot_steps, plan.persist_steps) == (1, 143)


def test_without_parity_a_lost_node_needs_the_checkpoint_and_a_dead_trainer_does_not() -> None:
    plan = plan_snapshots(FLEET, COSTS, 2.0, parities=0)
    assert plan.memory_losses_per_s == pytest.approx(16e-6)
    assert plan.failures_per_s == pytest.approx(20e-6)


def test_losses_too_rare_for_a_double_are_none() -> None:
    rare = Fleet(4, 4, mttf_s=1e300)
    plan = plan_snapshots(rare, replace(COSTS, persist_stall_s=1.0), 1.0, parities=2)
    assert plan.memory_losses_per_s == 0.0
    assert plan.persist_steps > 10**40


@given(
    st.floats(0.0, 5.0),
    st.floats(0.0, 5.0),
    st.floats(0.5, 5.0),
    st.integers(0, 2),
    st.integers(1, 200),
    st.integers(1, 50),
)
def test_no_other_pair_of_intervals_loses_less(
    stall: float, persist: float, step: float, parities: int, snapshot: int, times: int
) -> None:
    """Up to the rounding of checkpoints to a multiple of the snapshots'."""
    costs = replace(COSTS, snapshot_stall_s=stall, persist_stall_s=persist, persist_s=0.0)
    fleet = Fleet(16, 8, mttf_s=2e5)
    plan = plan_snapshots(fleet, costs, step, parities)
    assert plan.snapshot_steps is not None
    assert plan.persist_steps % plan.snapshot_steps == 0
    rounded = plan.memory_losses_per_s * plan.snapshot_steps * step / 2
    assert plan.lost.total <= lost_by(plan, costs, step, snapshot, snapshot * times) + rounded


def lost_by(plan: SnapshotPlan, costs: Costs, step: float, snapshot: int, persist: int) -> float:
    """Equation 4 written out once more, for any intervals."""
    rebuilt = plan.failures_per_s - plan.memory_losses_per_s
    saving = costs.snapshot_stall_s / (snapshot * step) + costs.persist_stall_s / (persist * step)
    after = rebuilt * (snapshot * step / 2 + costs.restart_s + costs.rebuild_s)
    reload = persist * step / 2 + costs.restart_s + costs.reload_s
    return saving + after + plan.memory_losses_per_s * reload + 1e-12


def simulated(plan: SnapshotPlan, costs: Costs, step_s: float, failures: int) -> float:
    """Seconds lost for each second of training, failure by failure."""
    assert plan.snapshot_steps is not None
    draw = random.Random(3)
    work_s = plan.snapshot_steps * step_s
    cycle_s = work_s + costs.snapshot_stall_s
    share = plan.memory_losses_per_s / plan.failures_per_s
    per_persist = plan.persist_steps // plan.snapshot_steps
    saved = wall_s = 0.0
    for _ in range(failures):
        until_failure = draw.expovariate(plan.failures_per_s)
        saved += until_failure // cycle_s
        wall_s += until_failure + costs.restart_s
        if draw.random() < share:
            saved -= saved % per_persist
            wall_s += costs.reload_s
        else:
            wall_s += costs.rebuild_s
    return wall_s / (saved * work_s) - 1


@for_each("parities", [0, 1])
def test_a_simulated_job_loses_what_is_planned(parities: int) -> None:
    costs = replace(COSTS, persist_s=2000.0)
    plan = plan_snapshots(FLEET, costs, 2.0, parities)
    assert plan.persist_steps == 10 * plan.snapshot_steps
    found = simulated(plan, costs, 2.0, 60_000)
    assert found == pytest.approx(plan.lost.total, rel=0.03)
    steps = {"snapshot_steps": 5 * plan.snapshot_steps, "persist_steps": 5 * plan.persist_steps}
    rarer = replace(plan, **steps)
    assert simulated(rarer, costs, 2.0, 60_000) > 1.2 * found


def test_costs_by_hand() -> None:
    """8 GB on 8 nodes of a group: 1 GB each, 2 GB with a parity, 3 GB with two."""
    costs = snapshot_costs(8e9, FLEET, SPEEDS, 0.4, 7.0, 1, disk_share=0.1)
    expected = Costs(
        snapshot_stall_s=0.1,
        persist_stall_s=0.0,
        persist_s=10.0,
        restart_s=7.0,
        rebuild_s=4.0,
        reload_s=8.0,
    )
    assert asdict(costs) == pytest.approx(asdict(expected))
    two = snapshot_costs(8e9, FLEET, SPEEDS, 0.4, 7.0, 2)
    assert two.snapshot_stall_s == pytest.approx(0.35)
    assert two.persist_s == pytest.approx(1.0)
    alone = snapshot_costs(8e9, FLEET, SPEEDS, 0.2, 7.0, None)
    assert alone.persist_stall_s == pytest.approx(0.05)
    waiting = snapshot_costs(8e9, FLEET, SPEEDS, 0.2, 7.0, None, blocking=True)
    assert (waiting.persist_stall_s, waiting.persist_s) == (pytest.approx(1.05), 0.0)


def test_survival_is_in_days_and_keeps_the_means() -> None:
    curves = FLEET.survival(1.0)
    assert curves.hardware == pytest.approx(86_400 / 1e6)
    assert curves.software == pytest.approx(86_400 / 4e6)
    assert Fleet(16, 8, 1e6).survival(1.5).software == 0.0

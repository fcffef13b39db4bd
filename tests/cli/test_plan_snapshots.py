"""``holdfast plan snapshots``: what is printed, written and drawn; refused with the remedy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast.planner.snapshots import Fleet, Speeds, plan_snapshots, snapshot_costs

Plan = Callable[..., dict[str, Any]]
JOB = ["--nodes", "16", "--group", "8", "--mttf", "30d", "--state", "80GB", "--step", "0.7s"]


@pytest.fixture
def planned(document: Plan) -> Plan:
    """Plans the snapshots of this job."""
    return partial(document, "plan", "snapshots", *JOB)


def test_table_and_file_hold_the_planners_numbers(
    capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    found = planned()
    fleet, speeds = Fleet(16, 8, 30 * 86_400.0), Speeds(5e9, 250e6, 1e9)
    costs = snapshot_costs(80e9, fleet, speeds, 0.7, 60.0, 1, disk_share=0.1)
    plan = plan_snapshots(fleet, costs, 0.7, 1)
    assert costs.snapshot_stall_s == pytest.approx(3.3)
    assert found["plan"]["snapshot_steps"] == plan.snapshot_steps > 1
    assert found["plan"]["persist_steps"] == plan.persist_steps
    assert found["plan"]["lost"]["recomputing"] == plan.lost.recomputing
    assert found["plan"]["lost_hours_per_month"] == plan.lost.hours_per_month
    assert found["costs"]["persist_s"] == 400.0
    compared = found["compared"]
    assert list(compared) == [
        "checkpoints, training waits",
        "checkpoints in background",
        "snapshots, no parity",
        "snapshots, 1 parity",
        "snapshots, 2 parities",
    ]
    days = [one["survives_days"] for one in compared.values()]
    assert days[0] == days[1] == pytest.approx(days[2])
    assert days[2] < days[3] < days[4]
    assert days[3] == fleet.survival(1.0).time_with_snapshots(0.9)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 nodes in 2 groups of 8, 80 GB each; a step takes 700 ms"
    assert lines[1] == "a node is lost every 30 d: the job fails every 1.88 d"
    row = next(line for line in lines if line.lstrip().startswith("snapshots, 1 parity"))
    assert f" {plan.snapshot_steps} (" in row
    assert f" {plan.persist_steps} (" in row
    assert f"{plan.lost.hours_per_month:.3g}" in row.split()
    assert f"expected loss: {plan.lost.hours_per_month:.3g} h a month of 730 h" in lines


def test_every_argument_changes_what_it_says(planned: Plan) -> None:
    words = "--software-mttf 60d --parities 2 --compute 600ms --copy-rate 10GB/s --disk-rate 2GB/s "
    words += "--network-rate 4GB/s --disk-share 0.5 --restart 2m --survival 0.99 --shape 1.5"
    found = planned(*words.split())
    assert found["plan"]["parities"] == 2
    assert found["costs"] == {
        "snapshot_stall_s": pytest.approx(3 - 0.6),
        "persist_stall_s": 0.0,
        "persist_s": 10.0,
        "restart_s": 120.0,
        "rebuild_s": 20.0,
        "reload_s": 40.0,
    }
    assert found["plan"]["failures_per_s"] == pytest.approx(16 * 1.5 / (30 * 86_400))
    curves = Fleet(16, 8, 30 * 86_400.0, 60 * 86_400.0).survival(1.5)
    survives = found["compared"]["snapshots, 2 parities"]["survives_days"]
    assert survives == curves.time_with_snapshots(0.99, 2)


def test_a_measured_stall_is_of_the_parities_asked_for_and_scales_with_what_others_copy(
    capsys: pytest.CaptureFixture[str], planned: Plan
) -> None:
    found = planned("--stall", "120ms")
    stalls = {
        name: one["lost"]["saving"] * 0.7 * (one["snapshot_steps"] or one["persist_steps"])
        for name, one in found["compared"].items()
    }
    assert stalls["snapshots, 1 parity"] == pytest.approx(0.12)
    assert stalls["snapshots, 2 parities"] == pytest.approx(0.18)
    assert stalls["snapshots, no parity"] == pytest.approx(0.06)
    assert stalls["checkpoints in background"] == pytest.approx(0.06)
    assert stalls["checkpoints, training waits"] == pytest.approx(0.06 + 2 + 40 - 0.7)
    assert "snapshot stall 120 ms (measured)" in capsys.readouterr().out

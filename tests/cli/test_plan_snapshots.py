"""``holdfast plan snapshots``: what is printed, written and drawn; refused with the remedy."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli import plots
from holdfast.cli.main import main
from holdfast.planner.snapshots import Fleet, Speeds, plan_snapshots, snapshot_costs

JOB = ["--nodes", "16", "--group", "8", "--mttf", "30d", "--state", "80GB", "--step", "0.7s"]


def document(tmp_path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    path = tmp_path / "plan.json"
    assert main(["plan", "snapshots", *JOB, "--json", str(path), *words]) == code
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends; nothing else is printed."""
    assert main(["plan", "snapshots", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("holdfast plan: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_table_and_file_hold_the_planners_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = document(tmp_path)
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


def test_a_free_snapshot_is_taken_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--nodes 8 --mttf 30d --state 4GB --step 0.7s --disk-share 1"
    assert main(["plan", "snapshots", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "8 nodes in 1 group of 8" in printed
    expected = "plan with snapshots, 1 parity: snapshot every step (700 ms), persist every 3 steps"
    assert expected in printed


def test_every_argument_changes_what_it_says(tmp_path: Path) -> None:
    words = "--software-mttf 60d --parities 2 --compute 600ms --copy-rate 10GB/s --disk-rate 2GB/s "
    words += "--network-rate 4GB/s --disk-share 0.5 --restart 2m --survival 0.99 --shape 1.5"
    found = document(tmp_path, *words.split())
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
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = document(tmp_path, "--stall", "120ms")
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


def test_a_lone_node_has_no_parity(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "1", "--mttf", "30d", "--state", "1GB", "--step", "1s"]
    assert main(["plan", "snapshots", *words]) == 0
    printed = capsys.readouterr().out
    assert "plan with snapshots, no parity" in printed
    assert "1 parity" not in printed


def test_where_failures_leave_no_time_to_train_the_exit_code_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "--nodes 1024 --mttf 1d --state 80GB --step 10s --restart 10m"
    assert main(["plan", "snapshots", *words.split()]) == 1
    assert "NO PROGRESS: more time is lost than trained" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["", "--shape 2", "--software-mttf 1d", "--group 1"])
def test_a_plot_is_drawn(tmp_path: Path, words: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    assert main(["plan", "snapshots", *JOB, "--plot", str(path), *words.split()]) == 0
    drawn = path.read_text()
    assert "days without another save" in drawn
    assert "<!-- checkpoints: " in drawn
    labels = ["no parity"] if "--group" in words else ["no parity", "1 parity", "2 parities"]
    for label in labels:
        assert f"<!-- snapshots, {label}: " in drawn


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--mttf 30", "--mttf 30: give a time like 700ms, 90s, 5m, 12h or 30d"),
        ("--mttf 0", "mttf = 0.0 s must be finite and above 0"),
        ("--software-mttf 0", "software mttf = 0.0 s must be above 0"),
        ("--step 0", "step_s = 0.0 must be finite and above 0"),
        ("--state 4", "--state 4: give a size like 350MB, 4GB or 4GiB"),
        ("--state 0", "state = 0.0 bytes must be finite and above 0"),
        ("--disk-rate 4GB", "--disk-rate 4GB: give a speed like 250MB/s"),
        ("--copy-rate 0GB/s", "copy_bytes_s = 0.0 must be finite and above 0"),
        ("--disk-share 1.5", "disk share = 1.5 must be above 0 and at most 1"),
        ("--disk-share nan", "disk share = nan must be above 0"),
        ("--nodes 0", "0 nodes are not made of groups of 8"),
        ("--group 5", "16 nodes are not made of groups of 5"),
        ("--group 0", "16 nodes are not made of groups of 0"),
        ("--parities 3", "--parities 3: a group of 8 can have 0 to 2"),
        ("--parities -1", "--parities -1: a group of 8 can have 0 to 2"),
        ("--group 2 --parities 2", "--parities 2: a group of 2 can have 0 to 1"),
        ("--survival 1", "--survival 1.0 must be more than 0 and less than 1"),
        ("--shape 0", "shape = 0.0 must be from 0.01 to 100"),
        ("--plot plan.gif", "cannot draw plan.gif"),
        ("--plot /no/such/folder/x.png", "/no/such/folder"),
        ("--json /no/such/folder/x.json", "/no/such/folder"),
    ],
)
def test_bad_input_is_one_line_with_the_value_and_the_remedy(
    capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    assert expected in refused(capsys, *JOB, *words.split())


def test_without_matplotlib_a_plot_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "torch-holdfast[plot]" in refused(capsys, *JOB, "--plot", str(tmp_path / "plan.png"))


@pytest.mark.parametrize("words", [["--nodes", "8"], ["--nodes", "eight", *JOB[2:]]])
def test_what_is_missing_or_no_number_is_refused_by_the_parser(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "snapshots", *words])
    assert stopped.value.code == 2

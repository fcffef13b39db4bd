"""The bench of snapshots from a device goes through, and stops before it times what is wrong."""

from pathlib import Path

import pytest
import torch

from bench import rows, snapshot_device
from holdfast.snapshot.client.snapshots import Snapshots

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("results")]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for whatever would be recorded."""
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(snapshot_device, "STEPS", 2)
    return tmp_path / "results"


def test_a_dry_run_takes_snapshots_and_reports_no_figure(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot_device.main(["--dry-run"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "10 snapshots of 51840 bytes; not measured"
    assert not results.exists()


def test_a_snapshot_that_does_not_come_back_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "rollback", lambda self: self.committed_step)
    with pytest.raises(SystemExit, match="step 1 did not come back: nothing was timed"):
        snapshot_device.main(["--dry-run"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_by_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        snapshot_device.main([])
    assert ended.value.code == snapshot_device.NO_DEVICE
    assert "there is none here" in capsys.readouterr().out


def test_goals_are_said_to_be_met_or_missed() -> None:
    row = {"state_bytes": 10e9, "step_s": 0.4, "stall_s": 4e-3, "slowdown": 1.05}
    said = snapshot_device.table([row | {"share_of_bus": 0.9}], True).splitlines()
    assert [line.split()[-1] for line in said[1:]] == ["met", "MISSED", "met"]

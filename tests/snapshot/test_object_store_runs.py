"""Runs that persist to an S3 store: another machine goes on from there; an outage costs no step."""

import json
from pathlib import Path

import pytest
from s3_server import Server
from snapshot_disk import lose_smp, told
from snapshot_trainer import Tiny, kinds

from holdfast.cli import main as cli
from holdfast.errors import SnapshotError, SnapshotLost
from holdfast.snapshot.node import launch

pytestmark = pytest.mark.processes
PLACE = "s3://bucket/run?keep_every=100"


@pytest.fixture
def other_dir(tmp_path: Path) -> Path:
    """The run directory of another machine."""
    return tmp_path / "other"


@pytest.mark.representative
def test_another_machine_goes_on_bit_for_bit_from_the_newest_intact_step_in_the_store(
    server: Server, run: Tiny, run_dir: Path, other_dir: Path
) -> None:
    with run.snapshots(run_dir, persist_dir=PLACE) as snapshots:
        digests = run.train(range(1, 3), snapshots)
        snapshots.persist()
        digests |= run.train(range(3, 5), snapshots)
        snapshots.persist()
        ahead = run.train(range(5, 7), snapshots)
        lose_smp(snapshots)
    for damaged, goal in ((False, 4), (True, 2)):
        if damaged:
            name = next(n for n in server.objects if "step-4-" in n and n.endswith(".safetensors"))
            server.objects[name] = server.objects[name][:-1] + b"?"
        other = Tiny(seed=1)
        assert other.digest() != digests[goal]
        place = other_dir / str(goal)
        with other.snapshots(place, persist_dir=PLACE, run_id=snapshots.run_id) as later:
            assert later.restore() == goal
            assert other.digest() == digests[goal]
            if not damaged:
                assert other.train(range(5, 7)) == ahead
        launch.stop_smp(place)
    assert [kind for kind in kinds() if kind != "smp_lost"] == [
        "restored",
        "snapshot_corrupt",
        "restored",
    ]


def test_an_outage_is_said_costs_no_step_and_is_made_good_later(
    server: Server, run: Tiny, run_dir: Path
) -> None:
    with run.snapshots(run_dir, persist_dir=PLACE) as snapshots:
        run.train(range(1, 3), snapshots)
        server.fault = lambda method, name: "503"
        with pytest.raises(SnapshotError, match=r"step 2 was not persisted: .* is only in"):
            snapshots.persist()
        run.train(range(3, 5), snapshots)
        reasons = [event.detail["reason"] for event in told(run_dir, "persist_failed")]
        assert "503" in reasons[0]
        server.fault = lambda method, name: ""
        snapshots.persist()
        heads = {n for n in server.objects if n.endswith(".json") and "data" not in n}
        assert heads == {"run/step-2.json", "run/step-4.json"}


def test_a_run_without_memory_does_not_begin_anew_while_the_store_is_silent(
    server: Server, run: Tiny, run_dir: Path
) -> None:
    server.fault = lambda method, name: "503"
    with (
        run.snapshots(run_dir, persist_dir=PLACE) as snapshots,
        pytest.raises(SnapshotLost, match="once the storage can be read"),
        pytest.warns(RuntimeWarning, match="only the checkpoints in"),
    ):
        snapshots.restore()


def test_the_verbs_read_the_store_and_not_the_staging_folder(
    server: Server, run: Tiny, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run.snapshots(run_dir, persist_dir=PLACE, persist_every=2) as snapshots:
        run.train(range(1, 3), snapshots)
        snapshots.persist()
        lose_smp(snapshots)
    given = ["--run-dir", str(run_dir)]
    assert cli.main(["snapshots", "verify", *given]) == 0
    assert cli.main(["snapshots", "status", *given, "--json", str(tmp_path / "s.json")]) == 1
    status = json.loads((tmp_path / "s.json").read_text())
    assert (status["persisted"], status["persist_dir"]) == ([2], "s3://bucket/run")
    exported = ["--to", str(tmp_path / "e"), "--persist-dir", "s3://bucket/run"]
    assert cli.main(["snapshots", "export", *given, *exported]) == 0
    assert (tmp_path / "e" / "rank-0.safetensors").exists()
    name = next(name for name in server.objects if name.endswith(".safetensors"))
    server.objects[name] = server.objects[name][:-1] + b"?"
    assert cli.main(["snapshots", "verify", *given]) == 1
    assert "s3://bucket/run/step-2" in capsys.readouterr().out

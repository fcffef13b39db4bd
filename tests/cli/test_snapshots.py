"""``holdfast snapshots`` against real runs: exit codes, names of what is damaged, stock loaders."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from snapshot_disk import lose_smp
from snapshot_memory import flip_a_bit, slot_file
from snapshot_trainer import Tiny
from snapshot_waits import until
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch

Call = Callable[..., tuple[int, str, str]]
pytestmark = [pytest.mark.processes, pytest.mark.representative]


@pytest.fixture
def run() -> Tiny:
    return Tiny()


@pytest.fixture
def snapshots(run: Tiny, run_dir: Path) -> Iterator[Snapshots]:
    """A run that stands at step 3 and goes on; nothing is persisted."""
    with run.snapshots(run_dir) as snapshots:
        run.train(range(1, 4), snapshots)
        snapshots.wait_committed()
        yield snapshots


def test_status_while_training_runs_and_after(
    call: Call, snapshots: Snapshots, run_dir: Path, tmp_path: Path
) -> None:
    code, out, _ = call("status", "--run-dir", run_dir, "--json", tmp_path / "s.json")
    assert code == 0
    for words in ("step 3, ", "0 steps begun since", "1 of 1", "yes: step 3 in memory"):
        assert words in out
    status = json.loads((tmp_path / "s.json").read_text())
    assert (status["smp"]["newest"], status["persisted"]) == (3, [])
    assert status["smp"]["age_s"] < 60
    assert status["smp"]["copy_bytes_s"] > 0
    lose_smp(snapshots)
    code, out, _ = call("status", "--run-dir", run_dir)
    assert code == 1
    assert "none runs in" in out
    assert "yes" not in out


def test_verify_names_what_is_damaged_in_memory(
    call: Call, snapshots: Snapshots, run_dir: Path
) -> None:
    code, out, _ = call("verify", "--run-dir", run_dir)
    assert (code, "2 steps, 0 damaged" in out) == (0, True)
    flip_a_bit(slot_file(snapshots.status(), 2))
    code, out, _ = call("verify", "--run-dir", run_dir)
    assert (code, "2 steps, 1 damaged" in out) == (1, True)
    assert "local rank 0: model." in out
    assert snapshots.status()["clean"] == [[2, 3]]


def test_verify_names_what_is_damaged_on_disk(
    call: Call, run: Tiny, run_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    with run.snapshots(run_dir, persist_dir=folder) as snapshots:
        run.train(range(1, 4), snapshots)
        snapshots.persist()
        code, out, _ = call("status", "--run-dir", run_dir)
        assert "yes: step 3 on disk" in out
        path = folder / "step-3" / "rank-0.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        code, out, _ = call("verify", "--run-dir", run_dir, "--json", tmp_path / "v.json")
        assert (code, "3 steps, 1 damaged" in out) == (1, True)
        checked = json.loads((tmp_path / "v.json").read_text())["checked"]
        assert [row["where"] for row in checked if row["damage"]] == [str(folder / "step-3")]


def test_recover_saves_what_a_dead_trainer_left_and_a_new_run_goes_on_from_it(
    call: Call, snapshots: Snapshots, run: Tiny, run_dir: Path
) -> None:
    digest = run.digest()
    snapshots.close(finished=False)
    code, out, _ = call("recover", "--run-dir", run_dir)
    folder = run_dir / "checkpoints"
    assert (code, f"step 3 saved as {folder / 'step-3'}" in out) == (0, True)
    code, out, _ = call("recover", "--run-dir", run_dir)
    assert (code, "was already in" in out) == (0, True)
    lose_smp_of(run_dir)
    other = Tiny(seed=1)
    assert other.digest() != digest
    with other.snapshots(run_dir, persist_dir=folder) as later:
        assert later.restore() == 3
        assert other.digest() == digest


def lose_smp_of(run_dir: Path) -> None:
    assert launch.stop_smp(run_dir)
    until(lambda: launch.smp_status(run_dir) is None, "the SMP ends")


def test_recover_takes_the_older_step_when_the_newest_rotted(
    call: Call, snapshots: Snapshots, run_dir: Path, tmp_path: Path
) -> None:
    flip_a_bit(slot_file(snapshots.status(), 3))
    code, _, err = call("recover", "--run-dir", run_dir, "--to", tmp_path / "to")
    assert (code, "step 3 in memory is damaged" in err) == (0, True)
    assert Checkpoints(tmp_path / "to").steps() == [2]
    flip_a_bit(slot_file(snapshots.status(), 2))
    code, _, err = call("recover", "--run-dir", run_dir, "--to", tmp_path / "to")
    assert (code, "holds no intact snapshot" in err) == (1, True)


def expected(run: Tiny) -> dict[str, Any]:
    names = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler}
    return {name: part.state_dict() for name, part in names.items()}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[k], theirs[k]) for k in ours)
    return bool(ours == theirs)


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_what_is_exported_loads_with_stock_tools_and_is_equal(
    call: Call,
    snapshots: Snapshots,
    run: Tiny,
    run_dir: Path,
    tmp_path: Path,
    source: str,
) -> None:
    state = expected(run)
    if source == "disk":
        assert call("recover", "--run-dir", run_dir)[0] == 0
        lose_smp(snapshots)
    for form in ("safetensors", "torch", "dcp"):
        words = ("--run-dir", run_dir, "--to", tmp_path / form, "--format", form)
        code, out, _ = call("export", *words)
        assert (code, "step 3, from " + ("memory" if source == "memory" else "/") in out) == (
            0,
            True,
        )
    tensors = load_file(tmp_path / "safetensors" / "rank-0.safetensors")
    assert torch.equal(tensors["model.0.weight"], state["model"]["0.weight"])
    exp_avg = state["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(tensors["optimizer.state.0.exp_avg"], exp_avg)
    whole = torch.load(tmp_path / "torch" / "rank-0.pt", weights_only=True)
    assert {name: same(state[name], whole[name]) for name in state} == dict.fromkeys(state, True)
    assert whole["step"] == 3
    into = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    assert not same(state["model"], into["model"])
    load(into, storage_reader=FileSystemReader(tmp_path / "dcp" / "rank-0"), no_dist=True)
    assert same(state["model"], into["model"])


def test_export_of_a_named_step_and_what_it_refuses(
    call: Call, snapshots: Snapshots, run_dir: Path, tmp_path: Path
) -> None:
    words = ("--run-dir", run_dir, "--to", tmp_path / "out")
    assert call("export", *words, "--step", 1)[0] == 1
    assert not (tmp_path / "out").exists()
    code, out, _ = call("export", *words, "--step", 2)
    assert (code, "step 2, from memory" in out) == (0, True)
    code, _, err = call("export", *words)
    assert (code, "exists: name a folder that does not" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir() if "writing" in path.name] == []


def test_nothing_to_verify_or_recover(call: Call, tmp_path: Path) -> None:
    code, _, err = call("verify", "--run-dir", tmp_path)
    assert (code, "no snapshot is held" in err) == (2, True)
    code, _, err = call("recover", "--run-dir", tmp_path)
    assert (code, "no SMP runs" in err) == (1, True)

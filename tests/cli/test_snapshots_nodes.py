"""``holdfast snapshots`` where several nodes divide the states, beside a run that is alive."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import snapshot_fault_ranks as ranks
import torch
from snapshot_memory import flip_a_bit, slot_file

from bench.nodes import Cluster
from bench.nodes_rank import Work
from holdfast import config
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch

NODES = 3

Call = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.processes


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three nodes whose ranks stand still, with two clean steps each."""
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "20")
    cluster = Cluster(Work(tmp_path / "run", 1000), NODES)
    try:
        cluster.start(partial(ranks.held, 2))
        run_dirs = [cluster.run_dir(node) for node in range(NODES)]
        newest = ranks.FAULT_STEP
        cluster.until(lambda: all(_newest(path) == newest for path in run_dirs), "no commit")
        yield cluster
    finally:
        cluster.close()


def _newest(run_dir: Path) -> int | None:
    status = launch.smp_status(run_dir) if run_dir.is_dir() else None
    return status["newest"] if status else None


def exported(folder: Path, rank: int) -> str:
    """The digest of a rank's state, as the rank itself computes it."""
    whole: dict[str, Any] = torch.load(folder / f"rank-{rank}.pt", weights_only=True)
    parts = [whole[name] for name in ("model", "optimizer", "scheduler")]
    return state_digest([parts, whole["rng"]["torch"]])


def test_status_says_what_can_be_lost(call: Call, cluster: Cluster, tmp_path: Path) -> None:
    words = "--run-dir", cluster.run_dir(0), "--json", tmp_path / "s.json"
    assert call("status", *words)[0] == 0
    found = json.loads((tmp_path / "s.json").read_text())["smp"]["cluster"]
    assert (found["nodes"], found["parities"], found["survivable"]) == (NODES, 1, 1)
    cluster.smp(2).kill()
    cluster.until(lambda: _offline(cluster) == [2], "node 2 is not missed")
    assert call("status", *words)[0] == 0
    found = json.loads((tmp_path / "s.json").read_text())["smp"]["cluster"]
    assert (found["offline"], found["survivable"]) == ([2], 0)


def _offline(cluster: Cluster) -> list[int]:
    status = launch.smp_status(cluster.run_dir(0))
    assert status is not None
    offline: list[int] = status["cluster"]["offline"]
    return offline


def test_verify_names_what_is_damaged_of_a_share(call: Call, cluster: Cluster) -> None:
    run_dir = cluster.run_dir(1)
    code, out, _ = call("verify", "--run-dir", run_dir)
    assert (code, "2 steps, 0 damaged" in out) == (0, True)
    status = launch.smp_status(run_dir)
    assert status is not None
    flip_a_bit(slot_file(status, ranks.FAULT_STEP))
    code, out, _ = call("verify", "--run-dir", run_dir)
    assert (code, "2 steps, 1 damaged" in out) == (1, True)
    assert "stripe" in out


@pytest.mark.parametrize("lost", [(), pytest.param((1,), marks=pytest.mark.representative)])
def test_a_whole_state_is_put_together_from_the_nodes_that_are_left(
    call: Call, cluster: Cluster, tmp_path: Path, lost: tuple[int, ...]
) -> None:
    run_dir, step = cluster.run_dir(0), ranks.FAULT_STEP
    for node in lost:
        cluster.smp(node).kill()
    words = "--run-dir", run_dir, "--to", tmp_path / "out", "--format", "torch"
    code, out, err = call("export", *words)
    assert code == 0, err
    assert f"step {step}, from memory" in out
    assert exported(tmp_path / "out", 0) == cluster.digests(0)[step]
    assert cluster.digests(0)[step] != cluster.digests(0)[step - 1]
    code, out, err = call("recover", "--run-dir", run_dir, "--to", tmp_path / "disk")
    assert code == 0, err
    assert Checkpoints(tmp_path / "disk").steps() == [step]
    words = "--persist-dir", tmp_path / "disk", "--to", tmp_path / "again", "--format", "torch"
    assert call("export", "--run-dir", tmp_path / "disk", *words)[0] == 0
    assert exported(tmp_path / "again", 0) == cluster.digests(0)[step]


def test_with_more_nodes_lost_than_parities_there_is_nothing_to_recover(
    call: Call, cluster: Cluster, tmp_path: Path
) -> None:
    for node in (1, 2):
        cluster.smp(node).kill()
    words = "--run-dir", cluster.run_dir(0), "--to", tmp_path / "disk"
    code, _, err = call("recover", *words)
    assert code == 1
    assert "holds no intact snapshot" in err
    assert Checkpoints(tmp_path / "disk").steps() == []

"""Bounded waits, run directories whose SMP is stopped, and runs on several nodes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from s3_server import Server
from snapshot_shell import Shell
from snapshot_trainer import Tiny
from snapshot_waits import PATIENCE_S

from holdfast import config
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.disk import object_store
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch


@pytest.fixture(autouse=True)
def _settings(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(PATIENCE_S))
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", config.RUN_DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shell() -> Shell:
    """The protocol with all its ranks connected."""
    shell = Shell()
    shell.hello()
    return shell


@pytest.fixture
def disk(tmp_path: Path) -> Checkpoints:
    """A folder for checkpoints."""
    return Checkpoints(tmp_path / "disk")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 server that this process, which tries things twice, and its children find."""
    pytest.importorskip("obstore", reason="the extra `storage` is not installed")
    with s3_server.running() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(object_store, "_RETRIES", 1)
        yield server


@pytest.fixture
def run() -> Tiny:
    """A tiny training run."""
    return Tiny()


@pytest.fixture
def pair(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts two ranks of one node in this process; they and their SMP are ended at the end."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    started: list[tuple[Tiny, Snapshots]] = []

    def start(seed: int = 0, **options: Any) -> list[tuple[Tiny, Snapshots]]:
        for rank in range(2):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            monkeypatch.setenv("RANK", str(rank))
            run = Tiny(seed + rank)
            started.append((run, run.snapshots(run_dir, **options)))
        return started[-2:]

    yield start
    for _, snapshots in started:
        snapshots.close(finished=False)
    launch.stop_smp(run_dir)


@pytest.fixture
def held(tmp_path: Path, run_dir: Path) -> Iterator[Any]:
    """Starts ranks that took a snapshot and wait; they are killed at the end."""
    # Not at the top: most tests do without torch's distributed tensors, which are slow to import.
    from dtensor_trainer import hold
    from gloo_ranks import Ranks

    started: list[Ranks] = []

    def hold_on(ranks: int, *arguments: Any) -> list[list[dict[str, Any]]]:
        started.append(Ranks(tmp_path / "held", ranks, hold, run_dir, *arguments))
        started[0].until(lambda: all(started[0].heard()), "no snapshot")
        return started[0].heard()

    yield hold_on
    for ranks in started:
        ranks.kill_trainers()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Makes runs on several nodes, and ends what is left of them."""
    from cluster_runs import STEPS, Cluster, Work

    made: list[Cluster] = []

    def cluster(nodes: int, local: int = 1, **work: Any) -> Cluster:
        given = {"steps": STEPS} | work
        made.append(Cluster(Work(tmp_path / f"run-{len(made)}", **given), nodes, local))
        return made[-1]

    yield cluster
    for left in made:
        left.close()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Undisturbed runs by layout and number of ranks, each made once."""
    from cluster_runs import Cluster, undisturbed

    known: dict[tuple[int, str], Cluster] = {}

    def cluster(world: int, layout: str = "replica") -> Cluster:
        if (world, layout) not in known:
            folder = tmp_path_factory.mktemp("calm")
            known[world, layout] = undisturbed(folder, layout, world)
        return known[world, layout]

    return cluster

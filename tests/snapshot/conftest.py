"""Bounded waits, run directories whose SMP is stopped, and a leak check after every test."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from snapshot_waits import PATIENCE_S, smp_pids, until

from holdfast import config, events
from holdfast.snapshot import launch
from holdfast.snapshot.persist import Checkpoints


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path) -> Iterator[None]:
    """No SMP process and no /dev/shm entry outlives a test."""
    shm = set(os.listdir("/dev/shm"))
    yield
    try:
        until(lambda: not smp_pids(tmp_path), "an SMP is left over", 5.0)
    finally:
        for pid in smp_pids(tmp_path):
            psutil.Process(pid).kill()
    assert not [name for name in set(os.listdir("/dev/shm")) - shm if "holdfast" in name]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(PATIENCE_S))
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", config.RUN_DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    events.clear()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run_dir(tmp_path: Path, no_leftovers: None) -> Iterator[Path]:
    """A run directory; its SMP, if one is left, is asked to stop at the end."""
    path = tmp_path / "run"
    yield path
    launch.stop_smp(path)


@pytest.fixture
def disk(tmp_path: Path) -> Checkpoints:
    """A folder for checkpoints."""
    return Checkpoints(tmp_path / "disk")


@pytest.fixture
def held(tmp_path: Path, run_dir: Path) -> Iterator[Any]:
    """Starts ranks that took a snapshot and wait; they are killed at the end."""
    # Not at the top: most tests do without torch's distributed tensors, which are slow to import.
    from dtensor_trainer import hold
    from gloo_ranks import Ranks, heard

    started: list[Ranks] = []

    def hold_on(ranks: int, *arguments: Any) -> list[list[dict[str, Any]]]:
        started.append(Ranks(tmp_path / "held", ranks, hold, run_dir, *arguments))
        started[0].until(lambda said: said, "the snapshot")
        return [heard(said) for said in started[0].said]

    yield hold_on
    for ranks in started:
        ranks.kill()

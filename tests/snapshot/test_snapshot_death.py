"""Trainers that are killed at any moment, and what a new process then restores."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from snapshot_trainer import Tiny
from snapshot_waits import PATIENCE_S, alive, until

from holdfast import config
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch

pytestmark = pytest.mark.processes
forked = pytest.mark.usefixtures("forked_python")

SCRIPT = Path(__file__).with_name("snapshot_trainer.py")
ROOT = str(SCRIPT.parents[2])

# Each reading of the wall clock is a day off the one before. What does so leaves its process id.
JUMPING = """
import itertools, os, pathlib, time
real, days = time.time, itertools.cycle((0, 86400, -86400))
time.time = lambda: real() + next(days)
time.time_ns = lambda: int(time.time() * 1e9)
note = lambda: pathlib.Path(__file__).with_name(str(os.getpid())).touch()
os.register_at_fork(after_in_child=note)
note()
"""


class Trainer:
    """A trainer in a process of its own; what it says is read line by line."""

    def __init__(
        self, run_dir: Path, *options: str, rank: int = 0, ranks: int = 1, paths: str = ROOT
    ) -> None:
        place = {"LOCAL_RANK": str(rank), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(run_dir), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self.said: list[list[str]] = []

    def read_until(self, word: str) -> list[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.split())
            if self.said[-1][0] == word:
                return self.said[-1]
        raise AssertionError(f"the trainer ended before it said {word!r}: {self.said}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Cast:
    """Starts trainers and ends all of them."""

    def __init__(self) -> None:
        self.trainers: list[Trainer] = []

    def start(self, run_dir: Path, *options: str, **place: Any) -> Trainer:
        self.trainers.append(Trainer(run_dir, *options, **place))
        return self.trainers[-1]


@pytest.fixture
def cast() -> Iterator[Cast]:
    cast = Cast()
    yield cast
    for trainer in cast.trainers:
        trainer.kill()


def expected(steps: int, seed: int = 0) -> dict[int, str]:
    """The digests of a run to which nothing happened."""
    run = Tiny(seed)
    return {0: run.digest()} | run.train(range(1, steps + 1))


def clean(run_dir: Path) -> list[list[int]]:
    status = launch.smp_status(run_dir)
    assert status is not None
    found: list[list[int]] = status["clean"]
    return found


@forked
def test_killed_in_the_middle_of_a_copy(run_dir: Path, cast: Cast) -> None:
    healthy = expected(6)
    first = cast.start(run_dir, "--steps", "6", "--pause-at", "4")
    first.read_until("paused")
    first.kill()
    assert clean(run_dir) == [[2, 3]]
    second = cast.start(run_dir, "--steps", "6")
    assert second.read_until("start") == ["start", "3", healthy[3]]
    assert second.read_until("end") == ["end", healthy[6]]
    assert healthy[3] != healthy[0]
    assert second.process.wait(PATIENCE_S) == 0


@forked
@pytest.mark.representative
def test_killed_at_random_moments_the_run_ends_as_if_nothing_had_happened(
    run_dir: Path, cast: Cast
) -> None:
    steps = 60
    healthy = expected(steps)
    chance = random.Random(config.DEFAULT_TIMEOUT_S)
    for _ in range(4):
        trainer = cast.start(run_dir, "--steps", str(steps), "--delay-s", "0.01")
        _, start, digest = trainer.read_until("start")
        assert digest == healthy[int(start)]
        time.sleep(chance.uniform(0.0, 0.15))
        trainer.kill()
        assert int(start) < steps
    last = cast.start(run_dir, "--steps", str(steps))
    _, start, digest = last.read_until("start")
    assert int(start) > 0
    assert digest == healthy[int(start)]
    assert last.read_until("end") == ["end", healthy[steps]]


@forked
def test_two_ranks_killed_with_a_step_written_by_one_restore_the_same_older_step(
    run_dir: Path, cast: Cast
) -> None:
    steps = 4
    healthy = [expected(steps, seed) for seed in (0, 1)]
    pauses = ("-1", "3")
    first = [
        cast.start(run_dir, "--steps", "3", "--pause-at", pause, rank=rank, ranks=2)
        for rank, pause in enumerate(pauses)
    ]
    first[1].read_until("paused")
    first[0].read_until("step")
    _wait_written(run_dir)
    for trainer in first:
        trainer.kill()
    assert clean(run_dir) == [[1, 2], [1, 2]]
    second = [cast.start(run_dir, "--steps", str(steps), rank=rank, ranks=2) for rank in range(2)]
    for rank, trainer in enumerate(second):
        assert trainer.read_until("start") == ["start", "2", healthy[rank][2]]
        assert trainer.read_until("end") == ["end", healthy[rank][steps]]


@forked
@pytest.mark.representative
def test_trainer_then_smp_killed_the_run_goes_on_from_disk(
    run_dir: Path, cast: Cast, tmp_path: Path
) -> None:
    steps, disk = 8, Checkpoints(tmp_path / "disk")
    options = ("--steps", str(steps), "--persist-dir", str(disk.folder))
    healthy = expected(steps)
    first = cast.start(run_dir, *options, "--pause-at", "5")
    first.read_until("paused")
    assert disk.steps() == []
    first.kill()
    until(lambda: disk.steps() == [4], "what the dead trainer left is on disk")
    status = launch.smp_status(run_dir)
    assert status is not None
    psutil.Process(status["pid"]).kill()
    until(lambda: not alive(status["pid"]), "the SMP is killed")
    second = cast.start(run_dir, *options)
    assert second.read_until("start") == ["start", "4", healthy[4]]
    assert healthy[4] != healthy[0]
    assert second.read_until("end") == ["end", healthy[steps]]
    assert second.process.wait(PATIENCE_S) == 0


def test_a_wall_clock_that_jumps_in_every_process_changes_nothing(
    run_dir: Path, cast: Cast, tmp_path: Path
) -> None:
    (jumping := tmp_path / "jumping").mkdir()
    (jumping / "sitecustomize.py").write_text(JUMPING)
    steps, disk = 8, Checkpoints(tmp_path / "disk")
    options = ("--steps", str(steps), "--persist-dir", str(disk.folder), "--persist-every", "2")
    paths = os.pathsep.join((ROOT, str(jumping)))
    healthy = expected(steps)
    first = cast.start(run_dir, *options, "--pause-at", "5", paths=paths)
    first.read_until("paused")
    status = launch.smp_status(run_dir)
    assert status is not None
    until(lambda: 4 in disk.steps(), "the newest is on disk")
    first.kill()
    second = cast.start(run_dir, *options, "--pause-at", "7", paths=paths)
    assert second.read_until("start") == ["start", "4", healthy[4]]
    second.read_until("paused")
    until(lambda: 6 in disk.steps(), "the newest is on disk again")
    second.kill()
    psutil.Process(status["pid"]).kill()
    until(lambda: not alive(status["pid"]), "the SMP is killed")
    third = cast.start(run_dir, *options, paths=paths)
    assert third.read_until("start") == ["start", "6", healthy[6]]
    assert third.read_until("end") == ["end", healthy[steps]]
    assert third.process.wait(PATIENCE_S) == 0
    pids = [first.process.pid, third.process.pid, status["pid"], status["persister"]["pid"]]
    assert all((jumping / str(pid)).exists() for pid in pids)


def _wait_written(run_dir: Path) -> None:
    def written() -> bool:
        status = launch.smp_status(run_dir)
        assert status is not None
        return "written" in status["slots"][0] and "writing" in status["slots"][1]

    until(written, "rank 0 has written what rank 1 is still writing")

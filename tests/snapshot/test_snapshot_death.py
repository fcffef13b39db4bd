"""Trainers that are killed at any moment, and what a new process then restores."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from snapshot_trainer import Tiny
from snapshot_waits import PATIENCE_S, kill, until

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
# A trainer whose clock jumps as well, forked where no interpreter starts that would read JUMPING.
JUMPING_TRAINER = """
import pathlib, runpy
clock = pathlib.Path(__file__).with_name("sitecustomize.py")
exec(compile(clock.read_text(), clock, "exec"), {"__file__": str(clock)})
runpy.run_path(%r, run_name="__main__")
"""


class Trainer:
    """A trainer in a process of its own; what it says is read line by line."""

    def __init__(
        self,
        run_dir: Path,
        *options: str,
        rank: int = 0,
        ranks: int = 1,
        paths: str = ROOT,
        script: Path = SCRIPT,
    ) -> None:
        place = {"LOCAL_RANK": str(rank), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        # By its name it is one run, although the arguments of its lives differ.
        place = {**place, "HOLDFAST_RUN_ID": "one run"}
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(run_dir), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **place,
                "PYTHONPATH": paths,
                "OMP_NUM_THREADS": "1",
            },
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


Start = Callable[..., Trainer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts trainers, and ends all of them."""
    started: list[Trainer] = []

    def begin(*arguments: Any, **place: Any) -> Trainer:
        started.append(Trainer(*arguments, **place))
        return started[-1]

    yield begin
    for trainer in started:
        trainer.kill()


def expected(steps: int, seed: int = 0) -> dict[int, str]:
    """The digests of a run to which nothing happened."""
    run = Tiny(seed)
    return {0: run.digest()} | run.train(range(1, steps + 1))


def status(run_dir: Path) -> dict[str, Any]:
    found = launch.smp_status(run_dir)
    assert found is not None
    return found


@forked
@pytest.mark.representative
def test_killed_at_random_moments_the_run_ends_as_if_nothing_had_happened(
    run_dir: Path, start: Start
) -> None:
    steps = 60
    healthy = expected(steps)
    chance = random.Random(config.DEFAULT_TIMEOUT_S)
    for life in range(4):
        trainer = start(run_dir, "--steps", str(steps), "--delay-s", "0.01")
        _, restored, digest = trainer.read_until("start")
        assert digest == healthy[int(restored)]
        if life == 0:  # however slow the machine is, a snapshot is complete in the first life
            until(lambda: status(run_dir)["clean"][0], "the first snapshot is complete")
        time.sleep(chance.uniform(0.0, 0.15))
        trainer.kill()
        assert int(restored) < steps
    last = start(run_dir, "--steps", str(steps))
    _, restored, digest = last.read_until("start")
    assert int(restored) > 0
    assert digest == healthy[int(restored)]
    assert last.read_until("end") == ["end", healthy[steps]]


@forked
def test_two_ranks_killed_with_a_step_written_by_one_restore_the_same_older_step(
    run_dir: Path, start: Start
) -> None:
    steps = 4
    healthy = [expected(steps, seed) for seed in (0, 1)]
    first = [
        start(run_dir, "--steps", "3", "--pause-at", pause, rank=rank, ranks=2)
        for rank, pause in enumerate(("-1", "3"))
    ]
    first[1].read_until("paused")

    def written_by_one() -> bool:
        first, second = status(run_dir)["slots"]
        return "written" in first and "writing" in second

    until(written_by_one, "rank 0 has written what rank 1 is still writing")
    for trainer in first:
        trainer.kill()
    assert status(run_dir)["clean"] == [[1, 2], [1, 2]]
    second = [start(run_dir, "--steps", str(steps), rank=rank, ranks=2) for rank in range(2)]
    for rank, trainer in enumerate(second):
        assert trainer.read_until("start") == ["start", "2", healthy[rank][2]]
        assert trainer.read_until("end") == ["end", healthy[rank][steps]]
        assert trainer.process.wait(PATIENCE_S) == 0


@forked
@pytest.mark.parametrize(
    "jumps", [pytest.param(False, marks=pytest.mark.representative), True], ids=["calm", "jumping"]
)
def test_trainers_and_then_their_smp_killed_the_run_goes_on_whatever_the_wall_clock_says(
    run_dir: Path, start: Start, tmp_path: Path, jumps: bool
) -> None:
    (clock := tmp_path / "clock").mkdir()
    place: dict[str, Any] = {"paths": os.pathsep.join((ROOT, str(clock)))}
    if jumps:
        (clock / "sitecustomize.py").write_text(JUMPING)  # the SMP's interpreter reads it
        place["script"] = clock / "trainer.py"
        place["script"].write_text(JUMPING_TRAINER % str(SCRIPT))
    steps, disk = 8, Checkpoints(tmp_path / "disk")
    options = ("--steps", str(steps), "--persist-dir", str(disk.folder))
    healthy = expected(steps)
    first = start(run_dir, *options, "--pause-at", "5", **place)
    first.read_until("paused")
    assert disk.steps() == []
    held = status(run_dir)
    first.kill()
    until(lambda: disk.steps() == [4], "what the dead trainer left is on disk")
    second = start(run_dir, *options, "--pause-at", "7", **place)
    assert second.read_until("start") == ["start", "4", healthy[4]]
    second.read_until("paused")
    second.kill()
    until(lambda: disk.steps() == [4, 6], "what the next one left is on disk too")
    kill(held["pid"])
    third = start(run_dir, *options, **place)
    assert third.read_until("start") == ["start", "6", healthy[6]]
    assert healthy[6] != healthy[0]
    assert third.read_until("end") == ["end", healthy[steps]]
    assert third.process.wait(PATIENCE_S) == 0
    if jumps:
        pids = [first.process.pid, third.process.pid, held["pid"], held["persister"]["pid"]]
        assert all((clock / str(pid)).exists() for pid in pids)

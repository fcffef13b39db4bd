"""``holdfast smp``: snapshots outlive everything in the trainer's cgroup, which is killed whole.

This is what a Slurm step and a container of a pod are for the kernel: a cgroup, and for a container
a namespace of process ids and one of mounts as well.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from snapshot_trainer import Tiny
from snapshot_waits import PATIENCE_S, until

from holdfast.cli import main as cli
from holdfast.snapshot.node import host, launch

pytestmark = pytest.mark.processes
SCRIPT = Path(__file__).with_name("snapshot_trainer.py")
ROOT = str(SCRIPT.parents[2])
PLACES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


class Cgroup:
    """A cgroup of version 2."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def start(self, *command: object) -> "subprocess.Popen[str]":
        more = {"HOLDFAST_RUN_ID": "one run", "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["sh", "-c", ENTER, str(self.path), *map(str, command)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | more,
        )

    def pids(self) -> list[str]:
        return (self.path / "cgroup.procs").read_text().split()

    def kill(self) -> None:
        (self.path / "cgroup.kill").write_text("1")
        until(lambda: not self.pids(), "all processes of the cgroup have ended")

    def remove(self) -> None:
        self.kill()
        until(self._removed, "the cgroup is not busy any more")

    def _removed(self) -> bool:
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True


@pytest.fixture
def cgroups() -> Iterator[Any]:
    """Makes cgroups; whatever is in them ends with the test."""
    parent = next((place for place in PLACES if (place / "cgroup.procs").exists()), None)
    if parent is None or os.geteuid() != 0 or not os.access(parent, os.W_OK):
        pytest.skip("no cgroups of version 2 can be made here: it takes root and a writable mount")
    if shutil.which("unshare") is None:
        pytest.skip("unshare of util-linux is not installed")
    made: list[Cgroup] = []

    def make(name: str) -> Cgroup:
        made.append(Cgroup(parent / f"holdfast-test-{os.getpid()}-{len(made)}-{name}"))
        if not (made[-1].path / "cgroup.kill").exists():
            made.pop().remove()
            pytest.skip("this kernel has no cgroup.kill (5.14)")
        return made[-1]

    yield make
    for cgroup in made:
        cgroup.remove()


def heard(process: "subprocess.Popen[str]", *word: str) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[: len(word)] == list(word):
            return line.split()
    raise AssertionError(f"it ended before it said {word}")


def ended(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(PATIENCE_S)


@pytest.mark.representative
def test_a_trainer_killed_with_its_cgroup_goes_on_from_the_memory_of_another_one(
    cgroups: Any, run_dir: Path
) -> None:
    sidecar, pod = cgroups("sidecar"), cgroups("trainer")
    served = sidecar.start(sys.executable, "-m", "holdfast", "smp", "--run-dir", run_dir)
    assert heard(served, "starts")
    assert cli.main(["smp", "--run-dir", str(run_dir), "--healthy"]) == 0
    command = [*NAMESPACES, sys.executable, SCRIPT, run_dir, "--steps", 6]
    trainer = pod.start(*command, "--delay-s", 0.2)
    assert heard(trainer, "start", "0")
    assert heard(trainer, "step", "4")
    pod.kill()
    ended(trainer)
    status = launch.smp_status(run_dir)
    assert status is not None
    assert str(status["pid"]) in sidecar.pids()
    other = pod.start(*command)
    _, step, digest = heard(other, "start")
    assert step in ("3", "4", "5")
    digests = Tiny().train(range(1, 7))
    assert digest == digests[int(step)] != digests[1]
    assert heard(other, "end") == ["end", digests[6]]
    assert ended(other) == 0
    served.send_signal(signal.SIGTERM)
    assert ended(served) == 0
    assert not sidecar.pids()
    assert cli.main(["smp", "--run-dir", str(run_dir), "--healthy"]) == 1


def test_without_such_a_process_the_snapshots_end_with_the_cgroup(
    cgroups: Any, run_dir: Path
) -> None:
    pod = cgroups("trainer")
    command = [*NAMESPACES, sys.executable, SCRIPT, run_dir, "--steps", 6]
    trainer = pod.start(*command, "--delay-s", 0.2)
    assert heard(trainer, "step", "4")
    pod.kill()
    ended(trainer)
    assert launch.smp_status(run_dir) is None


def test_it_ends_when_idle_refuses_a_second_one_and_a_dead_one_is_replaced(run_dir: Path) -> None:
    launch.prepare(run_dir)
    command = [sys.executable, "-m", "holdfast", "smp", "--run-dir", str(run_dir)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert heard(first, "starts")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, "another process hosts" in done.stderr) == (2, True)
    first.kill()
    ended(first)
    assert host.ask(run_dir, [], 1.0) is None
    done = subprocess.run([*command, "--idle-s=0.1"], timeout=PATIENCE_S, check=False)
    assert done.returncode == 0

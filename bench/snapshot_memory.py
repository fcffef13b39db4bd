"""Does memory stay flat over 1,000 saves, and is nothing left when the run is over?

    python -m bench.snapshot_memory [--saves 1000] [--warm 2000] [--mb 10]

A GPT trains with a snapshot every step. The memory of the trainer and of its SMP (anonymous pages;
slots are counted by the SMP) is read after each tenth save. A line is fitted after the ``--warm``
first saves, in which allocators fill up (how much they took is in the row), with a 95 % interval
from blocks of readings, as neighbours are alike. Memory grows if the interval lies above 64 bytes a
save: what is lost with each save is at least one object. Afterwards no process, socket, shared
memory, descriptor, thread or file may be left that was not there before.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress

from bench.rows import record
from bench.snapshot_worker import Training, nbytes_of
from holdfast.snapshot.client.snapshots import Snapshots

EVERY = 10
LEAST_LEAK_BYTES = 64
BLOCKS = 9
# Student's t, two-sided 95 %, for BLOCKS - 2 degrees of freedom.
STUDENT = 2.365
GRACE_S = 5.0
SMP_MODULE = "holdfast.snapshot.node.smp"
Left = dict[str, list[str]]


def slope(steps: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The slope of a line through the means of blocks of readings, and half its 95 % interval.

    Raises:
        ValueError: fewer readings than two a block.
    """
    size = len(steps) // BLOCKS
    if size < 2:
        raise ValueError(f"{len(steps)} readings: at least {2 * BLOCKS} are needed")
    blocks = [slice(start, start + size) for start in range(0, size * BLOCKS, size)]
    x = [statistics.mean(steps[block]) for block in blocks]
    y = [statistics.mean(values[block]) for block in blocks]
    rate, offset = statistics.linear_regression(x, y)
    middle = statistics.mean(x)
    squares = sum((b - offset - rate * a) ** 2 for a, b in zip(x, y, strict=True))
    error = (squares / (BLOCKS - 2) / sum((a - middle) ** 2 for a in x)) ** 0.5
    return rate, STUDENT * error


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process: all but files and slots."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def smp_of(run_dir: Path) -> int:
    """The process of a run's SMP.

    Raises:
        SystemExit: there is none.
    """
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if SMP_MODULE in words and str(run_dir) in words:
            return int(process.pid)
    raise SystemExit(f"no SMP runs in {run_dir}")


def present(folder: Path) -> Left:
    """What a run could leave behind: here, in /dev/shm, in ``folder`` and among the processes."""
    descriptors = (os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd"))
    words = {p.pid: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    return {
        "processes": [f"{pid} {line}" for pid, line in words.items() if str(folder) in line],
        "segments": [name for name in os.listdir("/dev/shm") if "holdfast" in name],
        "mappings": [line for line in _maps() if "memfd:holdfast" in line],
        "sockets": [str(path) for path in folder.rglob("*") if path.is_socket()],
        "descriptors": sorted(path for path in descriptors if "/proc/" not in path),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("holdfast")),
        "temporary": os.listdir(tempfile.gettempdir()),
    }


def _maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


@contextmanager
def own_temporaries(folder: Path) -> Iterator[None]:
    """Temporary files of this process and of its SMP go into a folder of their own meanwhile."""
    outer = os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(dir=folder)
    try:
        yield
    finally:
        tempfile.tempdir = None
        del os.environ["TMPDIR"]
        if outer is not None:
            os.environ["TMPDIR"] = outer


def left_over(before: Left, folder: Path) -> Left:
    """What is there now and was not before, after a moment of grace."""
    deadline = time.monotonic() + GRACE_S
    while True:
        gc.collect()
        now = present(folder)
        new = {kind: _more(now[kind], before[kind]) for kind in now}
        found = {kind: names for kind, names in new.items() if names}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _more(now: list[str], before: list[str]) -> list[str]:
    return list((Counter(now) - Counter(before)).elements())


def readings(training: Training, run_dir: Path, saves: int, console: Console) -> dict[str, Any]:
    """Train and save; the memory of both processes after each tenth save, and of the slots."""
    memory: dict[str, list[float]] = {"trainer": [], "smp": []}
    with Snapshots(training.model, training.optimizer, run_dir=run_dir) as snapshots:
        pids = {"trainer": os.getpid(), "smp": smp_of(run_dir)}
        with Progress(console=console) as progress:
            for step in progress.track(range(1, saves + 1), description="saves"):
                snapshots.begin(step)
                training.forward_backward()
                snapshots.finish()
                training.optimizer.step()
                if step % EVERY == 0:
                    snapshots.wait_committed()
                    for name, pid in pids.items():
                        memory[name].append(own_bytes(pid))
        status = snapshots.status()
    return {
        "memory": memory,
        "slot_bytes": status["bytes"],
        "commits": status["commits"],
    }


def fitted(values: Sequence[float], warm: int) -> dict[str, Any]:
    """What a process holds after the warm-up, took until then, and takes a save since then."""
    steps = [float(EVERY * number) for number in range(len(values) - warm)]
    rate, half = slope(steps, values[warm:])
    return {
        "bytes": round(statistics.median(values[warm:])),
        "warm_up_bytes": round(values[warm] - values[0]),
        "bytes_a_save": round(rate, 1),
        "interval": [round(rate - half, 1), round(rate + half, 1)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, fit, look around, record; 1 if memory grows or something is left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=1000, help="that are fitted")
    parser.add_argument("--warm", type=int, default=2000, help="saves before them")
    parser.add_argument("--mb", type=float, default=10, help="of state, 10⁶ bytes")
    args = parser.parse_args(argv)
    training, saves = Training(round(args.mb * 1e6), tokens=16, seed=0), args.warm + args.saves
    with tempfile.TemporaryDirectory() as folder, own_temporaries(Path(folder)):
        before = present(Path(folder))
        found = readings(training, Path(folder) / "run", saves, Console(stderr=True))
        left = left_over(before, Path(folder))
    row: dict[str, Any] = {"saves": args.saves, "warm": args.warm, "commits": found["commits"]}
    row |= {"state_bytes": nbytes_of(training.tensors()), "slot_bytes": found["slot_bytes"]}
    fits = {name: fitted(values, args.warm // EVERY) for name, values in found["memory"].items()}
    grows = [name for name, fit in fits.items() if fit["interval"][0] > LEAST_LEAK_BYTES]
    record("snapshot_memory", row | fits | {"grows": grows, "left": left})
    return int(bool(grows) or bool(left) or found["commits"] != saves)


if __name__ == "__main__":
    sys.exit(main())

"""Bounded waits that the snapshot tests share."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from process_server import descendants

PATIENCE_S = 20.0


def smp_pids(under: Path) -> set[int]:
    """SMPs whose run directory lies under a directory."""
    return {process.pid for process in descendants("holdfast.snapshot.node.smp", f"{under}/")}


def until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {patience_s} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended but was not reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    """SIGKILL a process, and wait until it does not run any more."""
    psutil.Process(pid).kill()
    until(lambda: not alive(pid), f"process {pid} is killed")


def together(*jobs: Any) -> list[Any]:
    """Run every job in a thread of its own, as ranks do; their results."""
    results: list[Any] = [None] * len(jobs)

    def work(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
    return results

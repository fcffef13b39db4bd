"""A small run under a Guard in a process of its own, whose first life meets a process fault.

Arguments: the run directory, the kind of the fault, one of ``FAULTS``, and the file to which the
digest of the final state is written.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from guard_cases import Run, snapshots_of

from holdfast.guard import Guard

STEPS, STRUCK = 12, 6
PAUSE_S = 0.5


class Injected(Exception):
    """What the kinds of exceptions raise."""


def raise_injected(*_: object) -> None:
    """Raise in the middle of a pass."""
    raise Injected


def asynchronously(thread: int) -> None:
    """Raise wherever the main thread is."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Injected))


def later(act: Callable[[], None]) -> None:
    """Act from another thread while this one computes, and wait until it takes effect."""
    threading.Timer(0.01, act).start()
    ended_s = time.monotonic() + 30
    while time.monotonic() < ended_s:
        torch.ones(4, 4) @ torch.ones(4, 4)


def by_signal(number: int) -> Callable[[], None]:
    """Return a function that sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def stop() -> None:
    """Stop this process, which a child of it sets going again."""
    parent = os.getpid()
    child = os.fork()
    if not child:
        time.sleep(PAUSE_S)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)
    os.waitpid(child, 0)


def exhaust_memory() -> None:
    """Ask for more memory than there is."""
    torch.empty(1 << 50)


FAULTS: dict[str, Callable[[], None]] = {
    "exception": raise_injected,
    "asynchronous exception": lambda: later(lambda: asynchronously(threading.main_thread().ident)),
    "exception of a signal": by_signal(signal.SIGUSR1),
    "out of memory": exhaust_memory,
    "abort": os.abort,
    "segmentation fault": lambda: ctypes.string_at(1),
    "SIGINT": by_signal(signal.SIGINT),
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGKILL": by_signal(signal.SIGKILL),
    # These end by themselves.
    "stopped for a while": stop,
    "GIL held for a while": lambda: ctypes.PyDLL(None).usleep(int(PAUSE_S * 1e6)),
    "none": lambda: None,
}


def main(run_dir: Path, kind: str, out: Path) -> None:
    """Train; the first life meets the fault in step ``STRUCK``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGUSR1, raise_injected)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run, met = Run(), out.with_suffix(".met")
    snapshots = snapshots_of(run, run_dir, linger_s=30, run_id="faults")

    def forward_backward(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] == STRUCK and not met.exists():
            snapshots.wait_committed()
            met.touch()
            FAULTS[kind]()
        return run.forward_backward(batch)

    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        began = guard.steps_done
        for batch in guard.batches(run.loader, steps=STEPS):
            guard.step(forward_backward, batch)
    out.write_text(f"{began} {run.digest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))

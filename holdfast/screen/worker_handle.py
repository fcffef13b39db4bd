"""The runner's side of the worker processes: start, messages, diagnosis of failures, end."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from holdfast import config
from holdfast.screen.messages import Message, Order, Trouble
from holdfast.screen.units import Unit
from holdfast.screen.worker import serve

POLL_S = 0.2
# Imported once, in the fork server; torch's first backward pass would import the second one.
PRELOADED = ["holdfast.screen.worker", "torch.fx.experimental.symbolic_shapes"]
BUSY_SHARE = 0.5  # a silent worker that uses less of a core than this is waiting, not computing
# Signals that a wrong computation causes, and that are usually not sent by another process.
CRASHES = {
    *(signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT),
    signal.SIGTRAP,
}
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass
class WorkerHandle:
    """The worker process of one unit, with the runner's end of the pipe to it.

    ``heard_s`` is the ``time.monotonic()`` of its last message and ``last_op`` the last workload of
    which it reported a result. Once it has been silent for half of the time limit, ``half`` holds
    that moment and the CPU time that it had used by then.
    """

    unit: Unit
    process: BaseProcess
    pipe: Connection
    heard_s: float = field(default_factory=time.monotonic)
    last_op: str = ""
    half: tuple[float, float] | None = None

    @property
    def pid(self) -> int:
        """Process identifier of the worker."""
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> Message | None:
        """Return the next message; None if the worker is gone."""
        try:
            message: Message = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.heard_s, self.half = time.monotonic(), None
        return message

    def send(self, value: object) -> None:
        """Send a message; a worker that is gone is noticed when its messages are received."""
        with suppress(OSError):
            self.pipe.send(value)

    def death(self) -> Trouble:
        """Describe the end of a worker that closed its pipe."""
        self.process.join(config.timeout_s())
        code = self.process.exitcode
        after = f" after {self.last_op}" if self.last_op else ""
        if code is None or code >= 0:
            return Trouble(self.unit.name, f"its worker ended{after} (exit code {code})")
        name = signal.Signals(-code).name
        if -code in CRASHES:
            return Trouble(self.unit.name, f"its worker crashed by {name}{after}", True)
        what = f"its worker was killed by {name}{after}: out of memory, or by someone"
        return Trouble(self.unit.name, what)

    def silence(self, patience_s: float) -> Trouble | None:
        """Describe what a worker does that has been silent for too long; None if it has not."""
        now_s = time.monotonic()
        quiet_s = now_s - self.heard_s
        state, cpu_s = _state(self.pid)
        if self.half is None and quiet_s > patience_s / 2:
            self.half = now_s, cpu_s
        if self.half is None or quiet_s <= patience_s:
            return None
        share = (cpu_s - self.half[1]) / max(now_s - self.half[0], 1e-9)
        after = f" after {self.last_op}" if self.last_op else " while it started"
        if state in ("T", "t"):
            return Trouble(self.unit.name, f"its worker is stopped{after}: continue it")
        if share >= BUSY_SHARE:
            what = f"its worker hangs{after}: it computes and ends nothing for {quiet_s:.0f} s"
            return Trouble(self.unit.name, what, True)
        what = f"its worker said nothing for {quiet_s:.0f} s{after} and got {share:.0%} of a core"
        return Trouble(self.unit.name, f"{what}: end what else runs, or raise HOLDFAST_TIMEOUT_S")

    def end(self) -> None:
        """Close the pipe, and kill the worker if it does not end by itself."""
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(config.timeout_s())


def _state(pid: int) -> tuple[str, float]:
    """Return a process's state letter and the CPU time that it has used, in seconds."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone", 0.0
    words = text.rpartition(")")[2].split()
    return words[0], (int(words[11]) + int(words[12])) / _TICKS_S


def start(orders: Sequence[Order]) -> list[WorkerHandle]:
    """Start a worker for each order, from a fork server that has no threads and no CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    workers = []
    try:
        for order in orders:
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            workers.append(WorkerHandle(order.unit, process, pipe))
    except BaseException:
        end(workers)
        raise
    return workers


def end(workers: Sequence[WorkerHandle]) -> None:
    """End every worker; none outlives this call."""
    for worker in workers:
        worker.send(None)
    for worker in workers:
        worker.end()


def listen(workers: Sequence[WorkerHandle]) -> list[WorkerHandle]:
    """Wait at most ``POLL_S``; return the workers that sent a message or died."""
    ready = set(wait([worker.pipe for worker in workers], POLL_S))
    return [worker for worker in workers if worker.pipe in ready]

"""The worker processes of a screening: started, heard, told apart when they die, always ended."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from holdfast import config
from holdfast.screen.observation import Message, Order
from holdfast.screen.units import Unit
from holdfast.screen.verdict import Trouble
from holdfast.screen.worker import serve

POLL_S = 0.2
# Loaded once, not in every worker; the second one is loaded by torch's first backward pass.
PRELOADED = ["holdfast.screen.worker", "torch.fx.experimental.symbolic_shapes"]
BUSY_SHARE = 0.5  # of its time: a silent worker that computes less is not computing
# What a core does to a process by computing wrong; nobody sends these from outside.
CRASHES = {
    *(signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT),
    signal.SIGTRAP,
}
_TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Member:
    """One unit's worker as the runner sees it."""

    unit: Unit
    process: BaseProcess
    pipe: Connection
    heard_s: float = field(default_factory=time.monotonic)
    last_op: str = ""
    half: tuple[float, float] | None = None  # when half of the patience was over, and its CPU time

    @property
    def pid(self) -> int:
        """Of the worker."""
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> Message | None:
        """The next message; None if the worker is gone."""
        try:
            message: Message = self.pipe.recv()
        except (EOFError, OSError):
            return None
        self.heard_s, self.half = time.monotonic(), None
        return message

    def send(self, value: object) -> None:
        """Tell the worker something; one that is gone is noticed when it is listened to."""
        try:
            self.pipe.send(value)
        except OSError:
            return

    def death(self) -> Trouble:
        """What became of a worker whose pipe is closed."""
        self.process.join(config.timeout_s())
        code = self.process.exitcode
        after = f" after {self.last_op}" if self.last_op else ""
        if code is None or code >= 0:
            return Trouble(self.unit.name, f"its worker ended{after} (exit code {code})")
        name = signal.Signals(-code).name
        if -code in CRASHES:
            return Trouble(self.unit.name, f"its worker crashed by {name}{after}", True)
        reason = f"its worker was killed by {name}{after}: out of memory, or by someone"
        return Trouble(self.unit.name, reason)

    def silence(self, patience_s: float) -> Trouble | None:
        """Whether a worker has been silent for too long, and what it does instead."""
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
        """Kill the worker if it does not end by itself, now that its pipe is closed."""
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(config.timeout_s())


def _state(pid: int) -> tuple[str, float]:
    """A process's state letter and the seconds of CPU time it has used."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone", 0.0
    words = text.rpartition(")")[2].split()
    return words[0], (int(words[11]) + int(words[12])) / _TICKS_S


def start(orders: Sequence[Order]) -> list[Member]:
    """A worker for each unit; they come from a process that has no threads and no CUDA yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    members = []
    try:
        for order in orders:
            pipe, theirs = context.Pipe()
            process = context.Process(target=serve, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            members.append(Member(order.unit, process, pipe))
    except BaseException:
        end(members)
        raise
    return members


def end(members: Sequence[Member]) -> None:
    """No worker outlives this."""
    for member in members:
        member.send(None)
    for member in members:
        member.end()


def listen(members: Sequence[Member]) -> list[Member]:
    """Those that have said something or died, within ``POLL_S``."""
    ready = set(wait([member.pipe for member in members], POLL_S))
    return [member for member in members if member.pipe in ready]

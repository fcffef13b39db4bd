"""A thread of each rank that notices steps which do not end, and slow ranks.

Each rank writes the stacks of its threads and publishes where it is once half of the time that
``Hang`` allows has passed without a step, so that every rank can name the one for which the others
wait. Before that nothing is exchanged, and the training thread only notes when a step ended.
"""

import faulthandler
import logging
import os
import signal
import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from threading import Event, Thread, main_thread
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.events import EventKind, recorder
from holdfast.liveness.answers import ANSWER_S, FOLDER, Answer, Exchange
from holdfast.liveness.pace import Stragglers
from holdfast.liveness.verdict import Entered, Verdict, entered, excused, judge

SETTLED = 8  # steps whose times are known; earlier ones may compile
UNSETTLED = 10.0  # times as long is waited before, and for ranks that compute, read or write
BUSY_SHARE = 0.1  # of half of the time until a hang, by which a rank counts as computing
UNSURE = 1 / 3  # of the time until a hang, ANSWER_S at least, a doubtful verdict is kept back
BUSY_BYTES_S = 2**19  # a second, by which it counts as reading or writing: metrics read less
LONGEST_LOOK_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
# Real-time signals end a process that has no handler for them; others are left to the user.
STACKS_SIGNAL = signal.SIGRTMIN + 11
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a device", "Z": "ended"}

_logger = logging.getLogger("holdfast.liveness")


@dataclass(frozen=True)
class Hang:
    """When a Guard says that the run hangs, or that a rank is slow, and what it does then.

    Args:
        factor: A step hangs after so many times the median time of the latest steps,
        floor_s: and after at least so many seconds, by default 3/4 of ``HOLDFAST_TIMEOUT_S``, so
            that the hang is named before other waits end. A rank that computes, reads or writes
            meanwhile, or whose child processes compute (to compile, or to save a checkpoint), has
            ten times as long, as has the beginning of a run. Evaluation (``model.eval()``) and
            ``Guard.pause`` do not count. A third longer, and at least ten seconds, is waited
            before a rank is named only because it does not answer, and before it is said that
            nobody can be named.
        restart: True to kill the ranks that are named, so that the launcher starts the run again;
            where no other rank of a named one's host is left, a rank that waits for it ends itself.
        pace_s: Seconds between two comparisons of the ranks' times (``pace``).

    Raises:
        ConfigError: A number is out of range.
    """

    factor: float = 8.0
    floor_s: float | None = None
    restart: bool = False
    pace_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("factor", "floor_s", "pace_s"):
            given = getattr(self, name)
            if given is not None and not 1e-3 <= given < float("inf"):
                raise ConfigError(f"Hang({name}={given!r}): give a number of at least 0.001")

    @classmethod
    def configured(cls) -> "Hang":
        """Return the settings of the config file."""
        restart = config.value("guard.hang_restart", None, False)
        return cls(floor_s=config.value("guard.hang_floor_s", None, None), restart=restart)

    @property
    def least_s(self) -> float:
        """``floor_s``, or its default."""
        return 0.75 * config.timeout_s() if self.floor_s is None else self.floor_s


class Watchdog:
    """Watches the steps of this rank in a thread of its own, from ``start`` to ``stop``.

    While the guarded model is in evaluation mode no step is expected.
    """

    def __init__(self, model: nn.Module, hang: Hang) -> None:
        self._model, self._hang = model, hang
        self._step, self._at_s, self._pauses = -1, time.monotonic(), 0
        self._took_s: deque[float] = deque(maxlen=64)
        self._ending = Event()
        self._thread: Thread | None = None
        self._rank, self._world_size, self._folder = 0, 1, Path()
        self._said: dict[int, Answer] = {}  # by the others, when the present step was half late
        self._told, self._due_s = False, 0.0  # when a verdict on the present step was first due
        self._named = list[int]()  # those of this rank's verdict, once it is recorded
        self._state = ""
        self._published_s = self._compared_s = -1e9
        self._use, self._used, self._own_s = Use(), Use(), 0.0
        self._late = deque[Use]()  # since the step was half late, as long as that took at most
        self._stragglers = Stragglers()

    def start(self, step: int) -> None:
        """Watch the steps that follow ``step``, if there is a ledger."""
        ledger = recorder.ledger_dir()
        if self._thread is not None or ledger is None:
            return
        self._step, self._at_s = step, time.monotonic()
        if dist.is_available() and dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._folder = ledger / FOLDER
        self._took_s.clear()
        self._ending.clear()
        self._thread = Thread(target=self._run, name="holdfast-liveness", daemon=True)
        self._thread.start()

    def step_done(self, step: int) -> None:
        """Note that a step has ended; it takes a microsecond."""
        now_s = time.monotonic()
        self._took_s.append(now_s - self._at_s)
        self._step, self._at_s = step, now_s

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Expect no step to end within the context."""
        self._pauses += 1
        try:
            yield
        finally:
            self._at_s = time.monotonic()
            self._pauses -= 1

    def stop(self) -> None:
        """End the thread, and tell the other ranks."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join(config.timeout_s())
            self._thread = None

    def _limit_s(self) -> float:
        if len(self._took_s) < SETTLED:
            return UNSETTLED * self._hang.least_s
        return max(self._hang.least_s, self._hang.factor * median(self._took_s))

    def _run(self) -> None:
        failed = False
        try:
            self._folder.mkdir(exist_ok=True)
            exchange = Exchange(self._folder, self._rank, self._world_size)
            with (self._folder / f"{self._rank}.stacks.txt").open("w") as stacks:
                faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
                while not self._ending.wait(min(LONGEST_LOOK_S, self._hang.least_s / 8)):
                    try:
                        self._look(exchange, stacks, time.monotonic())
                    except Exception as error:  # whatever it is, it must not cost the training
                        if not failed:
                            _logger.warning("looking for hangs failed: %s", error)
                        failed = True
                faulthandler.unregister(STACKS_SIGNAL)
            exchange.publish(self._answer("ended"))
        except Exception as error:
            _logger.warning("hangs and slow ranks are not named from here on: %s", error)

    def _look(self, exchange: Exchange, stacks: TextIO, now_s: float) -> None:
        """Publish what is due, and name the ranks that are behind if the step takes too long."""
        limit_s = self._limit_s()
        state = self._present_state(now_s - self._at_s, limit_s / 2)
        if state == "paused":
            self._at_s = now_s
        waited_s = now_s - self._at_s
        if state == "busy" and waited_s >= UNSETTLED * limit_s:
            state = "stalled"
        if waited_s < limit_s / 2:
            self._said, self._told, self._due_s, self._named = {}, False, 0.0, []
            self._publish(exchange, state if state == "paused" else "running", now_s)
            self._compare(exchange, now_s)
            return
        if not self._said:
            self._said = exchange.others()
            faulthandler.dump_traceback(stacks, all_threads=True)
        own = self._answer(state, entered())
        exchange.publish(own)
        self._state, self._published_s = state, now_s
        if waited_s < limit_s or state != "stalled" or self._told:
            return
        said = exchange.others().items()
        answers = {r: a for r, a in said if a["state"] == "ended" or a != self._said.get(r)}
        answers[self._rank] = own
        if waited_s < UNSETTLED * limit_s and excused(answers):
            return
        here = self._processes_here(answers)
        states = {rank: state for rank, pid in here.items() if (state := _state(pid))}
        verdict = judge(answers, self._world_size, states)
        self._due_s = self._due_s or now_s
        late_s, longer_s = now_s - self._due_s, max(UNSURE * limit_s, ANSWER_S)
        # One rank records the verdict before any acts on it: the end of a rank changes the answers.
        first = min(_stalled(answers))
        if first != self._rank and (named := answers[first]["named"]):
            verdict = Verdict(dict.fromkeys(named, ""), "", is_sure=True)
        elif first != self._rank:
            longer_s += ANSWER_S
            verdict = verdict._replace(is_sure=False)
        if verdict.is_sure or late_s >= longer_s:
            self._told = True
            self._tell(exchange, verdict, answers, here, waited_s)

    def _present_state(self, waited_s: float, window_s: float) -> str:
        """Return what this rank does; of a step that is late, by the last ``window_s`` of it."""
        late = waited_s >= window_s
        now = self._use = Use.now(late=late)
        if self._pauses or not self._model.training:
            return "paused"
        if not late:
            self._late.clear()
            return "running"
        self._late.append(now)
        while len(self._late) > 2 and self._late[1].at_s <= now.at_s - window_s:
            self._late.popleft()
        before = self._late[0]
        # The compilers that Inductor and Triton wait for are processes of their own.
        busy_s = now.below_s - before.below_s
        # A thread that waits for a device computes all the time.
        if not torch.cuda.is_initialized():
            busy_s = max(busy_s, now.computed_s - before.computed_s)
        took_s = now.at_s - before.at_s
        moves = now.moved_bytes - before.moved_bytes > BUSY_BYTES_S * max(took_s, LONGEST_LOOK_S)
        if now is before or moves or busy_s > BUSY_SHARE * took_s:
            return "busy"
        return "stalled"

    def _publish(self, exchange: Exchange, state: str, now_s: float) -> None:
        """Publish a step and the time that this rank computes in one, from time to time."""
        if state == self._state and now_s - self._published_s < self._hang.least_s / 4:
            return
        steps = self._step - self._used.step
        if steps > 0 and self._use.at_s - self._used.at_s >= self._hang.pace_s:
            self._own_s = (self._use.computed_s - self._used.computed_s) / steps
            self._used = replace(self._use, step=self._step)
        exchange.publish(self._answer(state))
        self._state, self._published_s = state, now_s

    def _compare(self, exchange: Exchange, now_s: float) -> None:
        """Name the ranks that compute for longer than the others; rank 0 does that for all."""
        if self._rank or now_s - self._compared_s < self._hang.pace_s:
            return
        self._compared_s = now_s
        answers = {**exchange.others(), self._rank: self._answer("running")}
        own_s = {rank: answer["own_s"] for rank, answer in answers.items() if answer["own_s"]}
        for rank, factor in self._stragglers.look(own_s).items():
            detail = {"rank": rank, "of_host": answers[rank]["host"], "step": self._step}
            detail |= {"factor": factor, "own_s": own_s[rank]}
            events.record(EventKind.STRAGGLER, detector="liveness", detail=detail)

    def _tell(
        self,
        exchange: Exchange,
        verdict: Verdict,
        answers: Mapping[int, Answer],
        here: Mapping[int, int],
        waited_s: float,
    ) -> None:
        """Record which ranks are behind, on the first rank that can, and restart if wanted."""
        stalled = _stalled(answers)
        is_first = self._rank == min(stalled)
        if is_first:
            for rank in verdict.behind.keys() & here.keys() - answers.keys():
                with suppress(OSError):
                    os.kill(here[rank], STACKS_SIGNAL)  # its handler needs no Python
            behind = {str(rank): why for rank, why in verdict.behind.items()}
            detail = {"step": self._step, "waited_s": waited_s, "behind": behind}
            detail |= {"waiting_in": verdict.waiting_in, "stacks": str(self._folder)}
            detail["restarts"] = self._hang.restart and bool(behind)
            if exchange.unreachable:
                detail["store"] = exchange.unreachable
            events.record(EventKind.RANK_HUNG, detector="liveness", detail=detail)
            events.flush()
            self._named = list(verdict.behind)
            exchange.publish({**answers[self._rank], "named": self._named})
        if self._hang.restart and verdict.behind:
            ended = verdict.behind.keys() & (here.keys() | {self._rank})
            # A rank of whose host none is left to end it goes with the first that can tell.
            hosts = {said["host"] for said in stalled.values()}
            known = {**self._said, **answers}
            alone = [r for r in verdict.behind if r not in known or known[r]["host"] not in hosts]
            ended |= {self._rank} if alone and is_first else set()
            for rank in sorted(ended, key=self._rank.__eq__):  # this one last
                with suppress(OSError):
                    os.kill(here.get(rank, os.getpid()), signal.SIGKILL)

    def _processes_here(self, answers: Mapping[int, Answer]) -> dict[int, int]:
        """Return the process ids of the other ranks of this host that are those that answered."""
        host, said = socket.gethostname(), {**self._said, **answers}
        return {
            rank: answer["pid"]
            for rank, answer in said.items()
            if answer["host"] == host and _started(answer["pid"]) == answer["started"]
        }

    def _answer(self, state: str, groups: Mapping[str, Entered] | None = None) -> Answer:
        return {
            "rank": self._rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "state": state,
            "step": self._step,
            "at_s": time.time(),
            "own_s": self._own_s,
            "groups": {name: (*each,) for name, each in (groups or {}).items()},
            "named": self._named,
        }


@dataclass(frozen=True)
class Use:
    """What this process had computed and moved at a moment, at the end of a step."""

    at_s: float = 0.0
    computed_s: float = 0.0
    moved_bytes: int = 0
    below_s: float = 0.0
    step: int = -1

    @classmethod
    def now(cls, *, late: bool) -> "Use":
        """Return what the main thread computed, or waited for a core to, and what was moved.

        What the calling thread reads itself does not count. If the step is late, ``below_s`` is
        what the child processes, and theirs, have computed.
        """
        text = Path(f"/proc/self/task/{main_thread().native_id}/schedstat").read_text()
        computed, delayed, _ = map(int, text.split())
        # In this order, as a report counts the bytes of those that were read before it.
        own = _moved_bytes("thread-self")
        moved = _moved_bytes("self") - own
        below_s = _below_s() if late else 0.0
        return cls(time.monotonic(), (computed + delayed) / 1e9, moved, below_s)


def _stalled(answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """Return the answers of the ranks that wait; the first of these records the verdict."""
    return {rank: said for rank, said in answers.items() if said["state"] == "stalled"}


def _moved_bytes(whose: str) -> int:
    """Return what a process or a thread has read and written, files and pipes."""
    lines = Path(f"/proc/{whose}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines[:2])


def _below_s() -> float:
    """Return what the child processes, and theirs, have computed, those that have ended included.

    Of an end for which its parent does not ask, the time is lost.
    """
    stats, children = {}, defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            stats[int(name)] = found = _stat(int(name))
            children[int(found[1])].append(int(name))
    own = int(os.readlink("/proc/self"))
    below = list(children[own])
    for pid in below:  # which grows
        below += children[pid]
    ticks = sum(int(ticks) for pid in below for ticks in stats[pid][11:15])
    return (ticks + sum(map(int, stats[own][13:15]))) / _TICKS


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _started(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; 0 if it has ended."""
    try:
        return int(_stat(pid)[19])
    except OSError:
        return 0


def _state(pid: int) -> str:
    """Return why a process cannot answer; empty if it runs."""
    try:
        return _STATES.get(_stat(pid)[0], "")
    except OSError:
        return "ended"

"""The ranks of the simulated run: they train, snapshot, fail together, and start again.

A rank has two threads, as in the library: the one that trains, and the one that copies. Here they
are generators, whose requests are answered on the virtual clock. Joining, restoring, replacing an
SMP and copying are the library's; the order in which a rank calls them is modelled after
``client/snapshots.py`` and ``client/copier.py``.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import SnapshotLost
from holdfast.snapshot.protocol.exchange import Call, Gather
from holdfast_lab.simulation.rank_work import RankWork
from holdfast_lab.simulation.session import TROUBLE, Session
from holdfast_lab.simulation.world import Violation

if TYPE_CHECKING:
    from holdfast_lab.simulation.node import Node
    from holdfast_lab.simulation.world import World

_END_S = 1.2  # from the death of one rank to the start of all
_CHECK_S = 0.1


@dataclass(frozen=True)
class Sleep:
    """Go on after a while."""

    seconds: float


@dataclass(frozen=True)
class Collective:
    """Go on once all ranks have come to this collective of the training."""


@dataclass(frozen=True)
class Result:
    """Go on once another process has ended; the answer is its result."""

    process: Process


Request = Sleep | Collective | Result | Gather | Call
Work = Generator[Request, Any, Any]


class Process:
    """One thread of a rank."""

    def __init__(self, rank: Rank, work: Work) -> None:
        self.rank, self._work = rank, work
        self.request: Request | None = None
        self.ended = False
        self.result: Any = None
        self.error: Exception | None = None
        self.waits: Process | None = None

    def after(self, delay_s: float, value: Any = None, *, error: Exception | None = None) -> None:
        """Resume after a delay."""
        self.rank.world.at(delay_s, self.resume, value, error)

    def resume(self, value: Any = None, error: Exception | None = None) -> None:
        """Go on with the answer to the last request, or with an error."""
        if not self.rank.alive or self.ended or self not in self.rank.processes:
            return
        try:
            if error is not None:
                self.request = self._work.throw(error)
            else:
                self.request = self._work.send(value)
        except StopIteration as done:
            self._end(done.value, None)
        except (SnapshotLost, *TROUBLE) as failure:
            self._end(None, failure)
        else:
            self.rank.serve(self, self.request)

    def _end(self, result: Any, error: Exception | None) -> None:
        self.ended, self.result, self.error = True, result, error
        self.rank.processes.remove(self)
        if self.waits is not None:
            self.waits.after(0.0, result, error=error)
        self.rank.process_ended(self)


class Rank:
    """One rank of the run, whose process may die and start again."""

    def __init__(self, trainers: Trainers, rank: int) -> None:
        self.trainers, self.world, self.rank = trainers, trainers.world, rank
        self.node, self.local = divmod(rank, trainers.world.size.ranks)
        self.life, self.alive, self.done = 0, False, False
        self.committed: int | None = None
        self.processes: list[Process] = []
        self.session = Session(self)
        self._held: list[tuple[Process, Call]] = []

    def start(self, life: int) -> None:
        """Begin a new life."""
        self.life, self.alive, self.done = life, True, False
        self.committed = None
        self.session, self._held = Session(self), []
        self.work = RankWork(self)
        self.replacing: Process | None = None
        self.main = self.spawn(self.work.main())

    def spawn(self, work: Work) -> Process:
        """Start a thread."""
        process = Process(self, work)
        self.processes.append(process)
        process.after(0.0)
        return process

    def serve(self, process: Process, request: Request) -> None:
        """Begin to answer a request of a thread."""
        match request:
            case Sleep(seconds):
                process.after(seconds)
            case Collective():
                self.trainers.meet(self, process, "collective", None)
            case Gather(value):
                self.trainers.meet(self, process, "gather", value)
            case Result(other) if other.ended:
                process.after(0.0, other.result, error=other.error)
            case Result(other):
                other.waits = process
            case Call(method, arguments) if self.replacing in (None, process):
                self.session.call(process, method, arguments)
            case Call():
                self._held.append((process, request))

    def process_ended(self, process: Process) -> None:
        """Let calls pass that waited for the replacement of an SMP; end if the main thread did."""
        if process is self.replacing:
            self.replacing = None
            held, self._held = self._held, []
            for other, request in held:
                self.serve(other, request)
        if process is self.main and self.alive and not self.done:
            if process.error is None:
                self.done = True
                self.trainers.finished()
            elif isinstance(process.error, SnapshotLost):
                self.trainers.snapshot_lost(self, process.error)
            else:
                self.die(str(process.error))

    def watch(self, connection: int) -> None:
        """Replace a lost SMP, unless a thread will notice the loss itself."""
        session = self.session
        if not (self.alive and session.lost and session.connection == connection):
            return
        if self.work.idle and self.replacing is None:
            self.replacing = self.spawn(self.work.replacing())
        else:
            self.world.at(0.1, self.watch, connection)

    def die(self, reason: str) -> None:
        """End the process of this rank, and so those of all others a little later."""
        if not self.alive or self.done:
            return
        self.world.say("rank {}: dies: {}", self.rank, reason)
        self.alive = False
        self.processes.clear()
        self.session.close()
        self.work.scribble()
        self.trainers.restart()


class Trainers:
    """All ranks, with the collectives in which they meet.

    Attributes:
        last_step: the step after which all end; None as long as that is not known.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = [Rank(self, rank) for rank in range(world.ranks)]
        self.life = 0
        self.last_step: int | None = None
        self._met: dict[tuple[str, int], dict[int, tuple[Process, Any]]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._restarting = False
        self._mark: tuple[int, int] | None = None

    def start(self) -> None:
        """Start all ranks, and look later on whether the run recovers from its faults."""
        self._start()
        self.world.at(self.world.size.duration_s, self._look)

    def _start(self) -> None:
        self.life += 1
        self._restarting = False
        self._met, self._counts = {}, {}
        self.world.say("life {} begins", self.life)
        for rank in self.ranks:
            self.world.at(self.world.soon(0.05, 0.3), rank.start, self.life)

    def meet(self, rank: Rank, process: Process, kind: str, value: Any) -> None:
        """Let a rank wait until all have come; each is answered with the values of all."""
        number = self._counts[kind, rank.rank] = self._counts.get((kind, rank.rank), 0) + 1
        found = self._met.setdefault((kind, number), {})
        found[rank.rank] = process, value
        if len(found) == len(self.ranks):
            del self._met[kind, number]
            values = [found[other.rank][1] for other in self.ranks]
            for other in self.ranks:
                found[other.rank][0].after(self.world.soon(5e-4, 5e-3), values)

    def reply(self, node: Node, local: int, verb: str, fields: dict[str, Any]) -> None:
        """Send an SMP's answer to the process that acts for a local rank."""
        rank = self.ranks[node.ranks[local]]
        session, connection = rank.session, node.speakers.get(local)
        if connection is not None and session.connection == connection:
            self.world.at(session.arrives_s(), session.take, connection, verb, fields)

    def smp_died(self, node: int) -> None:
        """Let the ranks of a node notice that their SMP is gone."""
        for rank in self.ranks[node * self.world.size.ranks :][: self.world.size.ranks]:
            if rank.alive and rank.session.connection >= 0:
                session = rank.session
                self.world.at(self.world.soon(1e-3, 1e-2), session.cut, session.connection)

    def stopped(self, node: Node, reason: str) -> None:
        """Note that an SMP has stopped, which it may only do at the end of the run."""
        if not all(self.ranks[rank].work.closing for rank in node.ranks):
            raise Violation(f"node {node.index}: the SMP stops: {reason}")

    def restart(self) -> None:
        """End all ranks, because one has died, and start them again."""
        if self._restarting:
            return
        self._restarting, life = True, self.life
        for rank in self.ranks:
            self.world.at(self.world.soon(0.05, 1.0), self._end, rank, life)
        self.world.at(_END_S, self._start)

    def _end(self, rank: Rank, life: int) -> None:
        if rank.life == life:
            rank.die("another rank died")

    def snapshot_lost(self, rank: Rank, error: SnapshotLost) -> None:
        """Begin anew at step 0, which only more losses than parities justify."""
        self.world.invariants.lost(rank, error)
        self.world.say("rank {}: {}", rank.rank, error)
        for node in self.world.nodes:
            node.die("the run begins anew")
            node.disk.steps = {}
        rank.die(str(error))

    def _look(self) -> None:
        """Once faults have ceased and all ranks have seen a new commit, let the run end."""
        newest = self.world.invariants.newest
        if self._mark is None:
            self._mark = newest or (0, -1)
        epoch, step = self._mark
        seen = [rank.committed for rank in self.ranks if rank.alive and rank.committed is not None]
        new = newest is not None and (newest.epoch > epoch or min(seen, default=-1) > step)
        if len(seen) == len(self.ranks) and new:
            if self.world.resizes:
                self.world.at(self.world.soon(0, 0.1), setattr, self.world, "finished", True)
                return
            self.last_step = max(rank.work.step for rank in self.ranks) + 2
            self.world.say("the run ends after step {}", self.last_step)
        else:
            self.world.at(_CHECK_S, self._look)

    def finished(self) -> None:
        """End the simulation once all ranks have ended well."""
        self.world.finished = all(rank.done for rank in self.ranks)

    def lacking(self) -> str:
        """Describe what has not happened yet."""
        if self.last_step is None:
            return "no new step is committed on all ranks"
        return f"not all ranks have ended after step {self.last_step}"

    def waiting(self) -> str:
        """Describe what every rank waits for."""
        return "; ".join(f"rank {rank.rank} {_waits(rank)}" for rank in self.ranks[:8])


def _waits(rank: Rank) -> str:
    if not rank.alive:
        return "is dead"
    requests = [process.request for process in rank.processes]
    shown = [
        request.method if isinstance(request, Call) else type(request).__name__.lower()
        for request in requests
    ]
    return f"at step {rank.work.step} waits for {' and '.join(shown) or 'nothing'}"

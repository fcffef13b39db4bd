"""A rank's conversation with the SMP of its node, on the virtual clock.

It answers the methods of ``holdfast.snapshot.node.session.SmpSession`` that exchanges call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import SmpUnavailable
from holdfast.snapshot.node.session import Listening, NotEnoughMemory
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import NodeInventory, Roster, Stamp
from holdfast.version import __version__
from holdfast_lab.simulation.world import Violation

if TYPE_CHECKING:
    from holdfast_lab.simulation.trainers import Process, Rank

SIZES_PATIENCE_S = 1.0


@dataclass
class _Wait:
    """A process that waits for an answer with one of some verbs."""

    process: Process
    method: str
    verbs: tuple[str, ...]


class Session:
    """The connection of one rank; one process uses it at a time."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._world = rank, rank.world
        self._node = rank.world.nodes[rank.node]
        self.connection = self.instance = -1
        self.lost = False
        self.unsettled: int | None = None
        self.past: int | None = None
        self.wait: _Wait | None = None
        self._inbox: deque[tuple[str, dict[str, Any]]] = deque()
        self._sent_s = self._came_s = 0.0

    def call(self, process: Process, method: str, arguments: tuple[Any, ...]) -> None:
        """Begin a request of a process, which is resumed with the answer."""
        getattr(self, f"_{method}")(process, *arguments)

    def close(self) -> None:
        """End the connection, as the process does when it dies; what it sent still arrives."""
        if not self.lost and self.connection >= 0:
            self._send(m.Disconnected(self._rank.local))
        self.connection, self.wait = -1, None

    def cut(self, connection: int) -> None:
        """Notice that the SMP is gone: at once if an answer is waited for."""
        if self.connection != connection or self.lost or not self._rank.alive:
            return
        self.lost = True
        self._world.at(self._world.soon(0.02, 0.25), self._rank.watch, connection)
        if self.wait is not None:
            wait, self.wait = self.wait, None
            wait.process.resume(error=ConnectionError("the SMP is gone"))

    def take(self, connection: int, verb: str, fields: dict[str, Any]) -> None:
        """Take an answer of the SMP."""
        if self.connection == connection and self._rank.alive and not self.lost:
            self._inbox.append((verb, fields))
            self._pump()

    def arrives_s(self) -> float:
        """Return the delay of the next answer, which does not overtake the one before."""
        self._came_s = max(self._came_s, self._world.now + self._delay_s())
        return self._came_s - self._world.now

    def _delay_s(self) -> float:
        return self._world.soon(1e-4, 1e-3) * self._node.pace

    def _connect(self, process: Process) -> None:
        node = self._node
        if not node.descriptors:
            process.after(0.05, error=ConnectionError("the SMP has no descriptor left"))
            return
        if node.protocol is None:
            node.boot()
        self.connection, self.instance = next(self._world.numbers), node.instance
        self.lost, self.unsettled = False, None
        self._inbox.clear()
        size = self._world.size
        hello = m.Hello(self._rank.local, size.ranks, self._world.keep, __version__)
        self._ask(process, "connect", hello, "welcome")

    def _reconnect(self, process: Process) -> None:
        self._connect(process)

    def _listen(self, process: Process, host: str, port: int = 0) -> None:
        if self._fails(process):
            return
        if self._node.protocol is None:  # it died just now
            process.after(0.01, error=ConnectionError("the SMP is gone"))
            return
        commit = self._node.protocol.cluster_commit
        held = commit.cluster.roster if commit.cluster and commit.inventory()["slots"] else None
        former = self._world.former
        if former is not None and former.domains and commit.epoch <= former.epoch:
            held = None  # other runs were in between
        group = (held.group, held.run_nodes) if held else ((), 0)
        said = Listening(host, self._node.index + 1, commit.epoch, "", *group)
        process.after(self._delay_s(), said)

    def _join(self, process: Process, roster: Roster, again: bool = False) -> None:
        self.unsettled = None
        self._ask(process, "join", m.Join(self._rank.local, roster.encode(), again), "joined")

    def _inventory(self, process: Process) -> None:
        self._ask(process, "inventory", m.Inventory(self._rank.local), "inventory")

    def _resume(self, process: Process, stamp: Stamp) -> None:
        self.unsettled = self.past = None
        self._ask(process, "resume", m.Resume(self._rank.local, *stamp), "resumed")

    def _begin(self, process: Process, step: int, nbytes: int) -> None:
        begin = m.Begin(self._rank.local, step, nbytes)
        self._ask(process, "begin", begin, "granted", "skipped", "refused")

    def _sizes(self, process: Process, step: int, nbytes: int, ranks: list[int]) -> None:
        sizes = m.Sizes(self._rank.local, step, nbytes, ranks)
        self._ask(process, "sizes", sizes, "sizes", "skipped")
        self._world.at(SIZES_PATIENCE_S, self._withdraw, self.wait)

    def _withdraw(self, wait: _Wait | None) -> None:
        if wait is not None and self.wait is wait:
            self._send(m.Withdraw(self._rank.local))

    def _written(self, process: Process, event: m.Written) -> None:
        if not self._fails(process):
            self._send(event)
            self.unsettled = self.past = event.step
            process.after(0.0)

    def _skip_step(self, process: Process, step: int) -> None:
        if not self._fails(process):
            self._send(m.SkipStep(self._rank.local, step))
            self.past = step
            process.after(0.0)

    def _settle(self, process: Process) -> None:
        if self.unsettled is None:
            process.after(0.0)
        elif not self._fails(process):
            self.wait = _Wait(process, "settle", ())
            self._pump()

    def _finished(self, process: Process) -> None:
        self._ask(process, "finished", m.Finished(self._rank.local), "bye")

    def _fails(self, process: Process) -> bool:
        if self.lost or self.connection < 0:
            process.after(0.0, error=ConnectionError("the SMP is gone"))
            return True
        return False

    def _ask(self, process: Process, method: str, event: m.FromRank, *verbs: str) -> None:
        if not self._fails(process):
            self._send(event)
            self.wait = _Wait(process, method, verbs)
            self._pump()

    def _send(self, event: m.FromRank) -> None:
        self._sent_s = max(self._sent_s, self._world.now + self._delay_s())
        sent = self.instance, self.connection, event
        self._world.at(self._sent_s - self._world.now, self._node.receive, *sent)

    def _pump(self) -> None:
        while self._inbox and self.wait is not None:
            verb, fields = self._inbox.popleft()
            if verb in self.wait.verbs:
                wait, self.wait = self.wait, None
                self._answer(wait, verb, fields)
            elif verb in ("committed", "aborted"):
                self._settled(verb, fields)
            else:
                raise Violation(f"rank {self._rank.rank}: {verb!r} came, {self.wait.method} waits")
        if self.wait is not None and self.wait.method == "settle" and self.unsettled is None:
            wait, self.wait = self.wait, None
            wait.process.after(0.0)

    def _settled(self, verb: str, fields: dict[str, Any]) -> None:
        if verb == "committed":
            self._rank.committed = fields["step"]
        elif fields.get("diverged"):
            raise Violation(f"step {fields['step']}: replicas are said to differ: {fields}")
        if fields["step"] == self.unsettled:
            self.unsettled = None

    def _answer(self, wait: _Wait, verb: str, fields: dict[str, Any]) -> None:
        answer: Any = None
        match verb:
            case "welcome":
                answer, self.past = self.past, None
            case "inventory":
                answer = NodeInventory(
                    epoch=fields["epoch"], slots=fields["slots"], mirrors=fields["mirrors"]
                )
            case "granted":
                answer = fields["memory"]
            case "sizes":
                answer = fields["sizes"]
            case "skipped":
                self.past = fields["step"]
                self._world.stats["skipped"] += 1
            case "refused" if fields.get("memory"):
                self.past = fields["step"]
                wait.process.after(0.0, error=NotEnoughMemory(fields["reason"]))
                return
            case "refused":
                raise Violation(f"rank {self._rank.rank} was refused: {fields['reason']}")
        wait.process.after(0.0, answer)


TROUBLE = (SmpUnavailable, NotEnoughMemory, ConnectionError)

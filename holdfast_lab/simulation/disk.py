"""The process of a node that writes checkpoints, with a simulated disk.

It speaks the messages of the library's persister. What is written when, and what must stay, the
library decides (``leases``, ``checkpoint_schedule``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Needed
from holdfast.snapshot.protocol.roster import Stamp
from holdfast_lab.simulation.world import Violation

if TYPE_CHECKING:
    from holdfast_lab.simulation.node import Node

READER = 1
KEPT = 2
_RETRY_S = 0.5


class Disk:
    """The checkpoints of one node: the step of each, with the state that it holds.

    Attributes:
        steps: the token of the state of each step (``trainers``).
        full: true while nothing can be written.
    """

    def __init__(self, node: Node) -> None:
        self._node, self._world = node, node.world
        self.steps: dict[int, int] = {}
        self.full = False
        self._after = 0
        self._leased: Stamp | None = None
        self._needed = Needed(-1, 0)
        self._parts: dict[int, tuple[bytearray, bytes]] = {}

    def attach(self, instance: int) -> None:
        """Begin to write for a new SMP, after the time that the process needs to start."""
        self._leased = None
        self._world.at(self._world.soon(0.05, 0.5), self._begin, instance)

    def _begin(self, instance: int) -> None:
        self._after = max(self.steps, default=0)
        self._wait(instance)

    def _wait(self, instance: int) -> None:
        steps, every = sorted(self.steps), self._world.persist_every
        self._node.deliver(instance, m.Due(READER, every, self._after, steps))

    def answered(self, answer: m.Answer) -> None:
        """Take an answer of the SMP."""
        fields: dict[str, Any] = dict(answer.fields)
        if answer.verb == "leased":
            self._leased = Stamp(fields["epoch"], fields["step"])
            self._needed, self._parts = Needed(*fields["needed"]), {}
            writing_s = self._world.soon(0.05, 0.6) * self._node.pace**0.5
            self._world.at(writing_s, self._written, self._node.instance, self._leased)
        elif answer.verb == "part" and answer.slot is not None:
            memory = self._node.memory.slots[answer.rank, answer.slot]
            self._parts[answer.rank] = memory, bytes(memory)
        elif answer.verb == "released":
            self._released(fields["intact"], fields["newest"])

    def _written(self, instance: int, stamp: Stamp) -> None:
        if self._node.instance == instance and self._leased == stamp:
            self._node.deliver(instance, m.Release(READER))

    def _released(self, intact: bool, newest: int) -> None:
        stamp, instance = self._leased, self._node.instance
        if stamp is None:
            return
        self._leased = None
        self._after = stamp.step
        damaged = any((rank, stamp) in self._node.damaged for rank in self._node.ranks)
        changed = any(memory != copy for memory, copy in self._parts.values())
        if intact and changed and not damaged:
            raise Violation(f"node {self._node.index}: step {stamp} changed while it was lent")
        if not intact or newest < stamp.step or damaged or self.full:
            self._node.handle(m.Persisted(READER, stamp.step, "it was not written"))
        else:
            token = self._world.invariants.tokens[stamp]
            self.steps = dict(sorted({**self.steps, stamp.step: token}.items()))
            for step in self._needed.removable(list(self.steps), KEPT):
                del self.steps[step]
            self._node.handle(m.Persisted(READER, stamp.step, ""))
            self._world.stats["checkpoints"] += 1
            self._world.invariants.on_disk(self._node)
        self._world.at(_RETRY_S / 10, self._again, instance)

    def _again(self, instance: int) -> None:
        if self._node.instance == instance and self._leased is None:
            self._wait(instance)

    def go_back(self, step: int) -> None:
        """Void what is newer than a step from which the run continues."""
        self.steps = {old: token for old, token in self.steps.items() if old <= step}
        self._world.invariants.back_to(step)

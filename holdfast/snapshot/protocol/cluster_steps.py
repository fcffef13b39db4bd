"""The progress of every step on every node of a run, as this node knows it."""

import json
from collections import defaultdict
from typing import Any, NamedTuple

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk
from holdfast.snapshot.protocol.parity_plan import BlockTransfer
from holdfast.snapshot.protocol.roster import Roster


class BlockDigests(NamedTuple):
    """The digests that a rank tells all of a step: ``claims`` and ``seen`` of ``Written``."""

    claims: tuple[str, ...] = ()
    seen: tuple[tuple[int, int, str], ...] = ()  # owner's rank, its claim's number, digest

    @classmethod
    def parse(cls, claims: Any, seen: Any) -> "BlockDigests":
        """Read them as a frame states them.

        Raises:
            ProtocolViolation: they cannot be read.
        """
        try:
            rows = tuple((int(rank), int(block), str(digest)) for rank, block, digest in seen)
            return cls(tuple(map(str, claims)), rows)
        except (TypeError, ValueError) as error:
            raise m.ProtocolViolation(f"digests of blocks cannot be read: {error}") from error


class Own(NamedTuple):
    """A local rank's part of a step that it wrote."""

    digest: str
    manifest: bytes
    blocks: BlockDigests = BlockDigests()
    transfers: tuple[BlockTransfer, ...] = ()


class Held(NamedTuple):
    """A node's announcement of a step: digests of its ranks, state of its disk (None: unknown)."""

    ranks: dict[int, BlockDigests]
    disk: Disk | None = None

    def encoded(self) -> bytes:
        """Return it as ``parse`` reads it."""
        return json.dumps(self).encode()

    @classmethod
    def parse(cls, event: m.PeerHolds) -> "Held":
        """Read it as another node announced it.

        Raises:
            ProtocolViolation: it cannot be read.
        """
        try:
            ranks, disk = json.loads(event.manifest)
            said = {int(rank): BlockDigests.parse(*given) for rank, given in ranks.items()}
            return cls(said, Disk.parse(disk) if disk is not None else None)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise m.ProtocolViolation(f"node {event.node} announced {error}") from error


class StepRecords:
    """The nodes that wrote, announced or skipped each step of one epoch.

    Attributes:
        own: the parts of the local ranks, by step.
        announced: by step and node.
        wrote: the steps that each node has written.
        skipped: up to this step a node writes none that it has not written.
        replaced: nodes whose SMP took the place of another one.
    """

    def __init__(self, roster: Roster) -> None:
        self.own: dict[int, tuple[Own, ...]] = {}
        self.announced: dict[int, dict[int, Held]] = defaultdict(dict)
        self.wrote: dict[int, set[int]] = defaultdict(set)
        self.skipped: dict[int, int] = {}
        self.replaced: set[int] = set()
        self._nodes, self._here = frozenset(roster.nodes), roster.node

    def all_wrote(self, step: int) -> bool:
        """Whether every node has written a step."""
        return all(step in self.wrote[node] for node in self._nodes)

    def is_held_here(self, step: int) -> bool:
        """Whether this node has announced a step."""
        return self._here in self.announced.get(step, {})

    def is_sealed(self, step: int) -> bool:
        """Whether every node announced a step."""
        return len(self.announced[step]) == len(self._nodes)

    def is_skipped(self, step: int) -> bool:
        """Whether a node will not write a step any more, and has not."""
        return any(self._skips(node, step) for node in self._nodes)

    def is_void(self, step: int) -> bool:
        """Whether a step is skipped, and no node can have seen it sealed."""
        firm = self._nodes - self.replaced if self.is_held_here(step) else self._nodes
        return any(self._skips(node, step) for node in firm)

    def _skips(self, node: int, step: int) -> bool:
        wrote = self.wrote[node]
        last = max(self.skipped.get(node, -1), max(wrote, default=-1))
        return step not in wrote and step <= last

    def disks(self, step: int) -> list[Disk | None]:
        """Return every node's disk as announced with a sealed step: all nodes find the same."""
        return [held.disk for held in self.announced[step].values()]

    def diverged(self, step: int) -> list[tuple[int, int, int]]:
        """Find blocks of which the owner's bytes differ from another rank's replica of them.

        Every node finds the same, once all have announced the step.

        Returns:
            For each the rank that saw it, the rank that owns it, and its number there.
        """
        held = self.announced[step].values()
        told = {rank: blocks for each in held for rank, blocks in each.ranks.items()}
        return [
            (rank, owner, block)
            for rank, blocks in sorted(told.items())
            for owner, block, digest in blocks.seen
            if owner in told and told[owner].claims[block : block + 1] != (digest,)
        ]

    def forget_before(self, step: int) -> None:
        """Drop the records of steps before one that was sealed."""
        self.own = {old: own for old, own in self.own.items() if old >= step}
        for old in [old for old in self.announced if old < step]:
            del self.announced[old]
        for wrote in self.wrote.values():
            wrote -= {old for old in wrote if old < step and old != max(wrote)}

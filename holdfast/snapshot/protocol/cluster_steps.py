"""The progress of every step on every node of a parity group, as this node knows it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk
from holdfast.snapshot.protocol.parity_stream import BlockTransfer
from holdfast.snapshot.protocol.roster import Count, Roster

# Ranks are at most a step apart; requests for older steps that were never answered are dropped.
_SIZED_STEPS = 4


class BlockDigests(NamedTuple):
    """The digests that a rank announces with a step: ``claims`` and ``seen`` of ``Written``.

    ``seen`` has the rank of a block's owner, the number of the block there, and the digest.
    """

    claims: tuple[str, ...] = ()
    seen: tuple[tuple[Count, Count, str], ...] = ()  # owner's rank, its claim's number, digest


class Own(NamedTuple):
    """A local rank's part of a step that it wrote."""

    digest: str
    manifest: bytes
    blocks: BlockDigests = BlockDigests()
    transfers: tuple[BlockTransfer, ...] = ()


class Held(NamedTuple):
    """A node's announcement of a step: digests of its ranks, and the state of its disk if known."""

    ranks: dict[Count, BlockDigests]
    disk: Disk | None = None

    def encoded(self) -> bytes:
        """Return the announcement as ``parse`` reads it."""
        return msgspec.json.encode(self)

    @classmethod
    def parse(cls, event: m.PeerHolds) -> "Held":
        """Return the announcement of another node."""
        try:
            return msgspec.json.decode(event.manifest, type=cls)
        except (ValueError, RecursionError) as error:
            raise m.ProtocolViolation(f"node {event.node} announced {error}") from error


class StepRecords:
    """The nodes that wrote, announced or skipped each step of one epoch.

    Attributes:
        own: the parts of the local ranks, by step.
        announced: the announcements, by step and node.
        wrote: the steps that each node has written.
        skipped: for each node, the step up to which it skips every step that it has not written.
        replaced: the nodes whose SMP replaced another one.
    """

    def __init__(self, roster: Roster) -> None:
        self.own: dict[int, tuple[Own, ...]] = {}
        self.announced: dict[int, dict[int, Held]] = defaultdict(dict)
        self.wrote: dict[int, set[int]] = defaultdict(set)
        self.skipped: dict[int, int] = {}
        self.replaced: set[int] = set()
        self._nodes, self._here = frozenset(roster.group), roster.node

    def all_wrote(self, step: int) -> bool:
        """Return true if every node has written a step."""
        return all(step in self.wrote[node] for node in self._nodes)

    def is_held_here(self, step: int) -> bool:
        """Return true if this node has announced a step."""
        return self._here in self.announced.get(step, {})

    def is_sealed(self, step: int) -> bool:
        """Return true if every node has announced a step."""
        return self.announced.get(step, {}).keys() >= self._nodes

    def is_skipped(self, step: int, *, firmly: bool = False) -> bool:
        """Return true if a node has not written a step, and will not.

        Firmly it is skipped if that is so of a node whose SMP replaced no other.
        """
        replaced = self.replaced if firmly else ()
        return any(step <= self._last(n) for n in self._without(step) if n not in replaced)

    def newest(self) -> int:
        """Return the newest step that a node has written or skipped; -1 if there is none."""
        return max(map(self._last, self._nodes))

    def known(self) -> set[int]:
        """Return the steps that a node has written, without those before a committed one."""
        return set().union(*self.wrote.values())

    def lacking(self, step: int) -> tuple[int, ...]:
        """Return the nodes that have not written a step; if all have, those that do not hold it."""
        found = tuple(sorted(self._without(step)))
        return found or tuple(sorted(self._nodes - self.announced.get(step, {}).keys()))

    def _last(self, node: int) -> int:
        return max(self.skipped.get(node, -1), max(self.wrote[node], default=-1))

    def _without(self, step: int) -> list[int]:
        wrote = self.wrote
        return [node for node in self._nodes if step not in wrote[node]]

    def diverged(self, step: int) -> list[tuple[int, int, int]]:
        """Find blocks whose owner announced another digest than a rank with a replica.

        Every node finds the same blocks once all have announced the step.

        Returns:
            For each such block the replica's rank, the owner's rank and the block's number.
        """
        held = self.announced[step].values()
        return differing({rank: blocks for each in held for rank, blocks in each.ranks.items()})

    def forget_before(self, step: int) -> None:
        """Drop the records of steps before one that was sealed."""
        self.own = {old: own for old, own in self.own.items() if old >= step}
        for old in [old for old in self.announced if old < step]:
            del self.announced[old]
        for wrote in self.wrote.values():
            wrote -= {old for old in wrote if old < step and old != max(wrote)}


def differing(told: Mapping[int, BlockDigests]) -> list[tuple[int, int, int]]:
    """Find blocks of which a rank has seen another digest than their owner, as ``diverged``."""
    return [
        (rank, owner, block)
        for rank, blocks in sorted(told.items())
        for owner, block, digest in blocks.seen
        if owner in told and told[owner].claims[block : block + 1] != (digest,)
    ]


class Sizes:
    """The size of each rank's state at the last few steps, and the nodes that need this node's.

    Optimizers create their state in their first step, not on all ranks at the same time, and ranks
    that stripe a step together must all compute with the same sizes.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, int]] = {}
        self._told: dict[tuple[int, int], frozenset[int]] = {}

    def know(self, step: int, rank: int, nbytes: int, nodes: Iterable[int] = ()) -> None:
        """Record a rank's size at a step; ``nodes`` need that of this node's own rank."""
        self._known.setdefault(step, {})[rank] = nbytes
        self._told[step, rank] = frozenset(nodes)
        for old in sorted(self._known)[:-_SIZED_STEPS]:
            for gone in self._known.pop(old):
                del self._told[old, gone]

    def of(self, step: int, ranks: Iterable[int]) -> list[int] | None:
        """Return the sizes of these ranks at a step, or None until all are known."""
        known = self._known.get(step, {})
        found = [known.get(rank) for rank in ranks]
        return None if None in found else [nbytes for nbytes in found if nbytes is not None]

    def told(self, node: int) -> Iterator[tuple[int, int, int]]:
        """Yield step, rank and size of all that a node should know from this one."""
        for (step, rank), nodes in self._told.items():
            if node in nodes:
                yield step, rank, self._known[step][rank]

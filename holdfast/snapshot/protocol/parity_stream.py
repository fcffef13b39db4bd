"""Blocks on their way to the nodes that keep their parities, decided without I/O.

If the nodes hold different states (``groups.Mode.REDUCED``) a parity is a sum of blocks that other
nodes own. Their SMPs send the blocks after training has gone on::

    both wrote t -> chunks sent, as links have room -> all that is due added -> parity digested

Each rank states the parities of its slot to its SMP as a plan of plain numbers, so the SMP needs no
knowledge of stripes.

**Guarantees**: a chunk is added once, however often and in whatever order it arrives. After a link
was lost all chunks are sent again, and the receiver recognizes those that it has.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from holdfast.snapshot.protocol.roster import Count, ProtocolViolation, fitted

CHUNK_BYTES = 2**20


class BlockTransfer(NamedTuple):
    """Bytes of a slot that are added to a parity in the slot of rank ``keeper``.

    ``nbytes`` bytes at ``start``, times ``coefficient``, are added to those at ``there``.
    """

    start: Count
    nbytes: Count
    keeper: Count
    there: Count
    coefficient: Annotated[int, Meta(ge=0, le=255)]


class ParityRange(NamedTuple):
    """The place of a stripe's parity in its keeper's slot."""

    stripe: Count
    start: Count
    nbytes: Count


@dataclass(frozen=True)
class ParityPlan:
    """The transfers out of a slot, and the parities that are computed in it.

    Attributes:
        transfers: the transfers to other nodes.
        ranges: the parities kept here, which begin as zeros.
        due_nbytes: the number of bytes that other nodes add to them, in all.
        bucket_nbytes: the size of the pieces in which parities are digested.
    """

    transfers: tuple[BlockTransfer, ...] = ()
    ranges: tuple[ParityRange, ...] = ()
    due_nbytes: Count = 0
    bucket_nbytes: Count = 1

    @classmethod
    def parse(cls, given: Mapping[str, Any], slot_nbytes: int) -> "ParityPlan":
        """Return the plan that a frame states, for a slot of ``slot_nbytes`` bytes."""
        found = fitted(given, cls)
        rows: list[BlockTransfer | ParityRange] = [*found.transfers, *found.ranges]
        fits = all(row.start + row.nbytes <= slot_nbytes for row in rows)
        if found.bucket_nbytes < 1 or not fits:
            raise ProtocolViolation(f"the parity plan does not fit a slot of {slot_nbytes} bytes")
        return found


RankTransfer = tuple[int, BlockTransfer]  # with the rank whose slot has the bytes


def chunks(transfers: Iterable[RankTransfer]) -> Iterator[RankTransfer]:
    """Yield the same bytes in pieces of at most 1 MiB, the same pieces at every call."""
    for rank, whole in transfers:
        for first in range(0, whole.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, whole.nbytes - first)
            start, there = whole.start + first, whole.there + first
            yield rank, whole._replace(start=start, nbytes=nbytes, there=there)


class ParitySender:
    """The transfers of a node, by step and receiving node; each waits until it is started."""

    def __init__(self) -> None:
        self._transfers: dict[tuple[int, int], list[RankTransfer]] = {}
        self._left: dict[int, dict[int, Iterator[RankTransfer]]] = defaultdict(dict)

    def add(self, step: int, node: int, transfer: RankTransfer) -> None:
        """Add a transfer of a step."""
        self._transfers.setdefault((step, node), []).append(transfer)

    def start(self, step: int, node: int) -> None:
        """Send all of a step to a node that is ready for it, including what was sent before."""
        if (step, node) in self._transfers:
            self._left[node][step] = chunks(self._transfers[step, node])

    def next(self, node: int) -> tuple[int, RankTransfer] | None:
        """Return the next chunk for a node, of the oldest step; None if there is none."""
        while left := self._left.get(node):
            step = min(left)
            if (chunk := next(left[step], None)) is not None:
                return step, chunk
            del left[step]
        return None

    def done(self, step: int, node: int) -> None:
        """Forget a step that a node has received completely."""
        self._transfers.pop((step, node), None)
        self._left[node].pop(step, None)

    def drop(self, steps: range) -> None:
        """Forget steps that need not be sent any more."""
        for step, node in [key for key in self._transfers if key[0] in steps]:
            self.done(step, node)


@dataclass
class ParityReceiver:
    """The blocks that were added to the parities of a slot so far, and the parities' digests."""

    plan: ParityPlan
    digests: list[bytes] = field(default_factory=list)
    _added: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.due_nbytes = self.plan.due_nbytes
        size = self.plan.bucket_nbytes
        self._buckets = [
            (start, min(size, parity.start + parity.nbytes - start))
            for parity in self.plan.ranges
            for start in range(parity.start, parity.start + parity.nbytes, size)
        ]

    @property
    def complete(self) -> bool:
        """True if all that is due was added and digested."""
        return not self.due_nbytes and len(self.digests) == len(self._buckets)

    def take(self, rank: int, start: int, nbytes: int) -> bool:
        """Count a chunk of another node's rank as added; return false if it was added before."""
        if (rank, start) in self._added:
            return False
        ends = ((parity.start, parity.start + parity.nbytes) for parity in self.plan.ranges)
        inside = any(first <= start <= start + nbytes <= last for first, last in ends)
        if not inside or not 0 < nbytes <= self.due_nbytes:
            raise ProtocolViolation(f"{nbytes} bytes of rank {rank} at {start} are not due")
        self._added.add((rank, start))
        self.due_nbytes -= nbytes
        return True

    def undigested(self) -> tuple[int, int] | None:
        """Return start and size of the next bucket to digest, once all that is due was added."""
        if self.due_nbytes or self.complete:
            return None
        return self._buckets[len(self.digests)]

    def by_stripe(self) -> dict[int, bytes]:
        """Return the joined digests of each parity, by stripe."""
        found, left = {}, iter(self.digests)
        for parity in self.plan.ranges:
            count = -(-parity.nbytes // self.plan.bucket_nbytes)
            found[parity.stripe] = b"".join(next(left) for _ in range(count))
        return found

"""Blocks on their way to the nodes that keep their parities, decided without I/O.

Where nodes hold different states (``groups.Mode.REDUCED``) a parity is a sum of blocks that other
nodes own. Their SMPs send them, after training has gone on::

    both wrote t -> chunks sent, as links have room -> all that is due added -> parity digested

**Guarantees**: a chunk is added once, however often and in whatever order it arrives: what may have
been lost with a link is sent again from the beginning, and its receiver knows what it has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.snapshot.protocol.parity_plan import BlockTransfer, ParityPlan
from holdfast.snapshot.protocol.roster import ProtocolViolation

CHUNK_BYTES = 2**20

RankTransfer = tuple[int, BlockTransfer]  # the rank whose slot it is taken from


def chunks(transfers: Iterable[RankTransfer]) -> Iterator[RankTransfer]:
    """Yield the same bytes in pieces of 1 MiB at most; always the same ones."""
    for rank, whole in transfers:
        for first in range(0, whole.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, whole.nbytes - first)
            start, there = whole.start + first, whole.there + first
            yield rank, whole._replace(start=start, nbytes=nbytes, there=there)


class ParitySender:
    """The transfers of a node, by step and receiving node; each waits until it is started."""

    def __init__(self) -> None:
        self._transfers: dict[tuple[int, int], list[RankTransfer]] = {}
        self._left: dict[tuple[int, int], Iterator[RankTransfer]] = {}

    def add(self, step: int, node: int, transfer: RankTransfer) -> None:
        """Add a transfer of a step."""
        self._transfers.setdefault((step, node), []).append(transfer)

    def start(self, step: int, node: int) -> None:
        """Send all of a step to a node that is ready for it, including what was sent before."""
        if (step, node) in self._transfers:
            self._left[step, node] = chunks(self._transfers[step, node])

    def next(self, node: int) -> tuple[int, RankTransfer] | None:
        """Take the next chunk for a node, of the oldest step."""
        for step in sorted(step for step, other in self._left if other == node):
            chunk = next(self._left[step, node], None)
            if chunk is not None:
                return step, chunk
            del self._left[step, node]
        return None

    def done(self, step: int, node: int) -> None:
        """Forget a step that a node has all of."""
        self._transfers.pop((step, node), None)
        self._left.pop((step, node), None)

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
        """Whether all that is due was added, and digested."""
        return not self.due_nbytes and len(self.digests) == len(self._buckets)

    def take(self, rank: int, start: int, nbytes: int) -> bool:
        """Count a chunk of another node's rank as added; False if it was added before.

        Raises:
            ProtocolViolation: it is none of those that are due.
        """
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
        """Return start and bytes of the next bucket to digest, if all that is due was added."""
        if self.due_nbytes or self.complete:
            return None
        return self._buckets[len(self.digests)]

    def by_stripe(self) -> dict[int, bytes]:
        """Return the digests of each parity, joined."""
        found, left = {}, iter(self.digests)
        for parity in self.plan.ranges:
            count = -(-parity.nbytes // self.plan.bucket_nbytes)
            found[parity.stripe] = b"".join(next(left) for _ in range(count))
        return found

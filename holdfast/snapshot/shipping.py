"""Blocks on their way to the nodes that keep their parities, decided without I/O.

Where nodes hold different states (``groups.Mode.REDUCED``) a parity is a sum of blocks that other
nodes own. Their SMPs send them, after training has gone on::

    both wrote t -> chunks sent, as links have room -> all that is due added -> parity digested

**Guarantees**: a chunk is added once, however often and in whatever order it arrives: what may have
been lost with a link is sent again from the beginning, and its receiver knows what it has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.snapshot.cargo import Cargo, Shipment
from holdfast.snapshot.messages import ProtocolViolation

CHUNK_BYTES = 2**20

Piece = tuple[int, Shipment]  # of which rank


def chunks(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in pieces of 1 MiB at most; always the same ones."""
    for rank, whole in pieces:
        for first in range(0, whole.nbytes, CHUNK_BYTES):
            yield (
                rank,
                whole._replace(
                    start=whole.start + first,
                    nbytes=min(CHUNK_BYTES, whole.nbytes - first),
                    there=whole.there + first,
                ),
            )


class Outgoing:
    """What a node sends, by step and receiving node; nothing goes before it was started."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], list[Piece]] = {}
        self._left: dict[tuple[int, int], Iterator[Piece]] = {}

    def add(self, step: int, node: int, piece: Piece) -> None:
        """Something more to send of a step."""
        self._pieces.setdefault((step, node), []).append(piece)

    def start(self, step: int, node: int) -> None:
        """Send all of a step to a node that is ready for it; also what was sent before."""
        if (step, node) in self._pieces:
            self._left[step, node] = chunks(self._pieces[step, node])

    def next(self, node: int) -> tuple[int, Piece] | None:
        """The next chunk for a node, of the oldest step."""
        for step in sorted(step for step, other in self._left if other == node):
            chunk = next(self._left[step, node], None)
            if chunk is not None:
                return step, chunk
            del self._left[step, node]
        return None

    def done(self, step: int, node: int) -> None:
        """That node has all of a step."""
        self._pieces.pop((step, node), None)
        self._left.pop((step, node), None)

    def drop(self, steps: range) -> None:
        """These steps need not be sent any more."""
        for step, node in [key for key in self._pieces if key[0] in steps]:
            self.done(step, node)


@dataclass
class Intake:
    """What was added to the parities of a slot so far, and their digests."""

    cargo: Cargo
    digests: list[bytes] = field(default_factory=list)
    _added: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.due_nbytes = self.cargo.due_nbytes
        size = self.cargo.bucket_nbytes
        self._buckets = [
            (start, min(size, area.start + area.nbytes - start))
            for area in self.cargo.areas
            for start in range(area.start, area.start + area.nbytes, size)
        ]

    @property
    def complete(self) -> bool:
        """Whether all that is due was added, and digested."""
        return not self.due_nbytes and len(self.digests) == len(self._buckets)

    def take(self, rank: int, start: int, nbytes: int) -> bool:
        """Whether a chunk of another node's rank is new; it counts as added then.

        Raises:
            ProtocolViolation: it is none of those that are due.
        """
        if (rank, start) in self._added:
            return False
        spans = ((area.start, area.start + area.nbytes) for area in self.cargo.areas)
        inside = any(first <= start <= start + nbytes <= last for first, last in spans)
        if not inside or not 0 < nbytes <= self.due_nbytes:
            raise ProtocolViolation(f"{nbytes} bytes of rank {rank} at {start} are not due")
        self._added.add((rank, start))
        self.due_nbytes -= nbytes
        return True

    def undigested(self) -> tuple[int, int] | None:
        """Start and bytes of the next bucket to digest, if all that is due was added."""
        if self.due_nbytes or self.complete:
            return None
        return self._buckets[len(self.digests)]

    def by_stripe(self) -> dict[int, bytes]:
        """The digests of each parity, joined."""
        found, left = {}, iter(self.digests)
        for area in self.cargo.areas:
            count = -(-area.nbytes // self.cargo.bucket_nbytes)
            found[area.stripe] = b"".join(next(left) for _ in range(count))
        return found

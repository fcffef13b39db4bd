"""What a rank tells its SMP where nodes hold different states: which bytes of its slot are added to
whose parities, and which parities it keeps itself. Plain numbers: the SMP needs no geometry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.snapshot.messages import ProtocolViolation
from holdfast.snapshot.stripes import Striping

_LAYOUTS = 8


class Shipment(NamedTuple):
    """``nbytes`` bytes at ``start`` of a slot: times ``coefficient`` they are added to those at
    ``there`` of the slot of rank ``keeper``."""

    start: int
    nbytes: int
    keeper: int
    there: int
    coefficient: int


class Area(NamedTuple):
    """Where the parity of a stripe lies in its keeper's slot."""

    stripe: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class Cargo:
    """What is to be sent of a slot, and what is to be added to it.

    Attributes:
        shipments: what goes to others.
        areas: the parities kept here, which begin as zeros.
        due_nbytes: bytes that others add to them, in all.
        bucket_nbytes: parities are digested in pieces of this size.
    """

    shipments: tuple[Shipment, ...] = ()
    areas: tuple[Area, ...] = ()
    due_nbytes: int = 0
    bucket_nbytes: int = 1

    @classmethod
    def parse(cls, given: Mapping[str, Any], room_nbytes: int) -> "Cargo":
        """The cargo that a frame states, of a slot of ``room_nbytes`` bytes; none if it is empty.

        Raises:
            ProtocolViolation: a field is missing or odd, or it lies outside of the slot.
        """
        if not given:
            return cls()
        try:
            found = cls(
                shipments=tuple(Shipment(*map(int, row)) for row in given["shipments"]),
                areas=tuple(Area(*map(int, row)) for row in given["areas"]),
                due_nbytes=int(given["due_nbytes"]),
                bucket_nbytes=int(given["bucket_nbytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolation(f"the cargo cannot be read: {error!r}") from error
        if not found._fits(room_nbytes):
            raise ProtocolViolation(f"the cargo does not fit a slot of {room_nbytes} bytes")
        return found

    def _fits(self, room_nbytes: int) -> bool:
        rows: list[Shipment | Area] = [*self.shipments, *self.areas]
        numbers = [number for row in rows for number in row]
        positive = min([self.bucket_nbytes - 1, self.due_nbytes, *numbers]) >= 0
        return positive and all(row.start + row.nbytes <= room_nbytes for row in rows)


@lru_cache(maxsize=_LAYOUTS)
def of(striping: Striping, node: int, peers: tuple[int, ...], bucket_nbytes: int) -> Cargo:
    """The cargo of one node.

    Args:
        striping: the layout, of nodes that hold different states.
        node: which of its nodes.
        peers: the rank that keeps the part of each node.
        bucket_nbytes: as in ``Cargo``.

    **Guarantees**: when all nodes' shipments are added to cleared areas, these hold the parities
    that ``parity.encode`` gives, up to their ``nbytes``.

    Raises:
        ConfigError: a second parity needs ISA-L, which is not installed.
    """
    kept = striping.encodings(node)
    return Cargo(
        shipments=tuple(_shipments(striping, node, peers)),
        areas=tuple(Area(c.target.stripe, c.target.offset, c.target.nbytes) for c in kept),
        due_nbytes=sum(source.nbytes for coding in kept for source in coding.sources),
        bucket_nbytes=bucket_nbytes,
    )


def _shipments(striping: Striping, node: int, peers: tuple[int, ...]) -> list[Shipment]:
    # The SMP, which imports this module, starts without NumPy.
    from holdfast.snapshot import parity

    rows = [parity.encoding_row(n, striping.data_blocks) for n in range(striping.parities)]
    found = []
    for stripe in range(striping.nodes):
        block = striping.fragment(stripe, node)
        if block.role >= striping.data_blocks or not block.nbytes:
            continue
        for number, row in enumerate(rows):
            keeper = (stripe + number) % striping.nodes
            there, factor = striping.fragment(stripe, keeper).offset, row[block.role]
            found.append(Shipment(block.offset, block.nbytes, peers[keeper], there, factor))
    return found

"""The parities of a slot where nodes hold different states, as a rank tells its SMP.

Which bytes of the slot are added to other ranks' parities, and which parities it keeps itself:
plain numbers, as the SMP needs no geometry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.snapshot.protocol.roster import ProtocolViolation


class BlockTransfer(NamedTuple):
    """Bytes of a slot that are added to a parity in the slot of rank ``keeper``.

    ``nbytes`` bytes at ``start``, times ``coefficient``, are added to those at ``there``.
    """

    start: int
    nbytes: int
    keeper: int
    there: int
    coefficient: int


class ParityRange(NamedTuple):
    """The place of a stripe's parity in its keeper's slot."""

    stripe: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class ParityPlan:
    """The transfers out of a slot, and the parities that are made in it.

    Attributes:
        transfers: what goes to others.
        ranges: the parities kept here, which begin as zeros.
        due_nbytes: bytes that others add to them, in all.
        bucket_nbytes: parities are digested in pieces of this size.
    """

    transfers: tuple[BlockTransfer, ...] = ()
    ranges: tuple[ParityRange, ...] = ()
    due_nbytes: int = 0
    bucket_nbytes: int = 1

    @classmethod
    def parse(cls, given: Mapping[str, Any], slot_nbytes: int) -> "ParityPlan":
        """Return the plan that a frame states, for a slot of ``slot_nbytes`` bytes.

        Raises:
            ProtocolViolation: a field is missing or odd, or a range lies outside of the slot.
        """
        try:
            found = cls(
                transfers=tuple(BlockTransfer(*map(int, row)) for row in given["transfers"]),
                ranges=tuple(ParityRange(*map(int, row)) for row in given["ranges"]),
                due_nbytes=int(given["due_nbytes"]),
                bucket_nbytes=int(given["bucket_nbytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolation(f"the parity plan cannot be read: {error!r}") from error
        rows: list[BlockTransfer | ParityRange] = [*found.transfers, *found.ranges]
        numbers = [found.bucket_nbytes - 1, found.due_nbytes, *(n for row in rows for n in row)]
        if min(numbers) < 0 or any(row.start + row.nbytes > slot_nbytes for row in rows):
            raise ProtocolViolation(f"the parity plan does not fit a slot of {slot_nbytes} bytes")
        return found

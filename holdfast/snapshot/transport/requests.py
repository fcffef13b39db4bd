"""Schemas of what nodes and their ranks ask of an SMP besides the events of its state machine."""

from typing import Annotated

from msgspec import Meta

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Count, Stamp


class Ping(m.FromPeer, verb="ping"):
    """``node`` lives, and is in this state."""

    state: Annotated[str, Meta(max_length=64)]


class FromReadingRank(m.Event, sender=True):
    """A request of a rank of any node for what this node holds of a step."""

    epoch: Count
    step: Count

    @property
    def stamp(self) -> Stamp:
        """The step."""
        return Stamp(self.epoch, self.step)


class PinStep(FromReadingRank, verb="pin"):
    """Asks that a step is kept until the connection ends."""


class ReadManifest(FromReadingRank, verb="manifest"):
    """Asks for the manifest of a rank, from its slot or a mirror."""

    rank: Count


class ReadParities(FromReadingRank, verb="parities"):
    """Asks for the digests of the parities that a rank keeps."""

    rank: Count


class ReadSlot(FromReadingRank, verb="read"):
    """Asks for bytes of a rank's slot."""

    rank: Count
    offset: Count
    nbytes: Count

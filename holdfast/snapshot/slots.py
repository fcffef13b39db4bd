"""The slots of a rank: pure records that ``protocol`` decides over."""

from dataclasses import dataclass
from enum import Enum

from holdfast.snapshot.messages import Begin


class SlotState(Enum):
    """Where a slot is in its life."""

    EMPTY = "empty"
    WRITING = "writing"
    WRITTEN = "written"
    CLEAN = "clean"


@dataclass
class Slot:
    """One buffer of one rank; ``generation`` counts its memory allocations."""

    state: SlotState = SlotState.EMPTY
    step: int = -1
    capacity: int = 0
    generation: int = 0
    digest: str = ""
    manifest: bytes = b""

    def clear(self) -> None:
        """Forget the content, keep the memory."""
        self.state, self.step, self.digest, self.manifest = SlotState.EMPTY, -1, "", b""


@dataclass
class Rank:
    """What the SMP knows of one local rank.

    ``waiting`` is a begin that cannot be granted yet; ``lent`` the slot that the rank may be
    writing to, also when its step was aborted meanwhile.
    """

    slots: list[Slot]
    lent: int | None = None
    connected: bool = False
    finished: bool = False
    waiting: Begin | None = None

    def dirty(self) -> Slot | None:
        """The slot in flight, if any."""
        flying = (SlotState.WRITING, SlotState.WRITTEN)
        return next((slot for slot in self.slots if slot.state in flying), None)

    def clean(self) -> dict[int, Slot]:
        """The CLEAN slots by step, oldest first."""
        found = [slot for slot in self.slots if slot.state is SlotState.CLEAN]
        return {slot.step: slot for slot in sorted(found, key=lambda slot: slot.step)}

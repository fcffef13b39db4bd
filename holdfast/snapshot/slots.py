"""The slots of a rank: pure records that ``protocol`` decides over."""

from dataclasses import dataclass
from enum import Enum

from holdfast.snapshot.messages import Begin, Sizes
from holdfast.snapshot.shipping import Intake


class SlotState(Enum):
    """Where a slot is in its life."""

    EMPTY = "empty"
    WRITING = "writing"
    WRITTEN = "written"
    SEALING = "sealing"
    CLEAN = "clean"
    RETIRED = "retired"


@dataclass
class Slot:
    """One buffer of one rank; ``generation`` counts its allocations, ``pins`` its readers.

    ``epoch`` is 0 on a node that is alone. ``owner`` is which rank of the run wrote it, on how many
    ``nodes``; ``claims`` and ``seen`` are as in ``messages.Written``. ``intake`` is what others
    add to its parities, where nodes hold different states. A ``doubtful`` SEALING one is waited for
    no more, and kept: another node may have seen it sealed.
    """

    state: SlotState = SlotState.EMPTY
    epoch: int = 0
    step: int = -1
    capacity: int = 0
    generation: int = 0
    digest: str = ""
    manifest: bytes = b""
    pins: int = 0
    owner: int = 0
    nodes: int = 1
    claims: tuple[str, ...] = ()
    seen: tuple[tuple[int, int, str], ...] = ()
    intake: Intake | None = None
    doubtful: bool = False

    @property
    def stamp(self) -> tuple[int, int]:
        """Epoch and step, by which slots are newer or older."""
        return self.epoch, self.step

    def retire(self) -> None:
        """No trainer is offered the content any more; those who read it keep it until the last."""
        if self.pins:
            self.state = SlotState.RETIRED
        else:
            self.clear()

    def unpin(self) -> None:
        """One reader less."""
        self.pins -= 1
        if not self.pins and self.state is SlotState.RETIRED:
            self.clear()

    def clear(self) -> None:
        """Forget the content, keep the memory."""
        self.state, self.step, self.digest, self.manifest = SlotState.EMPTY, -1, "", b""
        self.pins, self.claims, self.seen, self.intake = 0, (), (), None
        self.doubtful = False


@dataclass
class Rank:
    """What the SMP knows of one local rank.

    ``waiting`` is a begin that cannot be granted yet, ``asked`` the last one that was taken up;
    ``sizing`` asks for sizes that are not all known yet; ``lent`` is the slot that the rank may be
    writing to, also when its step was aborted meanwhile; up to ``passed`` it writes no step.
    """

    slots: list[Slot]
    lent: int | None = None
    connected: bool = False
    finished: bool = False
    waiting: Begin | None = None
    waiting_since_s: float = 0.0
    asked: Begin | None = None
    sizing: Sizes | None = None
    passed: int = -1
    copy_us: int = 0
    stall_us: int = 0

    def dirty(self) -> Slot | None:
        """The slot in flight, if any."""
        flying = (SlotState.WRITING, SlotState.WRITTEN)
        return next((slot for slot in self.slots if slot.state in flying), None)

    def clean(self) -> dict[int, Slot]:
        """The CLEAN slots by step, oldest first; of two epochs' the newer."""
        return {slot.step: slot for slot in self.held(SlotState.CLEAN)}

    def held(self, *states: SlotState) -> list[Slot]:
        """The slots in these states, oldest first."""
        found = [slot for slot in self.slots if slot.state in states]
        return sorted(found, key=lambda slot: slot.stamp)


def drop(ranks: list[Rank], step: int) -> None:
    """Take a clean step away from every rank."""
    for rank in ranks:
        rank.clean()[step].retire()

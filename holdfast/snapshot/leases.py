"""Who reads which clean step, decided without I/O: pins that keep memory from being written again.

A reader (the persister, or a command) holds at most one step of all local ranks. What it holds
stays as it is, also when newer steps retire it; it counts among the clean ones no more then, and
the protocol gives the trainers another slot meanwhile. A reader that dies gives its step back.

What is due to be persisted a node that is alone decides itself, several together (``disks``).
"""

from dataclasses import dataclass
from typing import Any

from holdfast.snapshot import disks
from holdfast.snapshot import messages as m
from holdfast.snapshot.disks import Agreement, Disk
from holdfast.snapshot.slots import Rank, Slot, SlotState


@dataclass
class _Reader:
    """One reader: what it holds (nothing: None; ``broken`` if that was taken back), waits for."""

    step: int | None = None
    slots: tuple[Slot, ...] = ()
    broken: bool = False
    due: m.Due | None = None


class Leases:
    """The readers of one node's slots, and what was persisted.

    Args:
        ranks: the slots of every local rank, shared with the protocol.
    """

    def __init__(self, ranks: list[Rank]) -> None:
        self.persisted: int | None = None
        self.failed: dict[str, Any] | None = None
        self._ranks = ranks
        self._readers: dict[int, _Reader] = {}
        self._wanted = -1
        self._disk: Disk | None = None
        self._alone = True
        self._needed = disks.ALONE

    @property
    def readers(self) -> int:
        """How many readers are connected."""
        return len(self._readers)

    def status(self) -> dict[str, Any]:
        """Steps held and persisted as JSON-ready values."""
        held = {reader.step for reader in self._readers.values() if reader.step is not None}
        return {
            "readers": self.readers,
            "leased": sorted(held),
            "persisted": self.persisted,
            "persist_failed": self.failed,
        }

    def join(self) -> None:
        """Decide together with other nodes from now on: what they have on disk is not known yet."""
        self._alone, self._needed = False, disks.UNKNOWN

    def back_to(self, step: int) -> None:
        """The ranks of this node go on from this step: what is newer on disk is void."""
        if self.persisted is not None and self.persisted > step:
            self.persisted = None

    def resume(self, epoch: int, step: int) -> None:
        """All go on from this step: what is newer is void, on its way to disk or there already."""
        self.back_to(step)
        self._wanted = -1
        if not self._alone:
            self._needed = disks.UNKNOWN
        for reader in self._readers.values():
            reader.broken |= any(slot.stamp > (epoch, step) for slot in reader.slots)

    def disk(self) -> Disk | None:
        """How the persister stands; None: it has not said yet."""
        waiting = any(reader.due is not None for reader in self._readers.values())
        return self._disk._replace(waiting=waiting) if self._disk is not None else None

    def want(self, newest: int | None) -> list[m.Instruction]:
        """Let ``newest`` be due, unless it was persisted already."""
        self._wanted = -1 if newest is None or newest == self.persisted else newest
        self.failed = None
        return self.committed(newest)

    def committed(
        self, newest: int | None, agreement: Agreement | None = None
    ) -> list[m.Instruction]:
        """Hand the newest clean step to every reader that waits for it and to which it is due."""
        if newest is None:
            return []
        if agreement is not None:
            # What was lent after all had spoken may be on all disks soon.
            lent = [each.step for each in self._readers.values() if each.step is not None]
            needed = agreement.needed
            self._needed = needed._replace(since=min([needed.since, *lent]))
        agreed = self._wanted >= 0 or (agreement is not None and agreement.due)
        out: list[m.Instruction] = []
        for holder, reader in self._readers.items():
            if reader.due is not None and (agreed or self._is_due(reader.due, newest)):
                reader.due, self._wanted = None, -1
                out += self._lend(holder, newest)
        return out

    def _is_due(self, due: m.Due, newest: int) -> bool:
        return self._alone and disks.is_due(newest, due.every, due.after)

    def lease(self, event: m.Lease) -> list[m.Instruction]:
        """Pin the newest clean step below ``before`` for the reader, or say that there is none."""
        self._give_back(event.holder)
        common = set.intersection(*(set(rank.clean()) for rank in self._ranks))
        step = max((step for step in common if step < event.before), default=None)
        if step is None:
            return [m.Answer(event.holder, "none")]
        return self._lend(event.holder, step)

    def pin(self, event: m.Pin) -> None:
        """Pin this very step for the reader, if it is held here; ``holds`` says whether it is."""
        self._give_back(event.holder)
        wanted = (event.epoch, event.step)
        found = [
            slot
            for rank in self._ranks
            for slot in rank.held(SlotState.CLEAN, SlotState.RETIRED)
            if slot.stamp == wanted
        ]
        if len(found) == len(self._ranks):
            self._pin(event.holder, event.step, found)

    def holds(self, holder: int) -> bool:
        """Whether the reader has a step pinned."""
        return self._reader(holder).step is not None

    def wait(self, event: m.Due, newest: int | None) -> list[m.Instruction]:
        """Let the reader wait until a step is due to be persisted."""
        self._give_back(event.holder)
        self._reader(event.holder).due = event
        self._disk = Disk(event.every, event.after, tuple(event.steps), waiting=True)
        # Whatever was said of a checkpoint that the run went back behind meanwhile.
        self.persisted = max(event.steps, default=None)
        return self.committed(newest)

    def release(self, event: m.Release, newest: int | None) -> list[m.Instruction]:
        """Take the reader's step back; ``intact`` says whether nothing was written over it."""
        intact = not self._reader(event.holder).broken
        self._give_back(event.holder)
        newest = -1 if newest is None else newest
        return [m.Answer(event.holder, "released", {"intact": intact, "newest": newest})]

    def record(self, event: m.Persisted) -> None:
        """Remember what became of a step that was to be persisted."""
        if event.error:
            self.failed = {"step": event.step, "error": event.error}
        else:
            self.persisted = event.step
            if self.failed is not None and self.failed["step"] <= event.step:
                self.failed = None

    def gone(self, holder: int) -> None:
        """Forget a reader whose connection ended."""
        self._give_back(holder)
        self._readers.pop(holder, None)

    def revoke_retired(self) -> None:
        """Take back every step that only readers still hold."""
        for reader in self._readers.values():
            if any(slot.state is SlotState.RETIRED for slot in reader.slots):
                self._unpin(reader)
                reader.broken = True

    def _reader(self, holder: int) -> _Reader:
        return self._readers.setdefault(holder, _Reader())

    def _give_back(self, holder: int) -> None:
        reader = self._reader(holder)
        self._unpin(reader)
        reader.step, reader.broken, reader.due = None, False, None

    def _unpin(self, reader: _Reader) -> None:
        for slot in reader.slots:
            slot.unpin()
        reader.slots = ()

    def _lend(self, holder: int, step: int) -> list[m.Instruction]:
        slots = [rank.clean()[step] for rank in self._ranks]
        self._pin(holder, step, slots)
        fields: dict[str, Any] = {"step": step, "epoch": slots[0].epoch}
        fields |= {"ranks": len(self._ranks), "needed": self._needed}
        out: list[m.Instruction] = [m.Answer(holder, "leased", fields)]
        for index, slot in enumerate(slots):
            number = self._ranks[index].slots.index(slot)
            part = {"rank": index, "digest": slot.digest}
            out.append(m.Answer(holder, "part", part, index, number, slot.manifest))
        return out

    def _pin(self, holder: int, step: int, slots: list[Slot]) -> None:
        reader = self._reader(holder)
        reader.step, reader.slots = step, tuple(slots)
        for slot in slots:
            slot.pins += 1

"""Readers of clean steps, decided without I/O: pins that keep memory from being overwritten.

A reader (the persister, or a command) holds at most one step of all local ranks. The step stays
unchanged, also after newer steps retire it; it no longer counts as a clean one then, and the
trainers get another slot meanwhile. When a reader dies its step is released.

A node that is alone decides itself when a step is due to be persisted; several nodes decide
together (``checkpoint_schedule``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.snapshot.protocol import checkpoint_schedule
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Agreement, Disk
from holdfast.snapshot.protocol.slots import NodeState, Rank, Slot, SlotState


@dataclass
class _Reader:
    """One reader: the step that it holds (``broken`` if that was revoked), or waits for.

    ``wanted`` is true if it has not said yet what became of a step that a user asked for.
    """

    step: int | None = None
    slots: tuple[Slot, ...] = ()
    broken: bool = False
    due: m.Due | None = None
    wanted: bool = False


class Leases:
    """The readers of one node's slots, and the results of the persister."""

    def __init__(self, node: NodeState) -> None:
        self.persisted: int | None = None
        self.failed: dict[str, Any] | None = None  # the step and the error
        self._node = node
        self._readers: dict[int, _Reader] = {}
        self._wanted = -1
        self._disk: Disk | None = None
        self._alone = True
        self._needed = checkpoint_schedule.ALONE

    @property
    def readers(self) -> int:
        """The number of readers that are connected."""
        return len(self._readers)

    def status(self) -> dict[str, object]:
        """Return the steps held and persisted as JSON-ready values."""
        held = {reader.step for reader in self._readers.values() if reader.step is not None}
        return {
            "readers": self.readers,
            "leased": sorted(held),
            "persisted": self.persisted,
            "persist_failed": self.failed,
        }

    def join(self) -> None:
        """Decide together with other nodes from now on, whose steps on disk are unknown yet."""
        self._alone, self._needed = False, checkpoint_schedule.UNKNOWN

    def forget_disk(self) -> None:
        """Forget what is on disk until another persister says it."""
        self.persisted = self.failed = self._disk = None

    def back_to(self, step: int) -> None:
        """Forget a checkpoint newer than ``step``, from which the ranks of this node continue."""
        if self.persisted is not None and self.persisted > step:
            self.persisted = None

    def resume(self, event: m.Resume) -> None:
        """Continue from a step, as all nodes do: newer ones are void, in memory and on disk."""
        self.back_to(event.step)
        self._wanted = -1
        if not self._alone:
            self._needed = checkpoint_schedule.UNKNOWN
        for reader in self._readers.values():
            newer = (slot.stamp > (event.epoch, event.step) for slot in reader.slots)
            reader.broken |= any(newer)

    def disk(self) -> Disk | None:
        """Return the state of the persister; None if it has not connected yet."""
        waiting = any(reader.due is not None for reader in self._readers.values())
        return self._disk._replace(waiting=waiting) if self._disk is not None else None

    def want(self, _: object = None) -> None:
        """Make the newest step due, unless it was persisted already."""
        newest = self._node.newest()
        self._wanted = -1 if newest is None or newest == self.persisted else newest
        self.failed = None
        self.committed(newest)

    def committed(self, newest: int | None, agreement: Agreement | None = None) -> None:
        """Lend the newest clean step to every reader that waits for it, if it is due."""
        if newest is None:
            return
        if agreement is not None:
            # A step that was lent after these statements may soon be on all disks.
            lent = [each.step for each in self._readers.values() if each.step is not None]
            needed = agreement.needed
            self._needed = needed._replace(since=min([needed.since, *lent]))
        agreed = self._wanted >= 0 or (agreement is not None and agreement.due)
        for holder, reader in self._readers.items():
            if (due := reader.due) is None:
                continue
            alone = self._alone and checkpoint_schedule.is_due(newest, due.every, due.after)
            if agreed or alone:
                reader.wanted = self._wanted >= 0
                reader.due, self._wanted = None, -1
                self._lend(holder, newest)

    def lease(self, event: m.Lease) -> None:
        """Lend the reader the newest clean step below ``before``, or answer that there is none."""
        self._give_back(event.holder)
        steps = self._node.readable_steps()
        step = max((step for step in steps if step < event.before), default=None)
        if step is None:
            self._node.out.append(m.Answer(event.holder, "none"))
        else:
            self._lend(event.holder, step)

    def copied(self, event: m.Copied) -> None:
        """Show the reader the memory of a step, of the ranks that copy it or have done so.

        It may change at any time: the reader compares it with a digest of its own.
        """
        self._give_back(event.holder)
        states = SlotState.WRITING, SlotState.WRITTEN, SlotState.CLEAN
        held = [
            (*each, slot) for each in enumerate(self._node.ranks) for slot in each[1].held(*states)
        ]
        self._show(event.holder, event.step, [each for each in held if each[2].step == event.step])

    def pin(self, event: m.Pin) -> None:
        """Pin this very step for the reader, if it is held here; ``holds`` returns true then."""
        self._give_back(event.holder)
        held = self._node.held(SlotState.CLEAN, SlotState.RETIRED)
        found = [slot for slot in held if slot.stamp == (event.epoch, event.step)]
        if len(found) in (len(self._node.ranks), len(self._node.former)) and found:
            self._pin(event.holder, event.step, found)

    def holds(self, holder: int) -> bool:
        """Return true if the reader has a step pinned."""
        return self._reader(holder).step is not None

    def wait(self, event: m.Due) -> None:
        """Let the reader wait until a step is due to be persisted."""
        self._give_back(event.holder)
        self._reader(event.holder).due = event
        self._disk = Disk(event.every, event.after, tuple(event.steps), waiting=True)
        # The disk is right, even if a persisted step was reported that the run has rolled back.
        self.persisted = max(event.steps, default=None)
        self.committed(self._node.newest())

    def release(self, event: m.Release) -> None:
        """Release the reader's step; answer whether it stayed unchanged (``intact``)."""
        intact, newest = not self._reader(event.holder).broken, self._node.newest()
        self._give_back(event.holder)
        fields = {"intact": intact, "newest": -1 if newest is None else newest}
        self._node.out.append(m.Answer(event.holder, "released", fields))

    def record(self, event: m.Persisted) -> None:
        """Record the result of writing a step to disk."""
        self._reader(event.holder).wanted = False
        if event.error:
            self.failed = {"step": event.step, "error": event.error}
        else:
            self.persisted = event.step
            if self.failed is not None and self.failed["step"] <= event.step:
                self.failed = None

    def gone(self, holder: int) -> None:
        """Forget a reader whose connection ended."""
        self._give_back(holder)
        if self._readers.pop(holder).wanted:
            self.want()  # the next persister does what this one was asked for

    def revoke_retired(self) -> None:
        """Revoke every step that only readers still hold."""
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

    def _lend(self, holder: int, step: int) -> None:
        held = [(place, rank, rank.clean()[step]) for place, rank in self._node.readable()]
        self._pin(holder, step, [slot for _, _, slot in held])
        self._show(holder, step, held)

    def _show(self, holder: int, step: int, held: Sequence[tuple[int, Rank, Slot]]) -> None:
        epoch = max((slot.epoch for _, _, slot in held), default=0)
        fields = {"step": step, "epoch": epoch, "ranks": len(held), "needed": self._needed}
        self._node.out.append(m.Answer(holder, "leased", fields))
        for place, rank, slot in held:
            part = {"rank": max(place, -1 - place), "digest": slot.digest}
            about = part, place, rank.slots.index(slot)
            self._node.out.append(m.Answer(holder, "part", *about, slot.manifest))

    def _pin(self, holder: int, step: int, slots: list[Slot]) -> None:
        reader = self._reader(holder)
        reader.step, reader.slots = step, tuple(slots)
        for slot in slots:
            slot.pins += 1

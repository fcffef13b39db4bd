"""Steps between "written here" and "held by every node": the slots' side of ``cluster``, no I/O.

On a node that is alone there is nothing to wait for, and none of this happens.
"""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from holdfast.snapshot import disks
from holdfast.snapshot import messages as m
from holdfast.snapshot.cluster import Cluster, Own, Roster, Stamp
from holdfast.snapshot.disks import Agreement, Disk
from holdfast.snapshot.slots import Rank, Slot, SlotState

# What is still due of a step, and comes before training would notice that it is waited for.
SOON_BYTES = 64 * 2**20


class Verdict(Enum):
    """What became of a step that other nodes are waited for with."""

    WAITING = "waiting"
    SEALED = "sealed"
    VOID = "void"
    DOUBTFUL = "doubtful"
    DIVERGED = "diverged"


class Sealing:
    """The steps of one node that are not safe yet, and who is waited for.

    Args:
        ranks: the slots of every local rank, shared with the protocol.
    """

    def __init__(self, ranks: list[Rank]) -> None:
        self.cluster: Cluster | None = None
        self.resumed = False
        self._ranks = ranks

    @property
    def epoch(self) -> int:
        """The present epoch; 0 on a node that is alone."""
        return self.cluster.roster.epoch if self.cluster else 0

    def join(self, roster: Roster) -> list[m.Instruction]:
        """Take part in a newer epoch; what the other local ranks say of it is known already."""
        if roster.epoch <= self.epoch:
            return []
        if self.cluster is None:
            self.cluster = Cluster(roster)
        else:
            self._keep_only_announced(self.cluster)
            self.cluster.join(roster)
        self.resumed = False
        return [m.Connect(roster)]

    def _keep_only_announced(self, cluster: Cluster) -> None:
        # Nobody will send now what is missing of the others.
        for slot in self._slots(SlotState.SEALING):
            if not cluster.announced(Stamp(*slot.stamp)):
                slot.clear()

    def place(self, index: int, slot: Slot) -> None:
        """Note whose slot this is, in which epoch."""
        slot.epoch = self.epoch
        if self.cluster is not None:
            roster = self.cluster.roster
            slot.owner, slot.nodes = roster.first_rank + index, len(roster.addresses)

    def written(self, step: int) -> list[m.Instruction]:
        """All local ranks have written ``step``: from now on it is waited for."""
        assert self.cluster is not None
        own = []
        for rank in self._ranks:
            slot = rank.dirty()
            assert slot is not None
            slot.state = SlotState.SEALING
            shipments = slot.intake.cargo.shipments if slot.intake else ()
            own.append(Own(slot.digest, slot.manifest, slot.claims, slot.seen, shipments))
        return self.cluster.written(step, own)

    def pending(self) -> list[int]:
        """The steps that are waited for, oldest first."""
        found = self._ranks[0].held(SlotState.SEALING)
        return [slot.step for slot in found if slot.epoch == self.epoch and not slot.doubtful]

    def in_doubt(self) -> bool:
        """Whether memory is held by steps that another node may have seen sealed."""
        return any(slot.doubtful for slot in self._slots(SlotState.SEALING))

    def passed(self, step: int) -> list[m.Instruction]:
        """This node will write no step up to ``step`` that it has not written: all are told."""
        return self.cluster.pass_over(step) if self.cluster else []

    def replaced(self, node: int) -> None:
        """Another SMP speaks for a node: what the former one did not write is not to come."""
        if self.cluster is not None:
            self.cluster.replaced(node)

    def look(self, step: int, disk: Disk | None) -> tuple[list[m.Instruction], Verdict]:
        """What is to be said of a step that is waited for (and of the disk), what became of it."""
        assert self.cluster is not None
        if self.cluster.is_void(step):
            return [], Verdict.VOID
        out = self.cluster.announce(step, disk) if self._complete(step) else []
        if self.cluster.is_sealed(step):
            return out, Verdict.DIVERGED if self.diverged(step) else Verdict.SEALED
        return out, Verdict.DOUBTFUL if self.cluster.passed_over(step) else Verdict.WAITING

    def diverged(self, step: int) -> list[list[int]]:
        """The blocks of a step that replicas do not have the same bits of, as ``Cluster``."""
        return [list(found) for found in self.cluster.diverged(step)] if self.cluster else []

    def _complete(self, step: int) -> bool:
        waiting = self._slots(SlotState.SEALING)
        intakes = [slot.intake for slot in waiting if slot.stamp == (self.epoch, step)]
        return all(intake is None or intake.complete for intake in intakes)

    def shipping(self) -> bool:
        """Whether all have written the oldest step waited for, and much of it is on its way yet."""
        assert self.cluster is not None
        oldest = self.pending()[0]
        slots = (s for s in self._slots(SlotState.SEALING) if s.stamp == (self.epoch, oldest))
        due_nbytes = sum(slot.intake.due_nbytes for slot in slots if slot.intake)
        return due_nbytes > SOON_BYTES and self.cluster.all_wrote(oldest)

    def sized(self, event: m.Sizes) -> list[m.Instruction]:
        """A local rank says how large its state is, and asks how large others are."""
        self._ranks[event.rank].sizing = event
        if self.cluster is None:
            return self.withdraw(event.rank)
        rank = self.cluster.roster.first_rank + event.rank
        return self.cluster.sized(rank, event) + self._told_sizes(self.cluster)

    def peer_sized(self, event: m.PeerSize) -> list[m.Instruction]:
        """A rank of another node says how large its state is."""
        assert self.cluster is not None
        self.cluster.size(event)
        return self._told_sizes(self.cluster)

    def _told_sizes(self, cluster: Cluster) -> list[m.Instruction]:
        out: list[m.Instruction] = []
        for index, rank in enumerate(self._ranks):
            asked = rank.sizing
            sizes = cluster.sizes.of(asked.step, asked.ranks) if asked else None
            if asked and sizes is not None:
                rank.sizing = None
                out.append(m.Reply(index, "sizes", {"step": asked.step, "sizes": sizes}))
        return out

    def withdraw(self, index: int) -> list[m.Instruction]:
        """A local rank waits for sizes no more; if they were told already it has its answer."""
        asked, self._ranks[index].sizing = self._ranks[index].sizing, None
        if asked is None:
            return []
        reason = "ranks of other nodes have not begun this step"
        return [m.Reply(index, "skipped", {"step": asked.step, "reason": reason})]

    def chunk(self, event: m.PeerChunk) -> list[m.Instruction]:
        """Add a chunk of another node's rank to a parity here, unless it was, or is for nothing.

        Raises:
            ProtocolViolation: it is none of those that are due.
        """
        found = self.find(event.keeper, event.epoch, event.step)
        if found is None or found[2].state is not SlotState.SEALING or event.epoch != self.epoch:
            return []
        index, number, slot = found
        if not slot.intake or not slot.intake.take(event.rank, event.start, len(event.blob)):
            return []
        return [m.Accumulate(index, number, event.start, event.coefficient, event.blob)]

    def work(self, nodes: Iterable[int]) -> list[m.Instruction]:
        """A little of what is left to do: a chunk for each of these nodes, a bucket to digest."""
        if self.cluster is None:
            return []
        chunks = [out for node in nodes for out in self._ship(self.cluster, node)]
        return chunks + self._digest()

    def _ship(self, cluster: Cluster, node: int) -> list[m.Instruction]:
        chunk = cluster.next_chunk(node)
        if chunk is None:
            return []
        step, (rank, piece) = chunk
        found = self.find(rank, self.epoch, step)
        if found is None:
            cluster.undeliverable(step)
            return []
        where = {"keeper": piece.keeper, "start": piece.there, "coefficient": piece.coefficient}
        fields = {"rank": rank, "epoch": self.epoch, "step": step, **where}
        return [m.Ship(node, found[0], found[1], piece.start, piece.nbytes, fields)]

    def _digest(self) -> list[m.Instruction]:
        for index, rank in enumerate(self._ranks):
            for number, slot in enumerate(rank.slots):
                if slot.state is not SlotState.SEALING or slot.intake is None:
                    continue
                if bucket := slot.intake.undigested():
                    return [m.Digest(index, number, *bucket)]
        return []

    def agreement(self, step: int) -> Agreement | None:
        """What the nodes agree upon for their disks, with a sealed step; None: nothing."""
        return disks.agreed(step, self.cluster.disks(step)) if self.cluster else None

    def seal(self, step: int) -> None:
        """A step is safe: older ones are waited for no more."""
        if self.cluster is None:
            return
        for slot in self._slots(SlotState.SEALING):
            if slot.stamp < (self.epoch, step):
                slot.clear()
        self.cluster.seal(step)

    def retired(self) -> None:
        """Clean steps were given up: their mirrors go, too."""
        if self.cluster is not None:
            held = self._slots(SlotState.CLEAN, SlotState.SEALING, SlotState.RETIRED)
            self.cluster.forget(Stamp(*min((slot.stamp for slot in held), default=(0, -1))))

    def resume(self, event: m.Resume) -> None:
        """All nodes go on from this step, which is safe then; what is newer is void."""
        self.resumed = True
        for slot in self._slots(SlotState.CLEAN, SlotState.SEALING):
            if slot.stamp > (event.epoch, event.step):
                slot.retire()
            elif slot.state is SlotState.SEALING:
                slot.state = SlotState.CLEAN

    def status(self) -> dict[str, Any] | None:
        """As ``Cluster.status``, and the bytes of parities that others make up, and those due."""
        if self.cluster is None:
            return None
        slots = self._slots(SlotState.SEALING, SlotState.CLEAN, SlotState.RETIRED)
        intakes = [slot.intake for slot in slots if slot.intake is not None]
        areas = [area for intake in intakes for area in intake.cargo.areas]
        return self.cluster.status() | {
            "shipped_parity_bytes": sum(area.nbytes for area in areas),
            "due_bytes": sum(intake.due_nbytes for intake in intakes),
        }

    def inventory(self) -> dict[str, Any]:
        """What this node could give to a restore, as JSON-ready values: its slots and mirrors."""
        slots = [
            {"rank": slot.owner, "nodes": slot.nodes, **self._named(slot), "digest": slot.digest}
            for slot in self._slots(SlotState.CLEAN, SlotState.SEALING)
            if slot.state is SlotState.CLEAN or self._announced(slot)
        ]
        mirrors = self.cluster.mirrors() if self.cluster else {}
        kept = [
            {"rank": rank, **stamp._asdict(), "digest": digest}
            for stamp, by_rank in mirrors.items()
            for rank, digest in by_rank.items()
        ]
        return {"epoch": self.epoch, "slots": slots, "mirrors": kept}

    def find(self, rank: int, epoch: int, step: int) -> tuple[int, int, Slot] | None:
        """The local rank, the number of its slot and the slot with a step of a rank of the run."""
        readable = (SlotState.CLEAN, SlotState.SEALING, SlotState.RETIRED)
        for index, local in enumerate(self._ranks):
            for number, slot in enumerate(local.slots):
                if slot.state in readable and (slot.owner, slot.stamp) == (rank, (epoch, step)):
                    return index, number, slot
        return None

    def _announced(self, slot: Slot) -> bool:
        # Of an older epoch only what had been announced was kept.
        stale = slot.epoch < self.epoch
        return stale or (self.cluster is not None and self.cluster.announced(Stamp(*slot.stamp)))

    def _named(self, slot: Slot) -> dict[str, int]:
        return {"epoch": slot.epoch, "step": slot.step}

    def _slots(self, *states: SlotState) -> Iterator[Slot]:
        for rank in self._ranks:
            yield from rank.held(*states)

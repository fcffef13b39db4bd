"""The slots of a node's local ranks, which all parts of the state machine read and change."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.cluster_steps import BlockDigests
from holdfast.snapshot.protocol.parity_stream import ParityReceiver


class SlotState(Enum):
    """The state of a slot; ``state_machine`` shows the transitions."""

    EMPTY = "empty"
    WRITING = "writing"
    WRITTEN = "written"
    SEALING = "sealing"
    CLEAN = "clean"
    RETIRED = "retired"


READABLE = (SlotState.CLEAN, SlotState.SEALING, SlotState.RETIRED)


@dataclass
class Slot:
    """One of the snapshot buffers of a local rank.

    Attributes:
        epoch: the epoch of its step; 0 on a node that is alone.
        generation: the number of allocations of its memory so far.
        pins: the number of its readers.
        owner: the rank of the run that wrote it, in a run of ``nodes`` nodes and ``ranks`` ranks.
        sets: the stripe sets of the owner's sharding group.
        blocks: the digests that its rank announces with the step.
        receiver: the blocks that other nodes add to its parities, if the nodes hold different
            states.
        doubtful: true for a SEALING slot that no longer waits for other nodes, and is kept because
            another node may have seen its step sealed.
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
    ranks: int = 1
    sets: tuple[tuple[int, ...], ...] = ()
    blocks: BlockDigests = field(default_factory=BlockDigests)
    receiver: ParityReceiver | None = None
    doubtful: bool = False

    @property
    def stamp(self) -> tuple[int, int]:
        """Epoch and step, which say whether a slot is newer or older than another."""
        return self.epoch, self.step

    def retire(self) -> None:
        """Withdraw the content from trainers; keep it until its last reader leaves."""
        if self.pins:
            self.state = SlotState.RETIRED
        else:
            self.clear()

    def unpin(self) -> None:
        """Reduce the number of readers by one."""
        self.pins -= 1
        if not self.pins and self.state is SlotState.RETIRED:
            self.clear()

    def clear(self) -> None:
        """Forget the content but keep the memory."""
        self.state, self.step, self.digest, self.manifest = SlotState.EMPTY, -1, "", b""
        self.pins, self.blocks, self.receiver, self.doubtful = 0, BlockDigests(), None, False


@dataclass
class Rank:
    """One local rank.

    Attributes:
        lent: the slot that the rank may be writing to, also if its step was aborted meanwhile.
        waiting: a request to begin a step that cannot be granted yet.
        asked: the request to begin a step that was handled last.
        sizing: a request for sizes that are not all known yet.
        skipped: the newest step that the rank skipped; up to it the rank writes none that it has
            not written.
    """

    slots: list[Slot]
    lent: int | None = None
    connected: bool = False
    finished: bool = False
    waiting: m.Begin | None = None
    waiting_since_s: float = 0.0
    asked: m.Begin | None = None
    sizing: m.Sizes | None = None
    skipped: int = -1
    copy_us: int = 0
    stall_us: int = 0

    def dirty(self) -> Slot | None:
        """Return the slot in flight, if any."""
        flying = (SlotState.WRITING, SlotState.WRITTEN)
        return next((slot for slot in self.slots if slot.state in flying), None)

    def in_use(self) -> int:
        """Return the number of slots that count towards the ``keep + 1`` that a rank owns."""
        idle = (SlotState.EMPTY, SlotState.RETIRED)
        return sum(slot.state not in idle and not slot.doubtful for slot in self.slots)

    def clean(self) -> dict[int, Slot]:
        """Return the CLEAN slots by step, oldest first; of two epochs the newer one counts."""
        return {slot.step: slot for slot in self.held(SlotState.CLEAN)}

    def held(self, *states: SlotState) -> list[Slot]:
        """Return the slots in these states, oldest first."""
        found = [slot for slot in self.slots if slot.state in states]
        if len(found) > 1:
            found.sort(key=lambda slot: slot.stamp)
        return found


class NodeState:
    """The slots of all local ranks of a node, and the instructions for the present event.

    All parts of the state machine share one; they change the slots and add instructions.

    Args:
        world_size: the number of ranks on this node.
        keep: the number of clean snapshots kept for each rank.
        now_s: the current time.
    """

    def __init__(self, world_size: int, keep: int, now_s: float) -> None:
        self.ranks = [Rank([Slot() for _ in range(keep + 1)]) for _ in range(world_size)]
        self.former: list[Rank] = []
        self.keep, self.now_s = keep, now_s
        self.epoch = self.commits = self.aborts = 0
        self.committed_s = now_s
        self.out: list[m.Instruction] = []

    def resize(self, world_size: int) -> None:
        """Begin with another number of local ranks; what those before hold can still be read.

        The former local rank r is number -1 - r from now on, until the new ranks have committed.
        """
        held = [slot for rank in self.ranks for slot in rank.held(SlotState.SEALING)]
        if self.newest() is not None or (held and not self.former):
            self.former = list(self.ranks)
            self.out.append(m.SetAside())
        else:
            for index, rank in enumerate(self.ranks):
                self.out += [m.Free(index, number) for number in range(len(rank.slots))]
        self.ranks[:] = [Rank([Slot() for _ in range(self.keep + 1)]) for _ in range(world_size)]

    def forget_former(self) -> None:
        """Free what ranks of a former number hold, as the present ones have committed a step."""
        for index, rank in enumerate(self.former):
            self.out += [m.Free(-1 - index, number) for number in range(len(rank.slots))]
        self.former = []

    def readable(self) -> list[tuple[int, Rank]]:
        """Return the ranks whose steps can be read, by number: former ones as long as there are."""
        former = [(-1 - index, rank) for index, rank in enumerate(self.former)]
        return former or list(enumerate(self.ranks))

    def reply(self, rank: int, verb: str, **fields: object) -> None:
        """Answer a rank."""
        self.out.append(m.Reply(rank, verb, fields))

    def tell(
        self, nodes: Iterable[int], verb: str, step: int, blob: bytes = b"", /, **fields: object
    ) -> None:
        """Send a message about a step of the present epoch to the SMPs of other nodes."""
        stated = {"epoch": self.epoch, "step": step, **fields}
        self.out += [m.ToPeer(node, verb, stated, blob) for node in sorted(nodes)]

    def held(self, *states: SlotState) -> Iterator[Slot]:
        """Yield the slots of all ranks in these states."""
        for rank in (*self.ranks, *self.former):
            yield from rank.held(*states)

    def newest(self) -> int | None:
        """Return the newest step that is CLEAN on every rank."""
        return max(self.common(), default=None)

    def common(self) -> set[int]:
        """Return the steps that are CLEAN on every rank."""
        return _common(self.ranks)

    def readable_steps(self) -> set[int]:
        """Return the steps that are CLEAN on every rank that can be read."""
        return _common([rank for _, rank in self.readable()])

    def in_flight(self) -> int | None:
        """Return the step that is being written, if any."""
        return max((slot.step for rank in self.ranks if (slot := rank.dirty())), default=None)

    def drop(self, step: int) -> None:
        """Retire a clean step of every rank."""
        for rank in self.ranks:
            rank.clean()[step].retire()

    def find(self, rank: int, epoch: int, step: int) -> tuple[int, int, Slot] | None:
        """Return the local rank, slot number and slot that hold a step of a rank of the run."""
        former = [(-1 - index, local) for index, local in enumerate(self.former)]
        for index, local in (*enumerate(self.ranks), *former):
            for number, slot in enumerate(local.slots):
                wanted = slot.step == step and slot.owner == rank and slot.epoch == epoch
                if wanted and slot.state in READABLE:
                    return index, number, slot
        return None


def _common(ranks: Iterable[Rank]) -> set[int]:
    return set.intersection(*(set(rank.clean()) for rank in ranks))

"""Steps that are written here and not yet held by every node: the slots' side of ``cluster``.

On a node that is alone there is nothing to wait for, and none of this happens.
"""

from collections.abc import Iterator
from typing import Literal

from holdfast.snapshot.protocol import checkpoint_schedule
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk
from holdfast.snapshot.protocol.cluster import Cluster
from holdfast.snapshot.protocol.cluster_steps import Own
from holdfast.snapshot.protocol.roster import HeldSlot, HeldStep, NodeInventory, Roster, Stamp
from holdfast.snapshot.protocol.slots import READABLE, NodeState, Slot, SlotState

# Parity bytes that arrive before training would notice that a step waits for them.
SOON_BYTES = 64 * 2**20


# Of a step that is written here and waits for other nodes.
Fate = Literal["waiting", "committed", "void", "doubtful", "diverged"]


class ClusterCommit:
    """The steps of one node that are not safe yet, and the nodes that they wait for."""

    def __init__(self, node: NodeState) -> None:
        self.cluster: Cluster | None = None
        self.resumed = False
        self._node = node

    @property
    def joined(self) -> Cluster:
        """The cluster, on a node that is not alone."""
        assert self.cluster is not None
        return self.cluster

    @property
    def epoch(self) -> int:
        """The present epoch; 0 on a node that is alone."""
        return self._node.epoch

    def join(self, roster: Roster, again: bool = False) -> None:
        """Take part in a newer epoch, unless another local rank has done so already."""
        if roster.epoch <= self.epoch:
            return
        for slot in self._node.held(SlotState.SEALING):
            # What this step still lacks from other nodes will not be sent in a new epoch.
            if not self._has_announced(slot):
                slot.clear()
        self._node.epoch = roster.epoch
        self.cluster = Cluster(roster, self._node, self.cluster, again)
        self.resumed = False
        self._node.out.append(m.Connect(roster))

    def place(self, index: int, slot: Slot) -> None:
        """Record in a slot the rank of the run that owns it, and the present epoch."""
        slot.epoch = self.epoch
        if self.cluster is not None:
            roster = self.cluster.roster
            slot.owner, slot.nodes = roster.first_rank + index, roster.run_nodes
            slot.ranks, slot.sets = slot.nodes * len(roster.mirror_nodes), roster.sets[index]

    def written(self, step: int) -> None:
        """Wait from now on for other nodes to hold ``step``, which all local ranks have written."""
        own = []
        for slot in self._node.held(SlotState.WRITTEN):
            slot.state = SlotState.SEALING
            transfers = slot.receiver.plan.transfers if slot.receiver else ()
            own.append(Own(slot.digest, slot.manifest, slot.blocks, transfers))
        self.joined.written(step, own)

    def pending(self) -> list[int]:
        """Return the steps that wait for other nodes, oldest first."""
        found, epoch = self._node.ranks[0].held(SlotState.SEALING), self.epoch
        return [slot.step for slot in found if slot.epoch == epoch and not slot.doubtful]

    def look(self, step: int, disk: Disk | None) -> Fate:
        """Announce a pending step if this node holds all of it, and return the step's fate.

        The state of this node's ``disk`` is announced with it. A void step is not announced.
        """
        steps, tree = self.joined.steps, self.joined.tree
        dead, held = tree.is_dead(step), steps.is_held_here(step)
        if dead and (not held or tree.is_void(step)):
            return "void"
        # The tree needs the announcements in the order of steps.
        older = () if held else (old for old in self.pending() if old < step)
        if not held and (tree.alone or all(map(steps.is_held_here, older))):
            receivers = [slot.receiver for slot in self.slots_of(step)]
            if all(receiver is None or receiver.complete for receiver in receivers):
                self.joined.announce(step, disk)
        if steps.is_sealed(step) and not tree.has_sealed(step):
            if steps.diverged(step):
                return "diverged"
            told = [held.disk for held in steps.announced[step].values()]
            tree.sealed(step, checkpoint_schedule.combined(told))
        # An SMP that replaced another one may hear of commits of what it does not hold.
        if tree.committed == step and steps.is_held_here(step):
            return "committed"
        return "doubtful" if dead and tree.is_dead(step) else "waiting"

    def slots_of(self, step: int) -> Iterator[Slot]:
        """Yield the slots that hold a pending step of this epoch."""
        stamp = self.epoch, step
        return (slot for slot in self._node.held(SlotState.SEALING) if slot.stamp == stamp)

    def hindrance(self) -> str:
        """Return why the oldest step will take so long that another is skipped, or ``""``."""
        if away := self.joined.away():
            return f"nodes {list(away)} cannot be reached"
        oldest = self.pending()[0]
        due = (slot.receiver.due_nbytes for slot in self.slots_of(oldest) if slot.receiver)
        if sum(due) > SOON_BYTES and self.joined.steps.all_wrote(oldest):
            return f"the parities of step {oldest} are on their way"
        return ""

    def commit(self, step: int) -> None:
        """Note that a step is safe, and stop waiting for older ones."""
        if self.cluster is None:
            return
        for slot in self._node.held(SlotState.SEALING):
            if slot.stamp < (self.epoch, step):
                slot.clear()
        self.cluster.commit(step)

    def retired(self) -> None:
        """Drop the mirrors of clean steps that were given up."""
        if self.cluster is not None:
            oldest = min((slot.stamp for slot in self._node.held(*READABLE)), default=(0, -1))
            self.cluster.forget_mirrors_before(Stamp(*oldest))

    def resume(self, event: m.Resume) -> None:
        """Continue from this step, as all nodes do: it is safe then, and newer ones are void."""
        self.resumed = True
        for slot in self._node.held(SlotState.CLEAN, SlotState.SEALING):
            if slot.stamp > (event.epoch, event.step):
                slot.retire()
            elif slot.state is SlotState.SEALING:
                slot.state = SlotState.CLEAN
        for rank in self._node.ranks:
            for older in rank.held(SlotState.CLEAN)[: -self._node.keep]:
                older.retire()

    def sized(self, event: m.Sizes) -> None:
        """Tell other nodes the size of a local rank's state, and answer with theirs once known."""
        self._node.ranks[event.rank].sizing = event
        if self.cluster is None and event.digest:
            self._tell_digests(event.step)
        elif self.cluster is None:
            self.withdraw(event.rank)
        else:
            rank = self.cluster.roster.first_rank + event.rank
            self.cluster.sized(rank, event)
            self._tell_sizes(self.cluster)

    def peer_sized(self, event: m.PeerSize) -> None:
        """Note the size of the state of another node's rank, and answer ranks that wait for it."""
        if event.epoch == self.epoch:
            self.joined.sizes.know(event.step, event.rank, event.nbytes)
        self._tell_sizes(self.joined)

    def withdraw(self, index: int) -> None:
        """Tell a local rank to skip its step, unless it has received the sizes already."""
        asked, self._node.ranks[index].sizing = self._node.ranks[index].sizing, None
        if asked is not None:
            reason = "ranks of other nodes have not begun this step"
            self._node.reply(index, "skipped", step=asked.step, reason=reason)

    def _tell_sizes(self, cluster: Cluster) -> None:
        for index, rank in enumerate(self._node.ranks):
            asked = rank.sizing
            sizes = cluster.sizes.of(asked.step, asked.ranks) if asked else None
            if asked and sizes is not None:
                rank.sizing = None
                self._node.reply(index, "sizes", step=asked.step, sizes=sizes)

    def _tell_digests(self, step: int) -> None:
        """Answer the local ranks, on a node that is alone, once all have asked at one step."""
        asked = [rank.sizing for rank in self._node.ranks]
        digests = [each.digest for each in asked if each is not None and each.step == step]
        if len(digests) == len(asked):
            for index, rank in enumerate(self._node.ranks):
                rank.sizing = None
                self._node.reply(index, "sizes", step=step, sizes=[], digests=digests)

    def chunk(self, event: m.PeerChunk) -> None:
        """Add a chunk of another node's rank to a parity here, unless it is not needed any more."""
        found = self._node.find(event.keeper, event.epoch, event.step)
        if found is None or found[2].state is not SlotState.SEALING or event.epoch != self.epoch:
            return
        index, number, slot = found
        if slot.receiver and slot.receiver.take(event.rank, event.start, len(event.blob)):
            what = event.start, event.coefficient, event.blob
            self._node.out.append(m.Accumulate(index, number, *what))

    def work(self, event: m.Spare) -> None:
        """Send one chunk to each of these nodes, and compute the digest of one bucket."""
        if self.cluster is not None:
            for node in event.nodes:
                self._send_chunk(self.cluster, node)
            self._digest()

    def _send_chunk(self, cluster: Cluster, node: int) -> None:
        if (chunk := cluster.sender.next(node)) is None:
            return
        step, (rank, piece) = chunk
        if (found := self._node.find(rank, self.epoch, step)) is None:
            cluster.sender.drop(range(step, step + 1))  # it was given up
            self._send_chunk(cluster, node)
            return
        where = {"keeper": piece.keeper, "start": piece.there, "coefficient": piece.coefficient}
        fields = {"rank": rank, "epoch": self.epoch, "step": step, **where}
        self._node.out.append(m.Ship(node, *found[:2], piece.start, piece.nbytes, fields))

    def _digest(self) -> None:
        for index, rank in enumerate(self._node.ranks):
            for number, slot in enumerate(rank.slots):
                waiting = slot.state is SlotState.SEALING and slot.receiver
                if waiting and (bucket := waiting.undigested()):
                    self._node.out.append(m.Digest(index, number, *bucket))
                    return

    def status(self) -> dict[str, object] | None:
        """Return ``Cluster.status`` with the bytes of parities kept here and of those still due."""
        if self.cluster is None:
            return None
        receivers = [slot.receiver for slot in self._node.held(*READABLE) if slot.receiver]
        parities = [parity for receiver in receivers for parity in receiver.plan.ranges]
        return self.cluster.status() | {
            "shipped_parity_bytes": sum(parity.nbytes for parity in parities),
            "due_bytes": sum(receiver.due_nbytes for receiver in receivers),
        }

    def inventory(self) -> NodeInventory:
        """List the slots and mirrors that this node can provide to a restore."""
        slots: list[HeldSlot] = [
            {
                "rank": slot.owner,
                "nodes": slot.nodes,
                "ranks": slot.ranks,
                "sets": slot.sets,
                "epoch": slot.epoch,
                "step": slot.step,
                "digest": slot.digest,
                "committed": slot.state is SlotState.CLEAN,
            }
            for slot in self._node.held(SlotState.CLEAN, SlotState.SEALING)
            if slot.state is SlotState.CLEAN or self._has_announced(slot)
        ]
        known = self.cluster.mirrors if self.cluster else {}
        mirrors: list[HeldStep] = [
            {"rank": rank, "epoch": stamp.epoch, "step": stamp.step, "digest": digest}
            for (rank, stamp), (digest, _) in known.items()
        ]
        return {"epoch": self.epoch, "slots": slots, "mirrors": mirrors}

    def _has_announced(self, slot: Slot) -> bool:
        # Steps of an older epoch were kept only if they had been announced.
        stale = slot.epoch < self.epoch
        return stale or (self.cluster is not None and self.cluster.has_announced(slot.stamp))

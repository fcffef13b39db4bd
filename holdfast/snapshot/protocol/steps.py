"""Steps on their way from ``begin`` to committed, decided without I/O.

At most one step is in flight on a node, and it becomes CLEAN on all ranks at the same moment or on
none. No rank waits for a step that another rank skipped, here or on another node: a rank that has
written it is told that it was aborted.
"""

from holdfast.snapshot.protocol import checkpoint_schedule
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.cluster_commit import ClusterCommit
from holdfast.snapshot.protocol.cluster_steps import BlockDigests, differing
from holdfast.snapshot.protocol.leases import Leases
from holdfast.snapshot.protocol.parity_stream import ParityPlan, ParityReceiver
from holdfast.snapshot.protocol.slots import NodeState, Slot, SlotState

# How long a step waits for other nodes to write the one before; then it is skipped.
SEAL_PATIENCE_S = 1.0


class SlotGrants:
    """Grants slots to ranks; allocates their memory and frees it."""

    def __init__(self, node: NodeState, leases: Leases) -> None:
        self._node, self._leases = node, leases

    def take(self, rank: int, index: int, nbytes: int) -> None:
        """Grant a slot to its rank, after allocating the memory that it lacks."""
        slot = self._node.ranks[rank].slots[index]
        if slot.capacity < nbytes or not slot.capacity:
            slot.capacity = 0
            self._node.out.append(m.Allocate(rank, index, max(nbytes, 1)))
        else:
            self._grant(rank, index)

    def allocated(self, event: m.Allocated) -> None:
        """Grant a slot whose memory was allocated."""
        slot = self._node.ranks[event.rank].slots[event.slot]
        slot.capacity, slot.generation = event.nbytes, slot.generation + 1
        self._grant(event.rank, event.slot)

    def _grant(self, rank: int, index: int) -> None:
        slots = self._node.ranks[rank].slots
        slot = slots[index]
        self._node.ranks[rank].lent = index
        # A generation of 0 tells the trainer to unmap the memory of a slot that has lost it.
        generations = [slot.generation if slot.capacity else 0 for slot in slots]
        place = {"step": slot.step, "slot": index, "generation": slot.generation}
        fields = {**place, "generations": generations}
        self._node.out.append(m.Reply(rank, "granted", fields, slot=index, writable=True))

    def revoke(self, index: int) -> None:
        """Take back the slot that a rank is writing to, if any.

        The process that had this rank may still be alive and writing, so this memory is never
        granted again.
        """
        rank = self._node.ranks[index]
        if rank.lent is not None:
            self._node.out.append(m.Free(index, rank.lent))
            rank.slots[rank.lent].capacity, rank.lent = 0, None

    def make_room(self) -> None:
        """Drop an older step, or revoke a step that is being read, when memory is short."""
        ranks = self._node.ranks
        older = list(ranks[0].clean())[:-1]
        unread = [step for step in older if not any(r.clean()[step].pins for r in ranks)]
        if unread:
            self._node.drop(unread[0])
        else:
            self._leases.revoke_retired()

    def free_surplus(self) -> None:
        """Free the slots that readers made necessary, once no reader is connected."""
        if self._leases.readers:
            return
        for index, rank in enumerate(self._node.ranks):
            with_memory = [slot for slot in rank.slots if slot.capacity]
            for number, slot in enumerate(rank.slots):
                idle = slot.state is SlotState.EMPTY and slot.capacity and number != rank.lent
                if idle and len(with_memory) > self._node.keep + 1:
                    with_memory.remove(slot)
                    slot.capacity = 0
                    self._node.out.append(m.Free(index, number))


class Steps:
    """The steps of one node that are being written or wait for other nodes."""

    def __init__(
        self, node: NodeState, cluster: ClusterCommit, leases: Leases, grants: SlotGrants
    ) -> None:
        self._node, self._ranks = node, node.ranks
        self._cluster, self._leases, self._grants = cluster, leases, grants

    def begin(self, event: m.Begin) -> None:
        """Grant a rank a slot for a step, let it wait, skip the step, or refuse it."""
        self._ranks[event.rank].waiting_since_s = self._node.now_s
        self._begin(event)

    def _begin(self, event: m.Begin) -> None:
        self._ranks[event.rank].lent = None
        mine, flying = self._ranks[event.rank].dirty(), self._node.in_flight()
        held = self._held_since(event)
        skipped = [i for i, rank in enumerate(self._ranks) if rank.skipped >= event.step]
        if held is not None:
            reason = (
                f"step {event.step} is not after step {held}, which the SMP holds: "
                "call restore() first, stop the SMP or use another run_dir"
            )
            self._node.reply(event.rank, "refused", step=event.step, reason=reason)
        elif skipped:
            self._skip(event.rank, event.step, f"local rank {skipped[0]} skipped it")
        elif mine is not None and mine.state is SlotState.WRITTEN and mine.step < event.step:
            self._ranks[event.rank].waiting = event
        elif flying is not None and event.step < flying:
            self._skip(event.rank, event.step, f"other ranks are at step {flying} already")
        elif flying is not None and (mine is not None or event.step > flying):
            self.abort(f"local rank {event.rank} is at step {event.step} already")
            self._begin(event)
        else:
            self._take_slot(event)

    def _held_since(self, event: m.Begin) -> int | None:
        """Return the step than which this one would have to be newer, and is not."""
        held = self._ranks[event.rank].held(SlotState.SEALING)
        steps = [slot.step for slot in held if slot.epoch == self._cluster.epoch]
        if (newest := self._node.newest()) is not None:
            epoch = self._ranks[event.rank].clean()[newest].epoch
            # The step of a restore is written once more, so that the present nodes hold it.
            if epoch == self._cluster.epoch or not self._cluster.resumed:
                steps.append(newest)
        return max((step for step in steps if step >= event.step), default=None)

    def _take_slot(self, event: m.Begin) -> None:
        rank = self._ranks[event.rank]
        slots, rank.asked = rank.slots, event
        empty = [index for index, slot in enumerate(slots) if slot.state is SlotState.EMPTY]
        if rank.in_use() > self._node.keep and self._cluster.pending():
            # The slots in use may be given up only for a step that all nodes hold.
            if reason := self._cluster.hindrance():
                self._skip(event.rank, event.step, reason)
            else:
                rank.waiting = event
            return
        if not empty:
            empty = [len(slots)]
            slots.append(Slot())
        chosen = max(empty, key=lambda index: slots[index].capacity)
        slots[chosen].state, slots[chosen].step = SlotState.WRITING, event.step
        self._cluster.place(event.rank, slots[chosen])
        self._grants.take(event.rank, chosen, event.nbytes)

    def allocation_refused(self, event: m.AllocationRefused) -> None:
        """Try again with memory that a reader holds; if there is none, skip or refuse the step."""
        rank = self._ranks[event.rank]
        step = rank.slots[event.slot].step
        rank.slots[event.slot].clear()
        if any(slot.state is SlotState.RETIRED for slot in rank.slots):
            self._grants.make_room()
            assert rank.asked is not None
            self._take_slot(rank.asked)
        elif any(slot.doubtful for slot in self._node.held(SlotState.SEALING)):
            reason = f"{event.reason}; older steps must stay, as another node's SMP was replaced"
            self._skip(event.rank, step, reason)
        else:
            fields = {"step": step, "reason": event.reason, "memory": True}
            self._node.reply(event.rank, "refused", **fields)
            self.note_skipped(event.rank, step)

    def _skip(self, index: int, step: int, reason: str) -> None:
        self._node.reply(index, "skipped", step=step, reason=reason)
        self.note_skipped(index, step)

    def skip(self, event: m.SkipStep) -> None:
        """Note that a rank will not write a step."""
        self._ranks[event.rank].lent = None
        self.note_skipped(event.rank, event.step)

    def withdraw(self, event: m.Withdraw) -> None:
        """Let a rank skip a step for which it did not learn the sizes of other states."""
        asked = self._ranks[event.rank].sizing
        self._cluster.withdraw(event.rank)
        if asked is not None:
            self.note_skipped(event.rank, asked.step)

    def note_skipped(self, index: int, step: int) -> None:
        """Abort a step that a rank will not write; ranks of this node that wrote it are told."""
        self._ranks[index].skipped = max(step, self._ranks[index].skipped)
        if self._node.in_flight() == step:
            self.abort(f"local rank {index} skipped it")

    def tell_skipped(self) -> None:
        """Tell other nodes of skipped steps, but not before a step in flight was written."""
        skipped, cluster = max([rank.skipped for rank in self._ranks]), self._cluster.cluster
        if cluster is None or skipped <= cluster.skipped():
            return
        flying = self._node.in_flight()
        if flying is None or flying > skipped:
            cluster.skip_to(skipped)

    def written(self, event: m.Written) -> None:
        """Record a rank's copy of a step; once all have one, commit it or wait for other nodes."""
        rank = self._ranks[event.rank]
        rank.lent = None
        slot = rank.dirty()
        if slot is None or (slot.state, slot.step) != (SlotState.WRITING, event.step):
            reason = "another local rank left, or began another step"
            self._node.reply(event.rank, "aborted", step=event.step, reason=reason)
            return
        slot.blocks = BlockDigests(tuple(event.claims), tuple(event.seen))
        if event.parity_plan:
            slot.receiver = ParityReceiver(ParityPlan.parse(event.parity_plan, slot.capacity))
        slot.state, slot.digest, slot.manifest = SlotState.WRITTEN, event.digest, event.manifest
        rank.copy_us, rank.stall_us = event.copy_us, event.stall_us
        dirty = [rank.dirty() for rank in self._ranks]
        if not all(slot is not None and slot.state is SlotState.WRITTEN for slot in dirty):
            return
        if self._cluster.cluster is None:
            self._settle_alone(event.step)
        else:
            self._cluster.written(event.step)
            self.settle()

    def _settle_alone(self, step: int) -> None:
        """Commit a step that all ranks of a node on its own have written, if replicas are equal."""
        written = {i: slot for i, rank in enumerate(self._ranks) if (slot := rank.dirty())}
        if found := differing({index: slot.blocks for index, slot in written.items()}):
            self._differ(step, found)
        else:
            self._commit(step, SlotState.WRITTEN)

    def _differ(self, step: int, found: list[tuple[int, int, int]]) -> None:
        self._give_up(step, "replicas differ", diverged=list(map(list, found)))

    def digested(self, event: m.Digested) -> None:
        """Record the digest of a bucket of a parity, and settle the step if it was the last one."""
        receiver = self._ranks[event.rank].slots[event.slot].receiver
        assert receiver is not None
        receiver.digests.append(event.digest)
        if receiver.complete:
            self.settle()

    def settle(self) -> None:
        """Commit the steps that every node holds by now, and give up those that a node skipped."""
        for step in self._cluster.pending():
            match self._cluster.look(step, self._leases.disk()):
                case "committed":
                    self._commit(step, SlotState.SEALING)
                case "void":
                    self._give_up(step, "another node skipped it")
                case "doubtful":
                    self._give_up(step, "another node's SMP was lost", keep=True)
                case "diverged":
                    # A state that is rebuilt from this step would be a mixture of different states.
                    self._differ(step, self._cluster.joined.steps.diverged(step))

    def _give_up(self, step: int, reason: str, *, keep: bool = False, **found: object) -> None:
        """Wait for a step no longer; forget it, or with ``keep`` hold it until a newer is safe."""
        self._node.aborts += 1
        written = (slot for slot in self._node.held(SlotState.WRITTEN) if slot.step == step)
        slots = [*self._cluster.slots_of(step), *written]
        for index in range(len(self._ranks)):
            self._node.reply(index, "aborted", step=step, reason=reason, **found)
        for slot in slots:
            if keep:
                slot.doubtful = True
            else:
                slot.clear()
        if self._cluster.cluster is not None and not keep:
            self._cluster.cluster.tree.give_up(step)
        self._wake()

    def _commit(self, step: int, state: SlotState) -> None:
        self._node.commits += 1
        self._node.committed_s = self._node.now_s
        stamp = (self._cluster.epoch, step)
        self._cluster.commit(step)
        self._node.forget_former()
        for index, rank in enumerate(self._ranks):
            next(slot for slot in rank.held(state) if slot.stamp == stamp).state = SlotState.CLEAN
            for retired in rank.held(SlotState.CLEAN)[: -self._node.keep]:
                retired.retire()
            self._node.reply(index, "committed", step=step)
        self._cluster.retired()
        disk = self._cluster.cluster.tree.disk if self._cluster.cluster else None
        self._leases.committed(step, checkpoint_schedule.agreed(step, disk))
        self._wake()
        self._grants.free_surplus()

    def abort(self, reason: str) -> None:
        """Abort the step in flight, if any."""
        self._node.aborts += self._node.in_flight() is not None
        for index, rank in enumerate(self._ranks):
            if (slot := rank.dirty()) is None:
                continue
            if slot.state is SlotState.WRITTEN:
                self._node.reply(index, "aborted", step=slot.step, reason=reason)
            slot.clear()
        self._wake()

    def abort_all(self, reason: str) -> None:
        """Abort the step in flight, and skip those that wait to begin."""
        for index, rank in enumerate(self._ranks):
            waiting, rank.waiting, rank.skipped = rank.waiting, None, -1
            if waiting is not None:
                self._node.reply(index, "skipped", step=waiting.step, reason=reason)
        self.abort(reason)

    def _wake(self) -> None:
        for rank in self._ranks:
            begin, rank.waiting = rank.waiting, None
            if begin is not None:
                self._begin(begin)

    def tick(self, _: m.Tick) -> None:
        """Skip the steps that have waited too long for other nodes, or for a local rank."""
        if self._cluster.cluster is not None:
            self._cluster.cluster.tree.tick()
        for index, rank in enumerate(self._ranks):
            waited_s, pending = self._node.now_s - rank.waiting_since_s, self._cluster.pending()
            if rank.waiting is None or waited_s <= SEAL_PATIENCE_S:
                continue
            if pending:
                step, rank.waiting = rank.waiting.step, None
                late, nodes = self._cluster.joined.tree.late
                who = f"nodes {list(nodes)}" if late == pending[0] else "other nodes"
                self._skip(index, step, f"{who} have not written step {pending[0]} yet")
            elif (flying := self._node.in_flight()) is not None:
                idle = [number for number, each in enumerate(self._ranks) if each.dirty() is None]
                if idle:  # it has trouble of its own, and does not say that it skips the step
                    self.abort(f"local ranks {idle} have not begun step {flying}")

"""The SMP's decisions as a pure state machine: events in, instructions out, no I/O, no clock.

A rank owns ``keep + 1`` slots: up to ``keep`` CLEAN ones and one being filled; one more while a
reader (``leases``) holds a step that newer ones retired. At most one step is in flight on a node,
and it becomes CLEAN on all ranks in the same instant or on none::

    EMPTY --begin--> WRITING --written--> WRITTEN --all ranks written--> CLEAN
      ^                 |                    |                             |
      +-----------------+------ aborted -----+------ retired, corrupt -----+
      +----- released ----- RETIRED <------- the same, while it is read ---+

Where several nodes protect each other (``sealing``), it is SEALING between WRITTEN and CLEAN, until
every node holds it; what is SEALING is complete here, and no death of a rank takes it away.

**Guarantees**: the CLEAN steps are the same on every rank at every moment; once a step was
committed, a begin, a death or a restart never takes the newest one away (only digests that do not
match can). What a reader holds is not written over unless memory for another slot is lacking, and
it is told if it was; no reader delays or skips a snapshot. Every message of a rank gets one answer:
sizes → sizes | skipped, begin → granted | skipped | refused, written → committed | aborted,
restore, verified and corrupt → offer | load | lost | fresh, recall → load | older | nothing; but
for pass_over, which is only told. Nobody waits for a step that a rank passed over, here or on
another node: whoever has written it is told that it was aborted.

**Not covered**: the shell must answer each Allocate before it hands in the next event.
"""

from collections.abc import Callable
from typing import Any

from holdfast.snapshot import messages as m
from holdfast.snapshot.cargo import Cargo
from holdfast.snapshot.cluster import Roster
from holdfast.snapshot.leases import Leases
from holdfast.snapshot.rounds import Rounds
from holdfast.snapshot.sealing import Sealing, Verdict
from holdfast.snapshot.shipping import Intake
from holdfast.snapshot.slots import Rank, Slot, SlotState, drop
from holdfast.version import __version__

# How long a copy is held up for other nodes to write the step before; then it is skipped.
SEAL_PATIENCE_S = 1.0


class Protocol:
    """The state of one node's snapshots.

    Args:
        world_size: ranks on this node.
        keep: clean snapshots kept for each rank, at least 1.
        linger_s: how long to go on without any connected rank, in seconds.
        now: the current time in seconds, on the clock that ``handle`` is given.
    """

    def __init__(self, world_size: int, keep: int, linger_s: float, now: float) -> None:
        self.ranks = [Rank([Slot() for _ in range(keep + 1)]) for _ in range(world_size)]
        self.keep, self.linger_s = keep, linger_s
        self.commits = self.aborts = 0
        self.committed_s = now
        self.leases = Leases(self.ranks)
        self.sealing = Sealing(self.ranks)
        self._rounds = Rounds(self.ranks, self.newest, lambda: self.commits > 0)
        self._seen_s = self._now = now
        self._out: list[m.Instruction] = []

    def handle(self, event: m.Event, now: float) -> list[m.Instruction]:
        """Take one event at time ``now`` (seconds); returns what to do, in order."""
        self._out, self._now = [], now
        _HANDLERS[type(event)](self, event)
        self._tell_passed()
        if any(rank.connected for rank in self.ranks):
            self._seen_s = now
        if now - self._seen_s >= self.linger_s:
            self._out.append(m.Stop(f"no trainer was connected for {self.linger_s:g} s"))
        return self._out

    def unfit(self, hello: m.Hello) -> str:
        """Why this trainer cannot use this SMP; empty if it can."""
        if hello.world_size != len(self.ranks):
            return (
                f"the SMP holds snapshots of {len(self.ranks)} local ranks, this run has "
                f"{hello.world_size}: start as many ranks, stop the SMP or use another run_dir"
            )
        if hello.keep != self.keep:
            return (
                f"the SMP was started with keep={self.keep}, this run asks for {hello.keep}: "
                f"use keep={self.keep}, stop the SMP or use another run_dir"
            )
        if hello.version != __version__:
            return (
                f"the SMP is of holdfast {__version__}, this run uses {hello.version or 'another'}:"
                " go on with that one, or persist what it holds and stop it (`holdfast snapshots`)"
            )
        if not hello.rank < len(self.ranks):
            return (
                f"local rank {hello.rank} does not exist among {len(self.ranks)}: check LOCAL_RANK"
            )
        return ""

    def newest(self) -> int | None:
        """The newest step that is CLEAN on every rank."""
        common = set.intersection(*(set(rank.clean()) for rank in self.ranks))
        return max(common, default=None)

    def state(self) -> str:
        """What this node is doing, in REFT's words.

        UNHEALTHY: a rank is missing; SNAP: a step is being copied, or other nodes are waited for;
        CLEAN: nothing is in flight and there is a clean step; HEALTHY: there is none yet.
        """
        if not all(rank.connected or rank.finished for rank in self.ranks):
            return "UNHEALTHY"
        if self._in_flight() is not None or self.sealing.pending():
            return "SNAP"
        return "HEALTHY" if self.newest() is None else "CLEAN"

    def status(self) -> dict[str, Any]:
        """Steps, slots and counters as JSON-ready values."""
        return {
            "clean": [list(rank.clean()) for rank in self.ranks],
            "slots": [[slot.state.value for slot in rank.slots] for rank in self.ranks],
            "steps": [[slot.step for slot in rank.slots] for rank in self.ranks],
            "bytes": sum(slot.capacity for rank in self.ranks for slot in rank.slots),
            "connected": [rank.connected for rank in self.ranks],
            "finished": [rank.finished for rank in self.ranks],
            "newest": self.newest(),
            "state": self.state(),
            "commits": self.commits,
            "aborts": self.aborts,
            "keep": self.keep,
            "stall_s": max(rank.stall_us for rank in self.ranks) / 1e6,
            "copy_bytes_s": self._copy_bytes_s(),
            "cluster": self.sealing.status(),
            **self.leases.status(),
        }

    def _copy_bytes_s(self) -> float | None:
        times = [rank.copy_us for rank in self.ranks]
        nbytes = sum(rank.asked.nbytes for rank in self.ranks if rank.asked is not None)
        return nbytes / (max(times) / 1e6) if all(times) else None

    def _reply(self, rank: int, verb: str, **fields: Any) -> None:
        self._out.append(m.Reply(rank, verb, fields))

    def _hello(self, event: m.Hello) -> None:
        assert not self.unfit(event)
        if self.ranks[event.rank].connected:
            self._leave(event.rank)
        self.ranks[event.rank].connected = True
        self.ranks[event.rank].finished = False
        self._reply(event.rank, "welcome", newest=self.newest())

    def _disconnected(self, event: m.Disconnected) -> None:
        self._leave(event.rank)
        if not any(rank.connected or rank.finished for rank in self.ranks):
            # Nobody may come back: what there is goes to disk now.
            self._out += self.leases.want(self.newest())

    def _leave(self, index: int) -> None:
        rank = self.ranks[index]
        rank.connected, rank.waiting, rank.sizing, rank.passed = False, None, None, -1
        self._rounds.leave(index)
        self._abort_step(f"local rank {index} left")
        if rank.lent is not None:
            # A writer that is only believed dead may still write: this memory is not granted again.
            self._out.append(m.Free(index, rank.lent))
            rank.slots[rank.lent].capacity, rank.lent = 0, None

    def _asked(self, event: m.Begin) -> None:
        self.ranks[event.rank].waiting_since_s = self._now
        self._begin(event)

    def _begin(self, event: m.Begin) -> None:
        self.ranks[event.rank].lent = None
        mine, flying = self.ranks[event.rank].dirty(), self._in_flight()
        held = self._held_since(event)
        if held is not None:
            self._refuse(event, held)
        elif (by := self._passed_by(event.step)) is not None:
            self._skip(event.rank, event.step, f"local rank {by} passed it over")
        elif mine is not None and mine.state is SlotState.WRITTEN and mine.step < event.step:
            self.ranks[event.rank].waiting = event
        elif flying is not None and event.step < flying:
            self._skip(event.rank, event.step, f"other ranks are at step {flying} already")
        elif flying is not None and (mine is not None or event.step > flying):
            self._abort_step(f"local rank {event.rank} is at step {event.step} already")
            self._begin(event)
        else:
            self._take_slot(event)

    def _held_since(self, event: m.Begin) -> int | None:
        """The step that this one would have to be newer than, and is not."""
        held = self.ranks[event.rank].held(SlotState.SEALING)
        steps = [slot.step for slot in held if slot.epoch == self.sealing.epoch]
        newest = self.newest()
        if newest is not None:
            epoch = self.ranks[event.rank].clean()[newest].epoch
            # What was resumed from is written once more, so that the present nodes hold it.
            steps += [newest] if epoch == self.sealing.epoch or not self.sealing.resumed else []
        return max((step for step in steps if step >= event.step), default=None)

    def _refuse(self, event: m.Begin, newest: int) -> None:
        reason = (
            f"step {event.step} is not after step {newest}, which the SMP holds: "
            "call restore() first, stop the SMP or use another run_dir"
        )
        self._reply(event.rank, "refused", step=event.step, reason=reason)

    def _take_slot(self, event: m.Begin) -> None:
        slots = self.ranks[event.rank].slots
        self.ranks[event.rank].asked = event
        empty = [index for index, slot in enumerate(slots) if slot.state is SlotState.EMPTY]
        if not empty and self.sealing.pending():
            # What is there may be given up only for a step that all nodes hold.
            self._wait_or_skip(event)
            return
        if not empty:
            empty = [len(slots)]
            slots.append(Slot())
        chosen = max(empty, key=lambda index: slots[index].capacity)
        slots[chosen].state, slots[chosen].step = SlotState.WRITING, event.step
        self.sealing.place(event.rank, slots[chosen])
        if slots[chosen].capacity < event.nbytes or not slots[chosen].capacity:
            slots[chosen].capacity = 0
            self._out.append(m.Allocate(event.rank, chosen, max(event.nbytes, 1)))
        else:
            self._grant(event.rank, chosen)

    def _wait_or_skip(self, event: m.Begin) -> None:
        reason = ""
        if self.sealing.cluster is not None and (away := self.sealing.cluster.away()):
            reason = f"nodes {list(away)} cannot be reached"
        elif self.sealing.shipping():
            reason = f"the parities of step {self.sealing.pending()[0]} are on their way"
        if reason:
            self._skip(event.rank, event.step, reason)
        else:
            self.ranks[event.rank].waiting = event

    def _skip(self, index: int, step: int, reason: str) -> None:
        self._reply(index, "skipped", step=step, reason=reason)
        self._pass(index, step)

    def _passed_over(self, event: m.PassOver) -> None:
        self.ranks[event.rank].lent = None
        self._pass(event.rank, event.step)

    def _pass(self, index: int, step: int) -> None:
        """A rank will not write a step: those of this node who have, or would, are told."""
        self.ranks[index].passed = max(step, self.ranks[index].passed)
        if self._in_flight() == step:
            self._abort_step(f"local rank {index} passed it over")

    def _passed_by(self, step: int) -> int | None:
        passed = [index for index, rank in enumerate(self.ranks) if rank.passed >= step]
        return min(passed, default=None)

    def _tell_passed(self) -> None:
        """What is in flight may still be written: other nodes are told afterwards."""
        passed, flying = max(rank.passed for rank in self.ranks), self._in_flight()
        if passed >= 0 and (flying is None or flying > passed):
            self._out += self.sealing.passed(passed)

    def _allocated(self, event: m.Allocated) -> None:
        slot = self.ranks[event.rank].slots[event.slot]
        slot.capacity, slot.generation = event.nbytes, slot.generation + 1
        self._grant(event.rank, event.slot)

    def _allocation_refused(self, event: m.AllocationRefused) -> None:
        rank = self.ranks[event.rank]
        step = rank.slots[event.slot].step
        rank.slots[event.slot].clear()
        if any(slot.state is SlotState.RETIRED for slot in rank.slots):
            self._make_room()
            assert rank.asked is not None
            self._take_slot(rank.asked)
        elif self.sealing.in_doubt():
            self._skip(event.rank, step, f"{event.reason}, as long as another node's SMP is new")
        else:
            self._reply(event.rank, "refused", step=step, reason=event.reason)

    def _make_room(self) -> None:
        """Memory is short because of a reader: drop an older step, or else what is read."""
        older = list(self.ranks[0].clean())[:-1]
        unread = [step for step in older if not any(r.clean()[step].pins for r in self.ranks)]
        if unread:
            drop(self.ranks, unread[0])
        else:
            self.leases.revoke_retired()

    def _grant(self, rank: int, index: int) -> None:
        slots = self.ranks[rank].slots
        slot = slots[index]
        self.ranks[rank].lent = index
        place: dict[str, Any] = {"step": slot.step, "slot": index, "generation": slot.generation}
        # Of slots that lost their memory the trainer must not keep it either.
        place |= {"generations": [slot.generation if slot.capacity else 0 for slot in slots]}
        self._out.append(m.Reply(rank, "granted", place, slot=index, writable=True))

    def _written(self, event: m.Written) -> None:
        self.ranks[event.rank].lent = None
        slot = self.ranks[event.rank].dirty()
        if slot is None or (slot.state, slot.step) != (SlotState.WRITING, event.step):
            self._reply(event.rank, "aborted", step=event.step, reason="another rank left or moved")
            return
        slot.state, slot.digest, slot.manifest = SlotState.WRITTEN, event.digest, event.manifest
        slot.claims = tuple(map(str, event.claims))
        slot.seen = tuple((int(r), int(block), str(digest)) for r, block, digest in event.seen)
        cargo = Cargo.parse(event.cargo, slot.capacity)
        slot.intake = Intake(cargo) if event.cargo else None
        self.ranks[event.rank].copy_us = event.copy_us
        self.ranks[event.rank].stall_us = event.stall_us
        dirty = [rank.dirty() for rank in self.ranks]
        if not all(slot is not None and slot.state is SlotState.WRITTEN for slot in dirty):
            return
        if self.sealing.cluster is None:
            self._commit(event.step, SlotState.WRITTEN)
        else:
            self._out += self.sealing.written(event.step)
            self._settle()

    def _settle(self) -> None:
        """Commit what every node holds by now, and give up what one of them passed over."""
        for step in self.sealing.pending():
            out, verdict = self.sealing.look(step, self.leases.disk())
            self._out += out
            if verdict is Verdict.SEALED:
                self._commit(step, SlotState.SEALING)
            elif verdict is Verdict.VOID:
                self._give_up(step, "another node passed it over")
            elif verdict is Verdict.DOUBTFUL:
                self._give_up(step, "another node's SMP was lost", keep=True)
            elif verdict is Verdict.DIVERGED:
                # Whatever is put together from it would be a mixture of states.
                self._give_up(step, "replicas differ", diverged=self.sealing.diverged(step))

    def _give_up(self, step: int, reason: str, *, keep: bool = False, **found: Any) -> None:
        """Wait for a step no longer; ``keep`` it until a newer one is safe, or forget it."""
        self.aborts += 1
        for index, rank in enumerate(self.ranks):
            self._reply(index, "aborted", step=step, reason=reason, **found)
            for slot in rank.held(SlotState.SEALING):
                if slot.stamp == (self.sealing.epoch, step):
                    if keep:
                        slot.doubtful = True
                    else:
                        slot.clear()
        self._wake()

    def _commit(self, step: int, state: SlotState) -> None:
        self.commits += 1
        self.committed_s = self._now
        stamp = (self.sealing.epoch, step)
        self.sealing.seal(step)
        for index, rank in enumerate(self.ranks):
            next(slot for slot in rank.held(state) if slot.stamp == stamp).state = SlotState.CLEAN
            for retired in rank.held(SlotState.CLEAN)[: -self.keep]:
                retired.retire()
            self._reply(index, "committed", step=step)
        self.sealing.retired()
        self._out += self.leases.committed(step, self.sealing.agreement(step))
        self._wake()
        self._free_surplus()

    def _free_surplus(self) -> None:
        """Give back what readers made necessary, once all of them left: not between two reads."""
        if self.leases.readers:
            return
        for index, rank in enumerate(self.ranks):
            with_memory = [slot for slot in rank.slots if slot.capacity]
            for number, slot in enumerate(rank.slots):
                idle = slot.state is SlotState.EMPTY and slot.capacity and number != rank.lent
                if idle and len(with_memory) > self.keep + 1:
                    with_memory.remove(slot)
                    slot.capacity = 0
                    self._out.append(m.Free(index, number))

    def _in_flight(self) -> int | None:
        return max((slot.step for rank in self.ranks if (slot := rank.dirty())), default=None)

    def _abort_step(self, reason: str) -> None:
        self.aborts += self._in_flight() is not None
        for index, rank in enumerate(self.ranks):
            slot = rank.dirty()
            if slot is None:
                continue
            if slot.state is SlotState.WRITTEN:
                self._reply(index, "aborted", step=slot.step, reason=reason)
            slot.clear()
        self._wake()

    def _abort_all(self, reason: str) -> None:
        for index, rank in enumerate(self.ranks):
            waiting, rank.waiting, rank.passed = rank.waiting, None, -1
            if waiting is not None:
                self._reply(index, "skipped", step=waiting.step, reason=reason)
        self._abort_step(reason)

    def _wake(self) -> None:
        for rank in self.ranks:
            begin, rank.waiting = rank.waiting, None
            if begin is not None:
                self._begin(begin)

    def _restore(self, event: m.Restore) -> None:
        rank = self.ranks[event.rank]
        rank.waiting, rank.lent, rank.passed = None, None, -1
        self._abort_step(f"local rank {event.rank} restores")
        self._out += self._rounds.restore(event.rank)

    def _verified(self, event: m.Verified) -> None:
        self._tell(self._rounds.verified(event))

    def _corrupt(self, event: m.Corrupt) -> None:
        self._out += self._rounds.corrupt(event)

    def _recall(self, event: m.Recall) -> None:
        self._tell(self._rounds.recall(event))

    def _tell(self, answers: list[m.Instruction]) -> None:
        """All ranks what they wait for; if it is to load a step, newer ones on disk are void."""
        for answer in answers:
            if isinstance(answer, m.Reply) and answer.verb == "load":
                self.leases.back_to(int(answer.fields["step"]))
        self._out += answers

    def _lease(self, event: m.Lease) -> None:
        self._out += self.leases.lease(event)

    def _pin(self, event: m.Pin) -> None:
        self.leases.pin(event)

    def _due(self, event: m.Due) -> None:
        self._out += self.leases.wait(event, self.newest())

    def _release(self, event: m.Release) -> None:
        self._out += self.leases.release(event, self.newest())

    def _persisted(self, event: m.Persisted) -> None:
        self.leases.record(event)

    def _gone(self, event: m.Gone) -> None:
        self.leases.gone(event.holder)
        self._free_surplus()

    def _persist(self, event: m.PersistRequested) -> None:
        self._out += self.leases.want(self.newest())

    def _finished(self, event: m.Finished) -> None:
        self.ranks[event.rank].finished = True
        self._reply(event.rank, "bye")
        if all(rank.finished for rank in self.ranks):
            self._out.append(m.Stop("all ranks finished"))

    def _stop(self, event: m.StopRequested) -> None:
        self._out.append(m.Stop("asked to"))

    def _tick(self, event: m.Tick) -> None:
        for index, rank in enumerate(self.ranks):
            waiting, since = rank.waiting, rank.waiting_since_s
            if waiting and self.sealing.pending() and self._now - since > SEAL_PATIENCE_S:
                rank.waiting = None
                reason = f"nodes have not written step {self.sealing.pending()[0]} yet"
                self._skip(index, waiting.step, reason)

    def _join(self, event: m.Join) -> None:
        roster = Roster.parse(event.roster)
        if roster.epoch > self.sealing.epoch:
            # Once for all local ranks: others may soon have begun the first step of that epoch.
            self._abort_all(f"epoch {roster.epoch} begins")
            self.leases.join()
        self._out += self.sealing.join(roster)
        self._reply(event.rank, "joined", epoch=self.sealing.epoch)

    def _inventory(self, event: m.Inventory) -> None:
        self._reply(event.rank, "inventory", **self.sealing.inventory())

    def _resume(self, event: m.Resume) -> None:
        self.leases.resume(event.epoch, event.step)
        self.sealing.resume(event)
        self._reply(event.rank, "resumed", step=event.step)

    def _sizes(self, event: m.Sizes) -> None:
        self._out += self.sealing.sized(event)

    def _withdraw(self, event: m.Withdraw) -> None:
        asked = self.ranks[event.rank].sizing
        self._out += self.sealing.withdraw(event.rank)
        if asked is not None:
            self._pass(event.rank, asked.step)

    def _spare(self, event: m.Spare) -> None:
        self._out += self.sealing.work(event.nodes)

    def _digested(self, event: m.Digested) -> None:
        intake = self.ranks[event.rank].slots[event.slot].intake
        assert intake is not None
        intake.digests.append(event.digest)
        if intake.complete:
            self._settle()

    def _peer(self, event: m.PeerWrote | m.PeerPassed | m.PeerMirror | m.PeerHolds) -> None:
        cluster = self.sealing.cluster
        assert cluster is not None
        match event:
            case m.PeerWrote():
                cluster.wrote(event)
            case m.PeerPassed():
                cluster.passed(event)
            case m.PeerMirror():
                cluster.mirror(event)
            case m.PeerHolds():
                cluster.holds(event)
        self._settle()

    def _peer_size(self, event: m.PeerSize) -> None:
        self._out += self.sealing.peer_sized(event)

    def _peer_chunk(self, event: m.PeerChunk) -> None:
        self._out += self.sealing.chunk(event)

    def _peer_linked(self, event: m.PeerLinked) -> None:
        if self.sealing.cluster is not None:
            self._out += self.sealing.cluster.linked(event.node)

    def _peer_replaced(self, event: m.PeerReplaced) -> None:
        self.sealing.replaced(event.node)

    def _peer_unlinked(self, event: m.PeerUnlinked) -> None:
        if self.sealing.cluster is not None:
            self.sealing.cluster.unlinked(event.node)


_HANDLERS: dict[type[m.Event], Callable[[Protocol, Any], None]] = {
    m.Hello: Protocol._hello,
    m.Disconnected: Protocol._disconnected,
    m.Sizes: Protocol._sizes,
    m.Withdraw: Protocol._withdraw,
    m.Begin: Protocol._asked,
    m.PassOver: Protocol._passed_over,
    m.Allocated: Protocol._allocated,
    m.AllocationRefused: Protocol._allocation_refused,
    m.Written: Protocol._written,
    m.Restore: Protocol._restore,
    m.Verified: Protocol._verified,
    m.Corrupt: Protocol._corrupt,
    m.Recall: Protocol._recall,
    m.Lease: Protocol._lease,
    m.Pin: Protocol._pin,
    m.Due: Protocol._due,
    m.Release: Protocol._release,
    m.Persisted: Protocol._persisted,
    m.Gone: Protocol._gone,
    m.PersistRequested: Protocol._persist,
    m.Join: Protocol._join,
    m.Inventory: Protocol._inventory,
    m.Resume: Protocol._resume,
    m.PeerLinked: Protocol._peer_linked,
    m.PeerUnlinked: Protocol._peer_unlinked,
    m.PeerReplaced: Protocol._peer_replaced,
    m.PeerWrote: Protocol._peer,
    m.PeerPassed: Protocol._peer,
    m.PeerMirror: Protocol._peer,
    m.PeerHolds: Protocol._peer,
    m.PeerSize: Protocol._peer_size,
    m.PeerChunk: Protocol._peer_chunk,
    m.Spare: Protocol._spare,
    m.Digested: Protocol._digested,
    m.Finished: Protocol._finished,
    m.StopRequested: Protocol._stop,
    m.Tick: Protocol._tick,
}

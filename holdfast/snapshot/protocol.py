"""The SMP's decisions as a pure state machine: events in, instructions out, no I/O, no clock.

A rank owns ``keep + 1`` slots: up to ``keep`` CLEAN ones and one being filled. At most one step is
in flight on a node, and it becomes CLEAN on all ranks in the same instant or on none::

    EMPTY --begin--> WRITING --written--> WRITTEN --all ranks written--> CLEAN
      ^                 |                    |                             |
      +-----------------+------ aborted -----+------ retired, corrupt -----+

**Guarantees**: the CLEAN steps are the same on every rank at every moment; once a step was
committed, a begin, a death or a restart never takes the newest one away (only digests that do not
match can). Every message of a rank gets one answer: begin → granted | skipped | refused,
written → committed | aborted, restore, verified and corrupt → offer | load | lost | fresh.

**Not covered**: the shell must answer each Allocate before it hands in the next event.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.snapshot import messages as m
from holdfast.snapshot.slots import Rank, Slot, SlotState


@dataclass
class _Round:
    """One agreement on a restore: who asked, what is offered, who verified it."""

    asked: set[int] = field(default_factory=set)
    verified: set[int] = field(default_factory=set)
    offered: int | None = None


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
        self._round = _Round()
        self._seen_s = now
        self._out: list[m.Instruction] = []

    def handle(self, event: m.Event, now: float) -> list[m.Instruction]:
        """Take one event at time ``now`` (seconds); returns what to do, in order."""
        self._out = []
        _HANDLERS[type(event)](self, event)
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
        if not hello.rank < len(self.ranks):
            return (
                f"local rank {hello.rank} does not exist among {len(self.ranks)}: check LOCAL_RANK"
            )
        return ""

    def newest(self) -> int | None:
        """The newest step that is CLEAN on every rank."""
        common = set.intersection(*(set(rank.clean()) for rank in self.ranks))
        return max(common, default=None)

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
            "commits": self.commits,
            "aborts": self.aborts,
            "keep": self.keep,
        }

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

    def _leave(self, index: int) -> None:
        rank = self.ranks[index]
        rank.connected, rank.waiting = False, None
        self._round.asked.discard(index)
        self._round.verified.discard(index)
        if not self._round.asked:
            self._round = _Round()
        self._abort_step(f"local rank {index} left")
        if rank.lent is not None:
            # A writer that is only believed dead may still write: this memory is not granted again.
            self._out.append(m.Free(index, rank.lent))
            rank.slots[rank.lent].capacity, rank.lent = 0, None

    def _begin(self, event: m.Begin) -> None:
        self.ranks[event.rank].lent = None
        newest, mine, flying = self.newest(), self.ranks[event.rank].dirty(), self._in_flight()
        if newest is not None and event.step <= newest:
            self._refuse(event, newest)
        elif mine is not None and mine.state is SlotState.WRITTEN and mine.step < event.step:
            self.ranks[event.rank].waiting = event
        elif flying is not None and event.step < flying:
            reason = f"other ranks are at step {flying} already"
            self._reply(event.rank, "skipped", step=event.step, reason=reason)
        elif flying is not None and (mine is not None or event.step > flying):
            self._abort_step(f"local rank {event.rank} is at step {event.step} already")
            self._begin(event)
        else:
            self._take_slot(event)

    def _refuse(self, event: m.Begin, newest: int) -> None:
        reason = (
            f"step {event.step} is not after step {newest}, which the SMP holds: "
            "call restore() first, stop the SMP or use another run_dir"
        )
        self._reply(event.rank, "refused", step=event.step, reason=reason)

    def _take_slot(self, event: m.Begin) -> None:
        slots = self.ranks[event.rank].slots
        empty = [index for index, slot in enumerate(slots) if slot.state is SlotState.EMPTY]
        chosen = max(empty, key=lambda index: slots[index].capacity)
        slots[chosen].state, slots[chosen].step = SlotState.WRITING, event.step
        if slots[chosen].capacity < event.nbytes or not slots[chosen].capacity:
            slots[chosen].capacity = 0
            self._out.append(m.Allocate(event.rank, chosen, max(event.nbytes, 1)))
        else:
            self._grant(event.rank, chosen)

    def _allocated(self, event: m.Allocated) -> None:
        slot = self.ranks[event.rank].slots[event.slot]
        slot.capacity, slot.generation = event.nbytes, slot.generation + 1
        self._grant(event.rank, event.slot)

    def _allocation_refused(self, event: m.AllocationRefused) -> None:
        slot = self.ranks[event.rank].slots[event.slot]
        step = slot.step
        slot.clear()
        self._reply(event.rank, "refused", step=step, reason=event.reason)

    def _grant(self, rank: int, index: int) -> None:
        slot = self.ranks[rank].slots[index]
        self.ranks[rank].lent = index
        place = {"step": slot.step, "slot": index, "generation": slot.generation}
        self._out.append(m.Reply(rank, "granted", place, slot=index, writable=True))

    def _written(self, event: m.Written) -> None:
        self.ranks[event.rank].lent = None
        slot = self.ranks[event.rank].dirty()
        if slot is None or (slot.state, slot.step) != (SlotState.WRITING, event.step):
            self._reply(event.rank, "aborted", step=event.step, reason="another rank left or moved")
            return
        slot.state, slot.digest, slot.manifest = SlotState.WRITTEN, event.digest, event.manifest
        dirty = [rank.dirty() for rank in self.ranks]
        if all(slot is not None and slot.state is SlotState.WRITTEN for slot in dirty):
            self._commit(event.step)

    def _commit(self, step: int) -> None:
        self.commits += 1
        for index, rank in enumerate(self.ranks):
            slot = rank.dirty()
            assert slot is not None
            assert slot.step == step
            slot.state = SlotState.CLEAN
            for retired in list(rank.clean().values())[: -self.keep]:
                retired.clear()
            self._reply(index, "committed", step=step)
        self._wake()

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

    def _wake(self) -> None:
        for rank in self.ranks:
            begin, rank.waiting = rank.waiting, None
            if begin is not None:
                self._begin(begin)

    def _restore(self, event: m.Restore) -> None:
        self.ranks[event.rank].waiting = self.ranks[event.rank].lent = None
        self._abort_step(f"local rank {event.rank} restores")
        self._round.asked.add(event.rank)
        self._round.verified.discard(event.rank)
        if self._round.offered is None:
            self._offer_next()
        else:
            self._offer(event.rank, self._round.offered)

    def _offer_next(self) -> None:
        if len(self._round.asked) < len(self.ranks):
            return
        step = self.newest()
        if step is None:
            self._end_round("lost" if self.commits else "fresh", -1)
            return
        self._round.offered = step
        for index in range(len(self.ranks)):
            self._offer(index, step)

    def _offer(self, rank: int, step: int) -> None:
        slot = self.ranks[rank].clean()[step]
        index = self.ranks[rank].slots.index(slot)
        fields = {"step": step, "slot": index, "digest": slot.digest}
        self._out.append(m.Reply(rank, "offer", fields, slot=index, manifest=slot.manifest))

    def _end_round(self, verb: str, step: int) -> None:
        self._round = _Round()
        for index in range(len(self.ranks)):
            self._reply(index, verb, step=step)

    def _stale(self, rank: int, step: int) -> bool:
        # The answer to a stale verdict is the newer offer, which is on its way already.
        return rank not in self._round.asked or step != self._round.offered

    def _verified(self, event: m.Verified) -> None:
        if self._stale(event.rank, event.step):
            return
        self._round.verified.add(event.rank)
        if len(self._round.verified) == len(self.ranks):
            self._end_round("load", event.step)

    def _corrupt(self, event: m.Corrupt) -> None:
        if self._stale(event.rank, event.step):
            return
        for rank in self.ranks:
            rank.clean()[event.step].clear()
        self._round.offered = None
        self._round.verified.clear()
        self._offer_next()

    def _finished(self, event: m.Finished) -> None:
        self.ranks[event.rank].finished = True
        self._reply(event.rank, "bye")
        if all(rank.finished for rank in self.ranks):
            self._out.append(m.Stop("all ranks finished"))

    def _stop(self, event: m.StopRequested) -> None:
        self._out.append(m.Stop("asked to"))

    def _tick(self, event: m.Tick) -> None:
        pass


_HANDLERS: dict[type[m.Event], Callable[[Protocol, Any], None]] = {
    m.Hello: Protocol._hello,
    m.Disconnected: Protocol._disconnected,
    m.Begin: Protocol._begin,
    m.Allocated: Protocol._allocated,
    m.AllocationRefused: Protocol._allocation_refused,
    m.Written: Protocol._written,
    m.Restore: Protocol._restore,
    m.Verified: Protocol._verified,
    m.Corrupt: Protocol._corrupt,
    m.Finished: Protocol._finished,
    m.StopRequested: Protocol._stop,
    m.Tick: Protocol._tick,
}

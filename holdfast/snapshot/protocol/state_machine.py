"""The SMP's decisions as a pure state machine: events in, instructions out, no I/O, no clock.

A rank owns ``keep + 1`` slots: up to ``keep`` CLEAN ones and one that is being filled; one more
while a reader (``leases``) holds a step that newer ones retired. At most one step is in flight on a
node, and it becomes CLEAN on all ranks at the same moment or on none::

    EMPTY --begin--> WRITING --written--> WRITTEN --all ranks written--> CLEAN
      ^                 |                    |                             |
      +-----------------+------ aborted -----+------ retired, corrupt -----+
      +----- released ----- RETIRED <------- the same, while it is read ---+

If several nodes protect each other (``cluster``), a slot is SEALING between WRITTEN and CLEAN,
until every node holds its step. A SEALING slot is complete here, and stays if a rank dies.

**Guarantees**: the CLEAN steps are the same on every rank at every moment. Once a step was
committed, no begin, death or restart removes the newest one; only digests that do not match can. A
slot that a reader holds is overwritten only if memory for another slot is lacking, and the reader
is told so. No reader delays or skips a snapshot. Every message of a rank gets one answer: sizes →
sizes | skipped, begin → granted | skipped | refused, written → committed | aborted, restore,
verified and corrupt → offer | load | lost | fresh, recall → load | older | nothing. Only skip_step
gets none.

**Not covered**: the caller must answer each Allocate before it hands in the next event.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, get_args

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.cluster import StepEvent
from holdfast.snapshot.protocol.cluster_commit import ClusterCommit
from holdfast.snapshot.protocol.leases import Leases
from holdfast.snapshot.protocol.restore_agreement import RestoreAgreement
from holdfast.snapshot.protocol.roster import InvariantError, Roster
from holdfast.snapshot.protocol.schema import Message
from holdfast.snapshot.protocol.slots import NodeState
from holdfast.snapshot.protocol.steps import SlotGrants, Steps

HISTORY_EVENTS = 40
MOST_RANKS = 1024  # of a node


class History:
    """The last events, each with its cause and the instructions that it led to.

    The cause of an event that answers an instruction (``Allocated``) is the event that led to the
    instruction; other events come from outside. Ticks without instructions are left out.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=HISTORY_EVENTS)
        self._last = 0

    def note(self, event: m.Event, now_s: float, out: list[m.Instruction]) -> None:
        """Add an event."""
        if not out and isinstance(event, m.Tick | m.Spare):
            return
        cause = f" (answers #{self._last})" if isinstance(event, m.OfSlot) else ""
        self._last += 1
        led_to = ", ".join(map(_summary, out)) or "nothing"
        what = f"{_summary(event)}{cause} → {led_to}"
        self._lines.append(f"#{self._last} at {now_s:.3f} s: {what}")

    def __str__(self) -> str:
        return "\n".join(self._lines) or "no event"


def _summary(message: Message) -> str:
    told = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, bytes):
            value = f"<{len(value)} bytes>" if value else None
        if value is not None:
            short = str(value)
            told.append(f"{name}={short if len(short) < 100 else f'<{type(value).__name__}>'}")
    return f"{type(message).__name__}({', '.join(told)})"


class Protocol:
    """The state of one node's snapshots.

    Args:
        world_size: the number of ranks on this node.
        keep: the number of clean snapshots kept for each rank, at least 1.
        linger_s: how long to go on without any connected rank, in seconds.
        now: the current time in seconds, on the clock of ``handle``.
    """

    def __init__(self, world_size: int, keep: int, linger_s: float, now: float) -> None:
        self.node = node = NodeState(world_size, keep, now)
        self.linger_s, self._seen_s = linger_s, now
        self.leases = leases = Leases(node)
        self.cluster_commit = cluster = ClusterCommit(node)
        self._grants = grants = SlotGrants(node, leases)
        self._steps = steps = Steps(node, cluster, leases, grants)
        self._restores = restores = RestoreAgreement(node, leases)
        self._history = History()
        self._handlers: dict[type[m.Event], Callable[[Any], None]] = {
            m.Hello: self._hello,
            m.Disconnected: self._disconnected,
            m.Finished: self._finished,
            m.Tick: steps.tick,
            m.Begin: steps.begin,
            m.SkipStep: steps.skip,
            m.Withdraw: steps.withdraw,
            m.Allocated: grants.allocated,
            m.AllocationRefused: steps.allocation_refused,
            m.Written: steps.written,
            m.Digested: steps.digested,
            m.Restore: self._restore,
            m.Verified: restores.verified,
            m.Corrupt: restores.corrupt,
            m.Recall: restores.recall,
            m.Lease: leases.lease,
            m.Copied: leases.copied,
            m.Pin: leases.pin,
            m.Due: leases.wait,
            m.Release: leases.release,
            m.Persisted: leases.record,
            m.Gone: self._gone,
            m.PersistRequested: leases.want,
            m.Join: self._join,
            m.Inventory: lambda event: node.reply(event.rank, "inventory", **cluster.inventory()),
            m.Resume: self._resume,
            m.Sizes: cluster.sized,
            m.Spare: cluster.work,
            m.PeerSize: cluster.peer_sized,
            m.PeerChunk: cluster.chunk,
            **dict.fromkeys((m.PeerLinked, m.PeerUnlinked, m.PeerReplaced), self._peer_link),
            **dict.fromkeys(get_args(StepEvent), self._peer_step),
        }

    def handle(self, event: m.Event, now: float) -> list[m.Instruction]:
        """Handle one event at time ``now`` (seconds); return the instructions, in order.

        Raises:
            ProtocolViolation: the event has fields that no holdfast process sends.
            InvariantError: a decision could not be made; lists the last events.
        """
        node = self.node
        node.out, node.now_s = [], now
        try:
            self._handlers[type(event)](event)
            self._steps.tell_skipped()
        except (AssertionError, AttributeError, LookupError, StopIteration, TypeError) as error:
            self._history.note(event, now, node.out)
            raise InvariantError(f"{error!r}; the last events:\n{self._history}") from error
        if True in [rank.connected for rank in node.ranks]:
            self._seen_s = now
        if now - self._seen_s >= self.linger_s:
            node.out.append(m.Stop(f"no trainer was connected for {self.linger_s:g} s"))
        self._history.note(event, now, node.out)
        return node.out

    def unfit(self, hello: m.Hello) -> str:
        """Return why this trainer cannot use this SMP; empty if it can."""
        world_size, keep = len(self.node.ranks), self.node.keep
        if self._is_superseded(hello):
            return ""
        if hello.world_size != world_size and any(rank.connected for rank in self.node.ranks):
            return (
                f"the SMP serves {world_size} local ranks that are still connected, this run has "
                f"{hello.world_size}: end them first, or use another run_dir"
            )
        if hello.keep != keep:
            return (
                f"the SMP was started with keep={keep}, this run asks for {hello.keep}: "
                f"use keep={keep}, stop the SMP or use another run_dir"
            )
        if hello.rank < hello.world_size <= MOST_RANKS:
            return ""
        return f"local rank {hello.rank} does not exist among {hello.world_size}: check LOCAL_RANK"

    def _is_superseded(self, hello: m.Hello) -> bool:
        """Return true if what this node holds is a part of what several nodes held together."""
        several = self.cluster_commit.cluster is not None
        return several and hello.alone and not any(rank.connected for rank in self.node.ranks)

    def state(self) -> str:
        """Return the state of this node, in the terms of REFT.

        UNHEALTHY: a rank is missing. SNAP: a step is being copied, or waits for other nodes. CLEAN:
        nothing is in flight and there is a clean step. HEALTHY: there is no clean step yet.
        """
        if not all(rank.connected or rank.finished for rank in self.node.ranks):
            return "UNHEALTHY"
        if self.node.in_flight() is not None or self.cluster_commit.pending():
            return "SNAP"
        return "HEALTHY" if self.node.newest() is None else "CLEAN"

    def status(self) -> dict[str, object]:
        """Return steps, slots and counters as JSON-ready values."""
        node, ranks = self.node, self.node.ranks
        times = [rank.copy_us for rank in ranks]
        nbytes = sum(rank.asked.nbytes for rank in ranks if rank.asked is not None)
        return {
            "clean": [list(rank.clean()) for rank in ranks],
            "slots": [[slot.state.value for slot in rank.slots] for rank in ranks],
            "steps": [[slot.step for slot in rank.slots] for rank in ranks],
            "bytes": sum(slot.capacity for rank in ranks for slot in rank.slots),
            "connected": [rank.connected for rank in ranks],
            "finished": [rank.finished for rank in ranks],
            "newest": node.newest(),
            "state": self.state(),
            **{name: getattr(node, name) for name in ("commits", "aborts", "keep")},
            "stall_s": max(rank.stall_us for rank in ranks) / 1e6,
            "copy_bytes_s": nbytes / (max(times) / 1e6) if all(times) else None,
            "cluster": self.cluster_commit.status(),
            **self.leases.status(),
        }

    def _hello(self, event: m.Hello) -> None:
        assert not self.unfit(event)
        if self._is_superseded(event):
            self.node.out.append(m.Stop("a run of this node alone goes on from disk"))
            return
        if event.world_size != len(self.node.ranks):
            self.node.resize(event.world_size)
        rank = self.node.ranks[event.rank]
        if rank.connected:
            self._leave(event.rank)
        rank.connected, rank.finished = True, False
        former = bool(self.node.former)
        self.node.reply(event.rank, "welcome", newest=self.node.newest(), former=former)

    def _disconnected(self, event: m.Disconnected) -> None:
        self._leave(event.rank)
        if not any(rank.connected or rank.finished for rank in self.node.ranks):
            # Perhaps no trainer will ever connect again, so the newest step is written to disk now.
            self.leases.want()

    def _leave(self, index: int) -> None:
        rank = self.node.ranks[index]
        rank.connected, rank.waiting, rank.sizing, rank.skipped = False, None, None, -1
        self._restores.leave(index)
        self._steps.abort(f"local rank {index} left")
        self._grants.revoke(index)

    def _finished(self, event: m.Finished) -> None:
        self.node.ranks[event.rank].finished = True
        self.node.reply(event.rank, "bye")
        if all(rank.finished for rank in self.node.ranks):
            self.node.out.append(m.Stop("all ranks finished"))

    def _restore(self, event: m.Restore) -> None:
        rank = self.node.ranks[event.rank]
        rank.waiting, rank.lent, rank.skipped = None, None, -1
        self._steps.abort(f"local rank {event.rank} restores")
        self._restores.restore(event.rank, event.before)

    def _gone(self, event: m.Gone) -> None:
        self.leases.gone(event.holder)
        self._grants.free_surplus()

    def _join(self, event: m.Join) -> None:
        roster = Roster.parse(event.roster)
        if roster.epoch > self.cluster_commit.epoch:
            # Only the first message of an epoch does so, because steps of it may begin after that.
            self._steps.abort_all(f"epoch {roster.epoch} begins")
            self.leases.join()
        self.cluster_commit.join(roster, event.again)
        self.node.reply(event.rank, "joined", epoch=self.cluster_commit.epoch)

    def _resume(self, event: m.Resume) -> None:
        self.leases.resume(event)
        self.cluster_commit.resume(event)
        self.node.reply(event.rank, "resumed", step=event.step)

    def _peer_link(self, event: m.PeerLinked | m.PeerUnlinked | m.PeerReplaced) -> None:
        if (cluster := self.cluster_commit.cluster) is None:
            return
        match event:
            case m.PeerLinked():
                cluster.linked(event.node)
            case m.PeerUnlinked():
                cluster.unlinked(event.node)
            case m.PeerReplaced() if event.epoch == cluster.roster.epoch:
                cluster.replaced(event.node)

    def _peer_step(self, event: StepEvent) -> None:
        self.cluster_commit.joined.hear(event)
        self._steps.settle()

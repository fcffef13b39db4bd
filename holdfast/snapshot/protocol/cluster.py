"""The exchange between the SMPs of a parity group that makes a step safe, decided without I/O.

A node *holds* a step once its own ranks have written it and the manifests that it mirrors for other
nodes' ranks have arrived. It announces that to its group. A step is *sealed* once every node of the
group has announced it, and *committed* once all groups have sealed it (``commit_tree``). Only then
does a node give up an older step::

    local ranks wrote t -> mirrors of t sent and received -> t announced -> all announced: t sealed

**Guarantees**: the newest step that any node has seen committed is held by every node, with all its
mirrors, whichever node dies at whatever moment, because a node gives t up only for a newer step
that all hold. Every restore begins a new epoch, so that announcements of steps that were rolled
back no longer count. A step that some node skipped (its copy was torn or too late) is given up as
soon as that node says so, or has written a later one.

**If an SMP is replaced** while trainers go on, it may have announced a step to some nodes and not
to all. Those that lack the announcement will never receive it, but another node may have seen the
step sealed, and given up older ones once it was committed. So the step is no longer waited for, and
is kept until a newer one is committed.

If the nodes hold different states, a node holds a step only after all blocks that other nodes send
for its parities (``parity_stream``) were added.

**Replicas that diverged** are detected with the announcements: a node that computed a parity states
the digests of the blocks that it read, and the owners of these blocks state theirs.

**Checkpoints** on disk are agreed on (``checkpoint_schedule``) by what is announced with a step.
"""

from collections.abc import Iterable

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk
from holdfast.snapshot.protocol.cluster_steps import Held, Own, Sizes, StepRecords
from holdfast.snapshot.protocol.commit_tree import CommitTree, TreeEvent
from holdfast.snapshot.protocol.parity_stream import ParitySender
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.protocol.slots import NodeState

# Digest and bytes of the manifests of other nodes' ranks that are kept here, by rank and step.
StepEvent = TreeEvent | m.PeerWrote | m.PeerMirror | m.PeerHolds
Mirrors = dict[tuple[int, Stamp], tuple[str, bytes]]


class Cluster:
    """One node's part in sealing the steps of one epoch.

    Of the ``former`` epoch it keeps the mirrors; announcements of that epoch do not count any more.
    ``again`` is true if this SMP took the place of another one in this epoch.
    """

    def __init__(
        self, roster: Roster, node: NodeState, former: "Cluster | None" = None, again: bool = False
    ) -> None:
        self.roster, self._again, self._node = roster, again, node
        self.committed: Stamp | None = former.committed if former else None
        self.mirrors: Mirrors = former.mirrors if former else {}
        self.steps = StepRecords(roster)
        self.tree = CommitTree(roster, self.steps, node)
        self.sizes = Sizes()
        self.sender = ParitySender()
        self._linked: set[int] = set()
        self._met: set[int] = set()

    def linked(self, node: int) -> None:
        """Say what a node may have missed before its link was established."""
        self._linked.add(node)
        self._met.add(node)
        if self._again:
            self._node.out.append(m.ToPeer(node, "replaced", {"epoch": self.roster.epoch}))
        self.tree.linked(node)
        if node not in self.roster.group:
            return
        for step, rank, nbytes in self.sizes.told(node):
            self._node.tell([node], "size", step, rank=rank, nbytes=nbytes)
        for step in sorted(self.steps.own):
            self._tell_written(node, step)
            self._start_transfers(node, step)
            if self.steps.is_held_here(step):
                self._announce([node], step)
        if self.roster.node in self.steps.skipped:
            self._node.tell([node], "passed", self.steps.skipped[self.roster.node])

    def unlinked(self, node: int) -> None:
        """Note that the link to ``node`` is gone."""
        self._linked.discard(node)

    def away(self) -> tuple[int, ...]:
        """Return the nodes of the group to which a link existed in this epoch, and does not now."""
        return tuple(sorted((self._met - self._linked) & set(self.roster.group)))

    def replaced(self, node: int) -> None:
        """Forget which steps ``node`` wrote or skipped, because another SMP acts for it now."""
        self.tree.replaced(node)
        if node not in self.roster.group:
            return
        self.steps.replaced.add(node)
        self.steps.wrote.pop(node, None)
        self.steps.skipped.pop(node, None)

    def skip_to(self, step: int) -> None:
        """Tell the group that this node skips each step up to ``step`` that it has not written."""
        self.steps.skipped[self.roster.node] = step
        self._node.tell(self.roster.members, "passed", step)
        self.tree.settle(passed=True)

    def skipped(self) -> int:
        """Return the step up to which this node skips what it has not written, or -1."""
        return self.steps.skipped.get(self.roster.node, -1)

    def written(self, step: int, own: Iterable[Own]) -> None:
        """Send out the mirrors of a step that all local ranks have written."""
        self.steps.own[step] = tuple(own)
        self.steps.wrote[self.roster.node].add(step)
        for rank, part in enumerate(self.steps.own[step], self.roster.first_rank):
            for transfer in part.transfers:
                self.sender.add(step, self.roster.node_of(transfer.keeper), (rank, transfer))
        for node in self.roster.members:
            self._start_transfers(node, step)
            self._tell_written(node, step)
        self.tree.settle()

    def hear(self, event: StepEvent) -> None:
        """Record a message about a step; of another epoch's messages only mirrors are accepted."""
        node, steps, current = event.node, self.steps, event.epoch == self.roster.epoch
        match event:
            case m.PeerMirror() if event.rank in self.roster.mirrored_ranks:
                stamp = Stamp(event.epoch, event.step)
                self.mirrors[event.rank, stamp] = event.digest, event.manifest
            case m.PeerWrote() if current:
                steps.wrote[node].add(event.step)
                self._start_transfers(node, event.step)
            case m.PeerPassed() if current and node in self.roster.group:
                steps.skipped[node] = max(event.step, steps.skipped.get(node, -1))
            case m.PeerHolds() if current:
                steps.announced[event.step][node] = Held.parse(event)
                self.sender.done(event.step, node)
            case _ if current:
                assert not isinstance(event, m.PeerMirror | m.PeerWrote | m.PeerHolds)
                self.tree.hear(event)
                return
        self.tree.settle(passed=isinstance(event, m.PeerPassed))

    def announce(self, step: int, disk: Disk | None) -> None:
        """Announce a step with the state of the disk, if it is held here and not announced yet."""
        mirrored, stamp = self.roster.mirrored_ranks, Stamp(self.roster.epoch, step)
        complete = all((rank, stamp) in self.mirrors for rank in mirrored)
        if complete and not self.steps.is_held_here(step):
            parts = enumerate(self.steps.own[step], self.roster.first_rank)
            held = Held({rank: part.blocks for rank, part in parts}, disk)
            self.steps.announced[step][self.roster.node] = held
            self._announce(self.roster.members, step)

    def has_announced(self, stamp: tuple[int, int]) -> bool:
        """Return true if this node has announced a step of this epoch."""
        return stamp[0] == self.roster.epoch and self.steps.is_held_here(stamp[1])

    def commit(self, step: int) -> None:
        """Note that a step was committed, and stop sending it and older ones of this epoch."""
        self.committed = Stamp(self.roster.epoch, step)
        self.steps.forget_before(step)
        self.sender.drop(range(step + 1))

    def forget_mirrors_before(self, oldest: Stamp) -> None:
        """Drop the manifests of steps before the oldest that is still held here."""
        for key in [key for key in self.mirrors if key[1] < oldest]:
            del self.mirrors[key]

    def sized(self, rank: int, event: m.Sizes) -> None:
        """Send the size of a local rank's state to the nodes that need it."""
        nodes = {self.roster.node_of(other) for other in event.ranks} - {self.roster.node}
        self.sizes.know(event.step, rank, event.nbytes, nodes)
        self._node.tell(nodes, "size", event.step, rank=rank, nbytes=event.nbytes)

    def status(self) -> dict[str, object]:
        """Return the epoch, the nodes that are connected and the losses that can be survived."""
        offline = [node for node in self.roster.members if node not in self._linked]
        left = self.roster.parities - len(offline)
        late_step, late_nodes = self.tree.late
        return {
            "epoch": self.roster.epoch,
            "node": self.roster.node,
            "nodes": self.roster.run_nodes,
            "group": list(self.roster.group),
            "weak_domains": list(self.roster.weak_domains),
            "parities": self.roster.parities,
            "offline": offline,
            "committed": self.committed.step if self.committed else None,
            "late": list(late_nodes) if late_step > self.tree.committed else [],
            "survivable": max(0, left) if self.committed else 0,
            "mirror_bytes": sum(len(blob) for _, blob in self.mirrors.values()),
        }

    def _start_transfers(self, node: int, step: int) -> None:
        # A node clears its parities before it reports that it wrote the step.
        if step in self.steps.wrote[node] and node not in self.steps.announced.get(step, {}):
            self.sender.start(step, node)

    def _tell_written(self, node: int, step: int) -> None:
        self._node.tell([node], "wrote", step)
        for number, own in enumerate(self.steps.own[step]):
            if node in self.roster.mirror_nodes[number]:
                about = {"rank": self.roster.first_rank + number, "digest": own.digest}
                self._node.tell([node], "mirror", step, own.manifest, **about)

    def _announce(self, nodes: Iterable[int], step: int) -> None:
        held = self.steps.announced[step][self.roster.node]
        self._node.tell(nodes, "holds", step, held.encoded())

"""The exchange among the SMPs of several nodes that makes a step safe, decided without I/O.

A step is *held* by a node once its own ranks have written it and the manifests of the other nodes'
ranks that it mirrors have arrived; the node announces that to all. It is *sealed* once every node
announced it, and only then does a node give an older step away::

    local ranks wrote t -> mirrors of t sent and received -> t announced -> all announced: t sealed

**Guarantees**: the newest step that any node has seen sealed is held by every node, with all its
mirrors, whoever dies at whatever moment: a node gives t up only for a newer step that all hold.
Epochs order what different sets of processes did: every restore begins a new one, so that no
announcement of what was rolled back counts. A step that some node skipped (its copy was torn or
came too late) is given up as soon as that node says so, or has written a later one.

**An SMP that was replaced** while trainers went on may have told some nodes that it holds a step,
and not all. What it did not tell this node will not come; but another node may have seen that step
sealed, and given older ones away: the step is not waited for any more, and kept until a newer one
is sealed.

Where nodes hold different states, a step is held only once all blocks that others send for the
parities here (``parity_stream``) were added to them, too.

**Replicas that diverged** are found on the way: a node that computed a parity says which digests
the blocks had from which it was computed, and their owners say which they have.

**Checkpoints** on disk are agreed upon (``checkpoint_schedule``) by what is announced with a step.
"""

from collections import defaultdict
from collections.abc import Iterable

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.checkpoint_schedule import Disk
from holdfast.snapshot.protocol.cluster_steps import Held, Own, StepRecords
from holdfast.snapshot.protocol.parity_stream import ParitySender
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.protocol.sizes import Sizes


class Mirrors:
    """The manifests of other nodes' ranks that are kept here: digest and bytes."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[Stamp, tuple[str, bytes]]] = defaultdict(dict)

    def keep(self, event: m.PeerMirror) -> None:
        """Keep a manifest."""
        stamp = Stamp(event.epoch, event.step)
        self._kept[event.rank][stamp] = (event.digest, event.manifest)

    def get(self, rank: int, stamp: Stamp) -> tuple[str, bytes] | None:
        """Return digest and bytes of a rank's manifest, if it is kept here."""
        return self._kept.get(rank, {}).get(stamp)

    def forget_before(self, oldest: Stamp) -> None:
        """Drop the manifests of steps before the oldest that is still held here."""
        for kept in self._kept.values():
            for stamp in [stamp for stamp in kept if stamp < oldest]:
                del kept[stamp]

    def digests(self) -> dict[Stamp, dict[int, str]]:
        """Return the digests of all manifests, by step and rank."""
        found: dict[Stamp, dict[int, str]] = defaultdict(dict)
        for rank, kept in self._kept.items():
            for stamp, (digest, _) in kept.items():
                found[stamp][rank] = digest
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(len(blob) for kept in self._kept.values() for _, blob in kept.values())


class Cluster:
    """One node's part in sealing the steps of one epoch.

    Args:
        roster: of this epoch.
        former: of the epoch before: its mirrors stay, its announcements do not count any more.
    """

    def __init__(self, roster: Roster, former: "Cluster | None" = None) -> None:
        self.roster = roster
        self.sealed: Stamp | None = former.sealed if former else None
        self.mirrors: Mirrors = former.mirrors if former else Mirrors()
        self.steps = StepRecords(roster)
        self.sizes = Sizes()
        self.sender = ParitySender()
        self._linked: set[int] = set()
        self._met: set[int] = set()

    def linked(self, node: int) -> list[m.Instruction]:
        """Send a node that can be reached again whatever it may have missed."""
        self._linked.add(node)
        self._met.add(node)
        out = [self._size(node, *told) for told in self.sizes.told(node)]
        for step in sorted(self.steps.own):
            out += self._parts(node, step)
            self._start_transfers(node, step)
            if self.steps.is_held_here(step):
                out.append(self._announcement(node, step))
        if self.roster.node in self.steps.skipped:
            out.append(self._skip(node))
        return out

    def unlinked(self, node: int) -> None:
        """Note that the link to ``node`` is gone."""
        self._linked.discard(node)

    def away(self) -> tuple[int, ...]:
        """Return the other nodes that a link stood to in this epoch, and stands no more."""
        return tuple(sorted(self._met - self._linked))

    def replaced(self, node: int) -> None:
        """Forget what ``node`` wrote and did not announce: another SMP speaks for it."""
        self.steps.replaced.add(node)
        self.steps.wrote.pop(node, None)
        self.steps.skipped.pop(node, None)

    def skip_to(self, step: int) -> list[m.Instruction]:
        """Tell all that this node writes no step up to ``step`` that it has not written."""
        if self.steps.skipped.get(self.roster.node, -1) >= step:
            return []
        self.steps.skipped[self.roster.node] = step
        return [self._skip(node) for node in self.roster.peers]

    def written(self, step: int, own: Iterable[Own]) -> list[m.Instruction]:
        """Send out the mirrors of a step that all local ranks have written."""
        self.steps.own[step] = tuple(own)
        self.steps.wrote[self.roster.node].add(step)
        for rank, part in enumerate(self.steps.own[step], self.roster.first_rank):
            for transfer in part.transfers:
                self.sender.add(step, self.roster.node_of(transfer.keeper), (rank, transfer))
        for node in self.roster.peers:
            self._start_transfers(node, step)
        return [out for node in self.roster.peers for out in self._parts(node, step)]

    def hear(self, event: m.PeerWrote | m.PeerPassed | m.PeerMirror | m.PeerHolds) -> None:
        """Note what another node says of a step; only mirrors may be of another epoch."""
        node, steps, current = event.node, self.steps, event.epoch == self.roster.epoch
        match event:
            case m.PeerMirror() if event.rank in self.roster.mirrored_ranks:
                self.mirrors.keep(event)
            case m.PeerWrote() if current:
                steps.wrote[node].add(event.step)
                self._start_transfers(node, event.step)
            case m.PeerPassed() if current:
                steps.skipped[node] = max(event.step, steps.skipped.get(node, -1))
            case m.PeerHolds() if current:
                steps.announced[event.step][node] = Held.parse(event)
                self.sender.done(event.step, node)

    def announce(self, step: int, disk: Disk | None) -> list[m.Instruction]:
        """Tell all that a step is held here, if it is and they do not know; and of the disk."""
        mirrored, stamp = self.roster.mirrored_ranks, Stamp(self.roster.epoch, step)
        complete = all(self.mirrors.get(rank, stamp) for rank in mirrored)
        if self.steps.is_held_here(step) or not complete:
            return []
        parts = enumerate(self.steps.own[step], self.roster.first_rank)
        held = Held({rank: part.blocks for rank, part in parts}, disk)
        self.steps.announced[step][self.roster.node] = held
        return [self._announcement(node, step) for node in self.roster.peers]

    def has_announced(self, stamp: tuple[int, int]) -> bool:
        """Whether this node has said, in this epoch, that it holds a step."""
        return stamp[0] == self.roster.epoch and self.steps.is_held_here(stamp[1])

    def seal(self, step: int) -> None:
        """Note that a step was sealed: older ones of this epoch need not be told of any more."""
        self.sealed = Stamp(self.roster.epoch, step)
        self.steps.forget_before(step)
        self.sender.drop(range(step + 1))

    def sized(self, rank: int, event: m.Sizes) -> list[m.Instruction]:
        """Tell the nodes that must know it the size of a local rank's state."""
        nodes = {self.roster.node_of(other) for other in event.ranks} - {self.roster.node}
        self.sizes.know(event.step, rank, event.nbytes, nodes)
        return [self._size(node, event.step, rank, event.nbytes) for node in sorted(nodes)]

    def peer_sized(self, event: m.PeerSize) -> None:
        """Note the size of the state of another node's rank."""
        if event.epoch == self.roster.epoch:
            self.sizes.know(event.step, event.rank, event.nbytes)

    def status(self) -> dict[str, object]:
        """Return the epoch, who is connected and what is survivable, as JSON-ready values."""
        offline = [node for node in self.roster.peers if node not in self._linked]
        left = self.roster.parities - len(offline)
        return {
            "epoch": self.roster.epoch,
            "node": self.roster.node,
            "nodes": len(self.roster.addresses),
            "parities": self.roster.parities,
            "offline": offline,
            "sealed": self.sealed.step if self.sealed else None,
            "survivable": max(0, left) if self.sealed else 0,
            "mirror_bytes": self.mirrors.nbytes,
        }

    def _start_transfers(self, node: int, step: int) -> None:
        # Parities are cleared once they were written, and again if that is said twice.
        if step in self.steps.wrote[node] and node not in self.steps.announced.get(step, {}):
            self.sender.start(step, node)

    def _fields(self, step: int, **fields: object) -> dict[str, object]:
        return {"epoch": self.roster.epoch, "step": step, **fields}

    def _skip(self, node: int) -> m.Instruction:
        return m.ToPeer(node, "passed", self._fields(self.steps.skipped[self.roster.node]))

    def _size(self, node: int, step: int, rank: int, nbytes: int) -> m.Instruction:
        return m.ToPeer(node, "size", self._fields(step, rank=rank, nbytes=nbytes))

    def _parts(self, node: int, step: int) -> list[m.Instruction]:
        out: list[m.Instruction] = [m.ToPeer(node, "wrote", self._fields(step))]
        for number, own in enumerate(self.steps.own[step]):
            if node in self.roster.mirror_nodes[number]:
                rank = self.roster.first_rank + number
                fields = self._fields(step, rank=rank, digest=own.digest)
                out.append(m.ToPeer(node, "mirror", fields, own.manifest))
        return out

    def _announcement(self, node: int, step: int) -> m.Instruction:
        held = self.steps.announced[step][self.roster.node]
        return m.ToPeer(node, "holds", self._fields(step), held.encoded())

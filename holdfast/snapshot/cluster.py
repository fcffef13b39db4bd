"""What the SMPs of several nodes owe each other before a step counts as safe, decided without I/O.

A step is *held* by a node once its own ranks have written it and the manifests of its wards, other
nodes' ranks that it keeps the mirror of, have arrived; the node announces that to all. It is
*sealed* once every node announced it, and only then does a node give an older step away::

    local ranks wrote t -> mirrors of t sent and received -> t announced -> all announced: t sealed

**Guarantees**: the newest step that any node has seen sealed is held by every node, with all its
mirrors, whoever dies at whatever moment: a node gives t up only for a newer step that all hold.
Epochs order what different sets of processes did: every restore begins a new one, so that no
announcement of what was rolled back counts. A step that some node passed over (its copy was torn or
skipped) is given up as soon as that node says so, or has written a later one.

**An SMP that was replaced** while trainers went on may have told some nodes that it holds a step,
and not all. What it did not tell this node will not come; but another node may have seen that step
sealed, and given older ones away: it is waited for no more, and kept until a newer one is sealed.

Where nodes hold different states, a step is held only once all that others send for the parities
here (``shipping``) was added to them, too.

**Replicas that diverged** are found on the way: a node that computed a parity says which digests
the blocks had from which it was computed, and their owners say which they have.

**Checkpoints** on disk are agreed upon (``disks``) by what is announced with a step.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.snapshot import messages as m
from holdfast.snapshot.cargo import Shipment
from holdfast.snapshot.disks import Disk
from holdfast.snapshot.shipping import Outgoing, Piece
from holdfast.snapshot.sizes import Sizes


class Stamp(NamedTuple):
    """A step of one epoch; later epochs are newer, whatever the step."""

    epoch: int
    step: int


@dataclass(frozen=True)
class Roster:
    """The nodes of a run and what this one does for others, as the ranks agreed on it.

    Attributes:
        epoch: counts the agreements of this run.
        node: which of them this is.
        addresses: host and port of every node's SMP.
        secret: shared by them and their ranks; nobody else is served.
        parities: nodes that may be lost, 1 or 2.
        first_rank: this node's ranks begin there.
        keepers: for every local rank, the nodes that mirror its manifest.
        wards: the ranks of other nodes whose manifests are mirrored here.
        sets: for every local rank, the stripe sets (``recovery``) of its sharding group.
    """

    epoch: int
    node: int
    addresses: tuple[tuple[str, int], ...]
    secret: str
    parities: int
    first_rank: int
    keepers: tuple[tuple[int, ...], ...]
    wards: tuple[int, ...]
    sets: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Roster":
        """The roster that a frame states.

        Raises:
            ProtocolViolation: a field is missing or odd.
        """
        try:
            return cls(
                epoch=int(given["epoch"]),
                node=int(given["node"]),
                addresses=tuple((str(host), int(port)) for host, port in given["addresses"]),
                secret=str(given["secret"]),
                parities=int(given["parities"]),
                first_rank=int(given["first_rank"]),
                keepers=tuple(tuple(map(int, nodes)) for nodes in given["keepers"]),
                wards=tuple(map(int, given["wards"])),
                sets=tuple(
                    tuple(tuple(map(int, ranks)) for ranks in sets) for sets in given["sets"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise m.ProtocolViolation(f"the roster cannot be read: {error!r}") from error

    @property
    def peers(self) -> tuple[int, ...]:
        """The other nodes."""
        return tuple(node for node in range(len(self.addresses)) if node != self.node)

    def node_of(self, rank: int) -> int:
        """Where a rank of the run lives."""
        return rank // len(self.keepers)


@dataclass(frozen=True)
class Own:
    """What one local rank wrote of a step: its manifest, and the digests it vouches for."""

    digest: str
    manifest: bytes
    claims: tuple[str, ...] = ()  # of its own blocks, by stripe
    seen: tuple[tuple[int, int, str], ...] = ()  # owner's rank, its claim's number, digest
    shipments: tuple[Shipment, ...] = ()


class Said(NamedTuple):
    """What a rank told all of a step: ``claims`` and ``seen``, as in ``Own``."""

    claims: tuple[str, ...]
    seen: tuple[tuple[int, int, str], ...]

    @classmethod
    def parse(cls, given: Any) -> "Said":
        """As a frame states it."""
        claims, seen = given
        rows = tuple((int(rank), int(block), str(digest)) for rank, block, digest in seen)
        return cls(tuple(map(str, claims)), rows)


class Held(NamedTuple):
    """What a node announces with a step: of each of its ranks, and of its disk (None: unknown)."""

    ranks: dict[int, Said]
    disk: Disk | None = None

    def encoded(self) -> bytes:
        """As ``parse`` reads it."""
        return json.dumps(self).encode()

    @classmethod
    def parse(cls, event: m.PeerHolds) -> "Held":
        """As another node announced it.

        Raises:
            ProtocolViolation: it cannot be read.
        """
        try:
            ranks, disk = json.loads(event.manifest)
            said = {int(rank): Said.parse(given) for rank, given in ranks.items()}
            return cls(said, Disk.parse(disk) if disk is not None else None)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise m.ProtocolViolation(f"node {event.node} announced {error}") from error


class Cluster:
    """One node's part in sealing steps.

    Args:
        roster: of the present epoch.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.sealed: Stamp | None = None
        self._mirrors: dict[int, dict[Stamp, tuple[str, bytes]]] = defaultdict(dict)
        self._own: dict[Stamp, tuple[Own, ...]] = {}
        self._announced: dict[Stamp, dict[int, Held]] = defaultdict(dict)
        self._wrote: dict[int, set[int]] = defaultdict(set)
        self._passed: dict[int, int] = {}
        self._replaced: set[int] = set()
        self._linked: set[int] = set()
        self._met: set[int] = set()
        self.sizes = Sizes()
        self._outgoing = Outgoing()

    def join(self, roster: Roster) -> None:
        """Go over to a new epoch: mirrors stay, what was announced counts no more."""
        self.roster = roster
        self._own.clear()
        self._announced.clear()
        self._wrote.clear()
        self._passed.clear()
        self._replaced.clear()
        self._linked.clear()
        self._met.clear()
        self.sizes = Sizes()
        self._outgoing = Outgoing()

    def linked(self, node: int) -> list[m.Instruction]:
        """A link to ``node`` stands: whatever it may have missed is sent."""
        self._linked.add(node)
        self._met.add(node)
        out = [self._size(node, *told) for told in self.sizes.told(node)]
        for stamp in sorted(self._own):
            out += self._sent_to(node, stamp)
            self._ship(node, stamp)
            if self.roster.node in self._announced[stamp]:
                out.append(self._announcement(node, stamp))
        if self.roster.node in self._passed:
            out.append(self._pass(node))
        return out

    def replaced(self, node: int) -> None:
        """Another SMP speaks for ``node``: of what the former wrote, only what it announced is."""
        self._replaced.add(node)
        self._wrote.pop(node, None)
        self._passed.pop(node, None)

    def pass_over(self, step: int) -> list[m.Instruction]:
        """This node will write no step up to ``step`` that it has not written yet."""
        if self._passed.get(self.roster.node, -1) >= step:
            return []
        self._passed[self.roster.node] = step
        return [self._pass(node) for node in self.roster.peers]

    def _pass(self, node: int) -> m.Instruction:
        step = self._passed[self.roster.node]
        return m.ToPeer(node, "passed", Stamp(self.roster.epoch, step)._asdict())

    def passed(self, event: m.PeerPassed) -> None:
        """Another node will write no step up to this one that it has not written yet."""
        if event.epoch == self.roster.epoch:
            self._passed[event.node] = max(event.step, self._passed.get(event.node, -1))

    def unlinked(self, node: int) -> None:
        """The link to ``node`` is gone."""
        self._linked.discard(node)

    def away(self) -> tuple[int, ...]:
        """The other nodes that a link stood to in this epoch, and stands no more."""
        return tuple(sorted(self._met - self._linked))

    def offline(self) -> tuple[int, ...]:
        """The other nodes that no link stands to."""
        return tuple(node for node in self.roster.peers if node not in self._linked)

    def written(self, step: int, own: Iterable[Own]) -> list[m.Instruction]:
        """All local ranks have written a step of this epoch: its mirrors go out."""
        stamp = Stamp(self.roster.epoch, step)
        self._own[stamp] = tuple(own)
        self._wrote[self.roster.node].add(step)
        for number, said in enumerate(self._own[stamp]):
            for shipment in said.shipments:
                piece = self.roster.first_rank + number, shipment
                self._outgoing.add(step, self.roster.node_of(shipment.keeper), piece)
        for node in self.roster.peers:
            self._ship(node, stamp)
        return [out for node in self.roster.peers for out in self._sent_to(node, stamp)]

    def wrote(self, event: m.PeerWrote) -> None:
        """All ranks of another node have written a step of this epoch."""
        if event.epoch == self.roster.epoch:
            self._wrote[event.node].add(event.step)
            self._ship(event.node, Stamp(event.epoch, event.step))

    def _ship(self, node: int, stamp: Stamp) -> None:
        # Parities are cleared once they were written, and again if that is said twice.
        ready = stamp.step in self._wrote.get(node, ())
        if ready and node not in self._announced.get(stamp, {}):
            self._outgoing.start(stamp.step, node)

    def next_chunk(self, node: int) -> tuple[int, Piece] | None:
        """What goes to a node next: the step, whose bytes, and which; None: nothing."""
        return self._outgoing.next(node)

    def undeliverable(self, step: int) -> None:
        """What was to be sent of a step is gone here."""
        self._outgoing.drop(range(step, step + 1))

    def sized(self, rank: int, event: m.Sizes) -> list[m.Instruction]:
        """A rank of this node says how large its state is: those that must know are told."""
        nodes = {self.roster.node_of(other) for other in event.ranks} - {self.roster.node}
        self.sizes.know(event.step, rank, event.nbytes, nodes)
        return [self._size(node, event.step, rank, event.nbytes) for node in sorted(nodes)]

    def size(self, event: m.PeerSize) -> None:
        """A rank of another node says how large its state is."""
        if event.epoch == self.roster.epoch:
            self.sizes.know(event.step, event.rank, event.nbytes)

    def _size(self, node: int, step: int, rank: int, nbytes: int) -> m.Instruction:
        stamp = Stamp(self.roster.epoch, step)
        return m.ToPeer(node, "size", {"rank": rank, **stamp._asdict(), "nbytes": nbytes})

    def all_wrote(self, step: int) -> bool:
        """Whether every node has written a step of this epoch."""
        nodes = range(len(self.roster.addresses))
        return all(step in self._wrote.get(node, ()) for node in nodes)

    def passed_over(self, step: int) -> bool:
        """Whether a node will not write a step of this epoch any more, and has not."""
        return any(self._passes(node, step) for node in range(len(self.roster.addresses)))

    def is_void(self, step: int) -> bool:
        """Whether it is known, too, that no node can have seen it sealed."""
        nodes = set(range(len(self.roster.addresses)))
        here = self.announced(Stamp(self.roster.epoch, step))
        firm = nodes - self._replaced if here else nodes
        return any(self._passes(node, step) for node in firm)

    def _passes(self, node: int, step: int) -> bool:
        wrote = self._wrote.get(node, set())
        last = max(self._passed.get(node, -1), max(wrote, default=-1))
        return step not in wrote and step <= last

    def mirror(self, event: m.PeerMirror) -> None:
        """Keep the manifest of another node's rank."""
        if event.rank in self.roster.wards:
            stamp = Stamp(event.epoch, event.step)
            self._mirrors[event.rank][stamp] = (event.digest, event.manifest)

    def announce(self, step: int, disk: Disk | None) -> list[m.Instruction]:
        """Tell all that a step is held here, if it is and they do not know; and of the disk."""
        stamp = Stamp(self.roster.epoch, step)
        told = self.roster.node in self._announced[stamp]
        if told or not all(stamp in self._mirrors[rank] for rank in self.roster.wards):
            return []
        ranks = {
            self.roster.first_rank + number: Said(own.claims, own.seen)
            for number, own in enumerate(self._own[stamp])
        }
        self._announced[stamp][self.roster.node] = Held(ranks, disk)
        return [self._announcement(node, stamp) for node in self.roster.peers]

    def holds(self, event: m.PeerHolds) -> None:
        """Another node holds a step of this epoch."""
        if event.epoch == self.roster.epoch:
            self._announced[Stamp(event.epoch, event.step)][event.node] = Held.parse(event)
            self._outgoing.done(event.step, event.node)

    def is_sealed(self, step: int) -> bool:
        """Whether every node announced a step of this epoch."""
        stamp = Stamp(self.roster.epoch, step)
        return len(self._announced[stamp]) == len(self.roster.addresses)

    def disks(self, step: int) -> list[Disk | None]:
        """What every node said of its disk with a sealed step: all nodes find the same."""
        return [held.disk for held in self._announced[Stamp(self.roster.epoch, step)].values()]

    def diverged(self, step: int) -> list[tuple[int, int, int]]:
        """Blocks of which the owner's bytes differ from another rank's replica of them.

        Every node finds the same, once all have announced the step.

        Returns:
            For each the rank that saw it, the rank that owns it, and its number there.
        """
        stamp = Stamp(self.roster.epoch, step)
        told = {
            rank: said
            for held in self._announced[stamp].values()
            for rank, said in held.ranks.items()
        }
        return [
            (witness, owner, block)
            for witness, said in sorted(told.items())
            for owner, block, digest in said.seen
            if owner in told and told[owner].claims[block : block + 1] != (digest,)
        ]

    def seal(self, step: int) -> None:
        """A step was sealed: older ones of this epoch need not be told of any more."""
        self.sealed = Stamp(self.roster.epoch, step)
        for known in (self._own, self._announced):
            for stamp in [stamp for stamp in known if stamp < self.sealed]:
                del known[stamp]
        self._outgoing.drop(range(step + 1))
        for wrote in self._wrote.values():
            wrote -= {old for old in wrote if old < step and old != max(wrote)}

    def forget(self, oldest: Stamp) -> None:
        """Drop the mirrors of steps before the oldest that is still held here."""
        for kept in self._mirrors.values():
            for stamp in [stamp for stamp in kept if stamp < oldest]:
                del kept[stamp]

    def announced(self, stamp: Stamp) -> bool:
        """Whether this node has said that it holds a step."""
        return self.roster.node in self._announced.get(stamp, {})

    def mirror_of(self, rank: int, stamp: Stamp) -> tuple[str, bytes] | None:
        """The digest and manifest of another node's rank, if they are kept here."""
        return self._mirrors.get(rank, {}).get(stamp)

    def mirrors(self) -> dict[Stamp, dict[int, str]]:
        """The digests of all mirrored manifests, by step and rank."""
        found: dict[Stamp, dict[int, str]] = defaultdict(dict)
        for rank, kept in self._mirrors.items():
            for stamp, (digest, _) in kept.items():
                found[stamp][rank] = digest
        return found

    def status(self) -> dict[str, Any]:
        """The epoch, who is connected and what is survivable, as JSON-ready values."""
        offline = self.offline()
        left = self.roster.parities - len(offline)
        return {
            "epoch": self.roster.epoch,
            "node": self.roster.node,
            "nodes": len(self.roster.addresses),
            "parities": self.roster.parities,
            "offline": list(offline),
            "sealed": self.sealed.step if self.sealed else None,
            "survivable": max(0, left) if self.sealed else 0,
            "mirror_bytes": sum(
                len(blob) for kept in self._mirrors.values() for _, blob in kept.values()
            ),
        }

    def _sent_to(self, node: int, stamp: Stamp) -> list[m.Instruction]:
        out: list[m.Instruction] = [m.ToPeer(node, "wrote", stamp._asdict())]
        for number, own in enumerate(self._own[stamp]):
            if node in self.roster.keepers[number]:
                rank = self.roster.first_rank + number
                fields = {"rank": rank, **stamp._asdict(), "digest": own.digest}
                out.append(m.ToPeer(node, "mirror", fields, own.manifest))
        return out

    def _announcement(self, node: int, stamp: Stamp) -> m.Instruction:
        held = self._announced[stamp][self.roster.node]
        return m.ToPeer(node, "holds", stamp._asdict(), held.encoded())

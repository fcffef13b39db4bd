"""Several nodes' protocols without sockets: frames in queues, delivered or lost at will."""

from collections import deque
from collections.abc import Sequence
from itertools import combinations, permutations
from random import Random
from typing import Any, ClassVar

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.protocol.steps import SEAL_PATIENCE_S
from holdfast.snapshot.restore import choose_step
from holdfast.snapshot.restore.choose_step import Candidate
from holdfast.version import __version__

KINDS: dict[str, Any] = {
    "wrote": m.PeerWrote,
    "passed": m.PeerPassed,
    "mirror": m.PeerMirror,
    "holds": m.PeerHolds,
    "size": m.PeerSize,
    "chunk": m.PeerChunk,
    "replaced": m.PeerReplaced,
    "sealed": m.PeerSealed,
    "void": m.PeerVoid,
    "committed": m.PeerCommitted,
    "late": m.PeerLate,
}


def roster_of(
    node: int,
    addresses: Sequence[tuple[str, int]],
    parities: int = 1,
    epoch: int = 1,
    secret: str = "00" * 32,
) -> Roster:
    """Return the roster of a node in one sharding group of nodes with one rank each."""
    count = len(addresses)
    keepers = [tuple((n + turn) % count for turn in range(1, parities + 1)) for n in range(count)]
    return Roster(
        epoch=epoch,
        node=node,
        run_nodes=count,
        group=tuple(range(count)),
        addresses=dict(enumerate(addresses)),
        secret=secret,
        parities=parities,
        first_rank=node,
        mirror_nodes=(keepers[node],),
        mirrored_ranks=tuple(rank for rank, nodes in enumerate(keepers) if node in nodes),
        sets=((tuple(range(count)),),),
    )


class Nodes:
    """``count`` nodes with one rank each, in one sharding group that survives ``parities``."""

    # What befalls them in a campaign, how often, and how many such moves a node has.
    campaign_moves = 120
    moves: ClassVar = {
        "begin": 30.0,
        "write": 30.0,
        "deliver": 90.0,
        "cut": 0.5,
        "mend": 4.0,
        "wait": 0.2,
        "lose": 0.6,
        "replace": 0.6,
        "tear": 0.6,
    }

    def __init__(self, count: int, parities: int = 1, keep: int = 1) -> None:
        self.count, self.parities, self.keep = count, parities, keep
        self.now, self.epoch, self.newest = 0.0, 0, -1
        self.committed: list[list[int]] = [[] for _ in range(count)]
        self.replies: list[list[tuple[str, int | None]]] = [[] for _ in range(count)]
        self.writing: list[int | None] = [None] * count
        self.diverged: list[list[list[int]]] = [[] for _ in range(count)]
        self.bare: set[int] = set()
        self.roomy = True
        self.protocols = [self._fresh() for _ in range(count)]
        self.wires: dict[tuple[int, int], deque[m.Event]] = {}
        self.regroup()

    def _fresh(self) -> Protocol:
        protocol = Protocol(1, self.keep, 1000.0, self.now)
        protocol.handle(m.Hello(0, 1, self.keep, __version__), self.now)
        return protocol

    @property
    def sets(self) -> list[tuple[int, ...]]:
        return [tuple(range(self.count))]

    @property
    def last_committed(self) -> list[int]:
        """The newest step that each node has seen committed."""
        return [committed[-1] for committed in self.committed]

    def roster(self, node: int) -> dict[str, Any]:
        """What the ranks of a node are told of the run."""
        addresses = [("127.0.0.1", 1000 + other) for other in range(self.count)]
        return roster_of(node, addresses, self.parities, self.epoch).encode()

    def regroup(self) -> None:
        """All trainers start anew: a new epoch, links and all."""
        self.epoch += 1
        self.wires = {}
        self.unknown: set[tuple[int, int]] = set()
        self.writing = [None] * self.count
        for node in range(self.count):
            self.do(node, m.Hello(0, 1, self.keep, __version__))
        for node in range(self.count):
            self.do(node, m.Join(0, self.roster(node)))
        for pair in self.pairs():
            self.link(*pair)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the nodes that are linked, in both orders."""
        return list(permutations(range(self.count), 2))

    def link(self, one: int, other: int) -> None:
        """``one`` can speak to ``other`` again; what was on its way is lost."""
        self.wires[one, other] = deque()
        if (one, other) in self.unknown:
            self.unknown.discard((one, other))
            self.do(other, m.PeerReplaced(one, self.epoch))
        self.do(one, m.PeerLinked(other))

    def unlink(self, one: int, other: int) -> None:
        """What ``one`` says does not reach ``other`` any more."""
        self.wires.pop((one, other), None)
        self.do(one, m.PeerUnlinked(other))

    def replace_smp(self, node: int) -> None:
        """A node's SMP dies while its rank goes on: an empty one takes its place, not linked yet.

        Until it has seen a step committed, this node counts as lost already: it is ``bare``.
        """
        linked = [pair for pair in self.pairs() if node in pair]
        for pair in linked:
            self.unlink(*pair)
        self.protocols[node], self.writing[node] = self._fresh(), None
        self.unknown |= {pair for pair in linked if pair[0] == node}
        self.bare.add(node)
        self.do(node, m.Join(0, self.roster(node), again=True))

    def mend(self) -> None:
        """Every link stands, and everything arrives."""
        for pair in self.pairs():
            if pair not in self.wires:
                self.link(*pair)
        self.deliver_all()

    def do(self, node: int, event: m.Event) -> None:
        """Hand one event to a node's protocol, and carry out what it says."""
        for out in self.protocols[node].handle(event, self.now):
            self.carry_out(node, out)

    def carry_out(self, node: int, out: m.Instruction) -> None:
        """What a node's shell would do."""
        match out:
            case m.ToPeer(peer, verb, fields, blob):
                self._send(node, peer, verb, dict(fields), blob)
            case m.Allocate(rank, slot, nbytes):
                refused = m.AllocationRefused(rank, slot, "not enough memory")
                self.do(node, m.Allocated(rank, slot, nbytes) if self.roomy else refused)
            case m.Reply():
                self._reply(node, out)

    def _send(self, node: int, peer: int, verb: str, fields: dict[str, Any], blob: bytes) -> None:
        if (node, peer) not in self.wires:
            return
        if verb in ("mirror", "holds"):
            fields["manifest"] = blob
        if verb == "chunk":
            fields["blob"] = blob
        self.wires[node, peer].append(KINDS[verb](node=node, **fields))

    def _reply(self, node: int, reply: m.Reply) -> None:
        step = reply.fields.get("step")
        self.replies[node].append((reply.verb, step))
        self.diverged[node] += reply.fields.get("diverged", [])
        if reply.verb == "granted":
            self.writing[node] = step
        if reply.verb == "committed":
            assert step is not None
            self.committed[node].append(step)
            self.bare.discard(node)
            self.newest = max(self.newest, step)

    def begin(self, node: int, step: int) -> None:
        """A node's rank wants to copy a step."""
        self.writing[node] = None
        self.do(node, m.Begin(0, step, 8))

    def write(self, node: int, claims: Any = (), seen: Any = ()) -> None:
        """It has copied what it was granted."""
        step, self.writing[node] = self.writing[node], None
        assert step is not None
        manifest = f"{node}/{step}".encode()
        said = m.Written(0, step, f"d{step}", manifest, claims=list(claims), seen=list(seen))
        self.do(node, said)

    def copy(self, step: int, *nodes: int) -> None:
        """The ranks of these nodes, or of all, begin a step and write it, one after the other."""
        for node in nodes or range(self.count):
            self.begin(node, step)
            self.write(node)

    def deliver(self, one: int, other: int) -> None:
        """The oldest frame on its way arrives."""
        self.do(other, self.wires[one, other].popleft())

    def deliver_all(self) -> None:
        """Everything arrives, and what is said to that, too."""
        while busy := [wire for wire, frames in self.wires.items() if frames]:
            for wire in busy:
                self.deliver(*wire)

    def take(self, step: int) -> None:
        """All nodes snapshot a step, and all is heard."""
        self.begin_all(step)
        for node in range(self.count):
            self.write(node)
        self.deliver_all()

    def begin_all(self, step: int) -> None:
        """The ranks of all nodes want to copy a step."""
        for node in range(self.count):
            self.begin(node, step)

    def write_again(self, step: int | None) -> None:
        """As every restore does: what was resumed from is copied by the present nodes."""
        if step is not None:
            self.take(step)
            assert all(committed[-1] == step for committed in self.committed)

    def inventories(self, lost: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """What the nodes hold; of lost ones' replacements: nothing."""
        empty = {"epoch": 0, "slots": [], "mirrors": []}
        return [
            empty if node in lost else self.protocols[node].cluster_commit.inventory()
            for node in range(self.count)
        ]

    def restorable(self, lost: tuple[int, ...] = ()) -> Candidate | None:
        """The newest step that could be put together without these nodes."""
        ranks = range(self.count)
        held, count = self.inventories(lost), self.count
        found = choose_step.candidates(held, self.sets, self.parities, ranks, count)
        return found[0] if found else None

    def losses(self) -> list[tuple[int, ...]]:
        """Every set of nodes that may be lost now."""
        sizes = range(self.parities + 1)
        sets = [lost for size in sizes for lost in combinations(range(self.count), size)]
        return [lost for lost in sets if len(self.bare.union(lost)) <= self.parities]

    def check_losses(self, draw: Random) -> None:
        """Check that no loss that the parities cover takes away what any node saw committed."""
        for lost in self.losses():
            found = self.restorable(lost)
            assert found is not None, (lost, self.newest)
            assert found.stamp.step >= self.newest, (lost, found)

    def check_going_on(self, newest: int) -> None:
        """Check that nobody waits for ever, and that commits go on once all links are mended."""
        self.mend()
        for step in range(newest + 1, newest + 4):
            self.begin_all(step)
            self.now += 2 * SEAL_PATIENCE_S
            for node in range(self.count):
                self.do(node, m.Tick())
            for node in range(self.count):
                if self.writing[node] is not None:
                    self.write(node)
            self.deliver_all()
            for node in range(self.count):
                assert not self.protocols[node].cluster_commit.pending(), (node, step)
        assert self.last_committed == [newest + 3] * self.count

    def lose(self, lost: tuple[int, ...]) -> int | None:
        """These nodes are replaced by empty ones; all go on from the step that they find."""
        for node in lost:
            self.protocols[node] = self._fresh()
        self.regroup()
        self.bare = set()
        found = self.restorable()
        stamp = found.stamp if found else (0, -1)
        for node in range(self.count):
            self.do(node, m.Resume(0, *stamp))
        self.newest = stamp[1]
        return stamp[1] if found else None

    def may_begin(self, node: int, steps: list[int], draw: Random) -> bool:
        """Whether a node's rank, which has begun ``steps[node]``, could begin another one now."""
        return steps[node] <= min(steps) + 1 and self.writing[node] is None

    def move(self, draw: Random, steps: list[int]) -> None:
        """Anything that could happen next to any node; ``steps`` are the newest ones begun."""
        node = draw.randrange(self.count)
        pairs = self.pairs()
        busy = [wire for wire, frames in self.wires.items() if frames]
        cut = [pair for pair in pairs if pair not in self.wires]
        match draw.choices([*self.moves], [*self.moves.values()])[0]:
            case "begin" if self.may_begin(node, steps, draw):
                steps[node] += 1
                self.begin(node, steps[node])
            case "write" if self.writing[node] is not None:
                self.write(node)
            case "deliver" if busy:
                self.deliver(*draw.choice(busy))
            case "work":
                self.work(node)
            case "withdraw":
                self.give_up(node)
            case "cut":
                self.unlink(*draw.choice(pairs))
            case "mend" if cut:
                self.link(*draw.choice(cut))
            case "wait":
                self.now += 2 * SEAL_PATIENCE_S
                self.do(node, m.Tick())
            case "lose":
                found = self.lose(draw.choice(self.losses()))
                steps[:] = [found or 0] * self.count
                self.write_again(found)
            case "replace" if len(self.bare | {node}) <= self.parities:
                self.replace_smp(node)
                if draw.random() < 0.5:
                    self.begin(node, steps[node])  # it was not handed over yet
                else:
                    self.do(node, m.SkipStep(0, steps[node]))
            case "tear" if self.writing[node] is not None:
                self.writing[node] = None
                self.do(node, m.SkipStep(0, steps[node]))

    def work(self, node: int) -> bool:
        """A node makes parities; nothing to do for replicas, whose ranks write them."""
        return False

    def give_up(self, node: int) -> None:
        """A node's rank waits for sizes no more; replicas never do."""

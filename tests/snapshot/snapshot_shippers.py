"""Nodes that hold different states, without sockets: protocols, and memory that they add to."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
from snapshot_nodes import Nodes

from holdfast.snapshot.client import shards
from holdfast.snapshot.node import memory
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment, Striping
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol import parity_stream
from holdfast.snapshot.restore.choose_step import Candidate

BUCKET_BYTES = 128
CHUNK_BYTES = 48
QUEUE = 3


@contextmanager
def small_chunks() -> Iterator[None]:
    """Chunks so small that little blocks have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity_stream, "CHUNK_BYTES", CHUNK_BYTES)
        yield


def state_of(node: int, step: int) -> Bytes:
    """What a node trained up to this step; sizes differ, and change at the first step."""
    draw = np.random.default_rng([node, step])
    nbytes = (50 + 20 * node) * (1 if step < 1 else 3)
    return draw.integers(0, 256, nbytes, dtype=np.uint8)


class Shippers(Nodes):
    """As ``Nodes``, each with a state of its own, in one reduced sharding group."""

    campaign_moves = 400
    moves: ClassVar = {
        "begin": 30.0,
        "write": 30.0,
        "deliver": 90.0,
        "work": 60.0,
        "withdraw": 0.5,
        "cut": 0.5,
        "mend": 4.0,
        "wait": 0.2,
        "lose": 0.3,
    }

    def __init__(self, count: int, parities: int = 1, keep: int = 1) -> None:
        self.memory: list[dict[int, Bytes]] = [{} for _ in range(count)]
        self.striping: dict[tuple[int, int], Striping] = {}  # by node and step
        self.granted: list[int] = [0] * count
        self.asking = [False] * count
        super().__init__(count, parities, keep)

    def begin(self, node: int, step: int) -> None:
        """A node's rank asks for sizes; all the rest follows."""
        self.writing[node], self.asking[node] = None, True
        everyone = list(range(self.count))
        self.do(node, m.Sizes(0, step, len(state_of(node, step)), everyone))

    def regroup(self) -> None:
        """As ``Nodes``; nobody waits for anything then."""
        self.asking = [False] * self.count
        super().regroup()

    def may_begin(self, node: int, steps: list[int], draw: Random) -> bool:
        """As ``Nodes``; a copy that is under way may be torn."""
        torn = self.writing[node] is None or draw.random() >= 0.9
        return steps[node] <= min(steps) and not self.asking[node] and torn

    def give_up(self, node: int) -> None:
        """A node's rank waits for sizes no more."""
        self.do(node, m.Withdraw(0))

    def carry_out(self, node: int, out: m.Instruction) -> None:
        """As ``Nodes``, on real bytes."""
        match out:
            case m.Ship(peer, _, slot, start, nbytes, fields):
                blob = self.memory[node][slot][start : start + nbytes].tobytes()
                self._send(node, peer, "chunk", dict(fields), blob)
            case m.Accumulate(_, slot, start, coefficient, blob):
                room = self.memory[node][slot][start : start + len(blob)]
                memory.accumulate(room.data, blob, coefficient)
            case m.Digest(rank, slot, start, nbytes):
                bucket = self.memory[node][slot][start : start + nbytes]
                self.do(node, m.Digested(rank, slot, memory.digest_of(bucket.data)))
            case m.Allocate(_, slot, nbytes):
                self.memory[node][slot] = np.full(nbytes, 0xAB, np.uint8)
                super().carry_out(node, out)
            case _:
                super().carry_out(node, out)

    def _reply(self, node: int, reply: m.Reply) -> None:
        super()._reply(node, reply)
        step = reply.fields.get("step")
        if reply.verb == "sizes":
            assert step is not None
            striping = Striping.of_shards(reply.fields["sizes"], self.parities)
            self.striping[node, step] = striping
            self.do(node, m.Begin(0, step, striping.buffer_nbytes))
        if reply.verb in ("granted", "skipped", "refused"):
            self.asking[node] = False
        if reply.verb == "granted":
            assert reply.slot is not None
            self.granted[node] = reply.slot

    def write(self, node: int, claims: Any = (), seen: Any = ()) -> None:
        """It has copied its own shard, and cleared the rest."""
        step, self.writing[node] = self.writing[node], None
        assert step is not None
        striping, state = self.striping[node, step], state_of(node, step)
        room = self.memory[node][self.granted[node]]
        room[: striping.buffer_nbytes] = 0
        room[: len(state)] = state
        load = shards.plan_parities(striping, node, tuple(range(self.count)), BUCKET_BYTES)
        manifest = f"{node}/{step}".encode()
        self.do(node, m.Written(0, step, f"d{step}", manifest, parity_plan=vars(load)))

    def work(self, node: int) -> bool:
        """A node ships and digests a little; False if it had nothing to do."""
        wires = [(peer, self.wires.get((node, peer))) for peer in range(self.count)]
        roomy = [peer for peer, wire in wires if wire is not None and len(wire) < QUEUE]
        out = self.protocols[node].handle(m.Spare(tuple(roomy)), self.now)
        for instruction in out:
            self.carry_out(node, instruction)
        return bool(out)

    def deliver_all(self) -> None:
        """Everything arrives, and all that follows from it is done."""
        busy = True
        while busy:
            super().deliver_all()
            done = [self.work(node) for node in range(self.count)]
            busy = any(done)

    def deliver_frames(self) -> None:
        """Everything on its way arrives; nobody ships more."""
        super().deliver_all()

    def begin_all(self, step: int) -> None:
        """All nodes learn each other's sizes, and are granted their slots."""
        super().begin_all(step)
        self.deliver_frames()

    def write_all(self, step: int) -> None:
        """All nodes have written a step, and told; nothing is shipped yet."""
        self.begin_all(step)
        for node in range(self.count):
            self.write(node)
        self.deliver_frames()

    def chunks(self) -> list[tuple[tuple[int, int], m.Event]]:
        """The chunks that are on their way, and on which wire."""
        wires = self.wires.items()
        return [(w, event) for w, sent in wires for event in sent if isinstance(event, m.PeerChunk)]

    def check_loss(self, lost: tuple[int, ...]) -> Candidate:
        """Put the lost nodes' states together from the others' memory, and compare."""
        found = self.restorable(lost)
        assert found is not None, (lost, self.newest)
        self.check(found)
        return found

    def check_losses(self, draw: Random) -> None:
        """Check one of the losses, bit for bit."""
        assert self.check_loss(draw.choice(self.losses())).stamp.step >= self.newest

    def check(self, found: Candidate) -> None:
        """As ``check_loss``, of what was found before."""
        alive = next(node for node in range(self.count) if node in found.slots)
        striping = self.striping[alive, found.stamp.step]
        for node in set(range(self.count)) & set(found.slots):
            assert np.array_equal(self._shard(node, found), state_of(node, found.stamp.step))
        striping.check_loss(set(range(self.count)) - set(found.slots))
        for stripe in map(striping.stripe, range(self.count)):
            held = [f for f in stripe if f.node in found.slots][: striping.data_blocks]
            data = stripe[: striping.data_blocks]
            lost = [f for f in data if f.node not in found.slots and f.nbytes]
            targets = {f.role: np.zeros(f.nbytes, np.uint8) for f in lost}
            sources = {f.role: self._fragment(f, found) for f in held}
            erasure_code.decode(targets, sources, striping.data_blocks)
            for fragment in lost:
                place = striping.place(fragment)
                state = state_of(fragment.node, found.stamp.step)
                assert np.array_equal(targets[fragment.role], state[place.start : place.stop])

    def _shard(self, node: int, found: Candidate) -> Bytes:
        nbytes = len(state_of(node, found.stamp.step))
        return self._slot(node, found)[:nbytes]

    def _fragment(self, fragment: Fragment, found: Candidate) -> Bytes:
        room = self._slot(fragment.node, found)
        return room[fragment.offset : fragment.offset + fragment.nbytes]

    def _slot(self, node: int, found: Candidate) -> Bytes:
        place = self.protocols[node].node.find(node, *found.stamp)
        assert place is not None
        return self.memory[node][place[1]]

"""A node: the library's state machine with simulated memory, and an SMP that can die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.snapshot.node.memory import SlotMemory, accumulate, digest_of
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import InvariantError, ProtocolViolation, Stamp
from holdfast.snapshot.protocol.slots import READABLE, Slot
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast_lab.simulation.disk import Disk
from holdfast_lab.simulation.world import Violation

if TYPE_CHECKING:
    from holdfast_lab.simulation.world import World

_TICK_S = 0.5
_LINGER_S = 1e9
_SLOW = 100.0
# After these there may be parities to send or to digest.
_LEADS_TO_WORK = m.Written, m.PeerWrote, m.PeerLinked, m.PeerChunk


class Memory(SlotMemory):
    """The memory of all slots, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[tuple[int, int], bytearray] = {}

    def allocate(self, rank: int, slot: int, nbytes: int) -> None:
        """Replace a slot's memory by zeros."""
        self.slots[rank, slot] = bytearray(nbytes)

    def writable(self, rank: int, slot: int) -> memoryview:
        """Return a slot's bytes."""
        return memoryview(self.slots[rank, slot])

    def free(self, rank: int, slot: int) -> None:
        """Free a slot's memory."""
        self.slots.pop((rank, slot), None)


class Node:
    """One node of the cluster.

    Attributes:
        ranks: the ranks of the run that are on it.
        protocol: the state machine of its SMP; None while there is no SMP.
        instance: the number of its SMP among all SMPs that ever were.
        epoch: the epoch whose links the SMP keeps.
        speakers: the connection of the process that acts for each local rank.
        met: the SMPs that have connected in this epoch, by node.
        room, descriptors: false while memory, or file descriptors, are short.
        wakes_s: the time until which the SMP is stopped.
        damaged: the ranks and steps here of which bytes were flipped.
        booted_s: the time at which the SMP began.
    """

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index, ranks = world, index, world.size.ranks
        self.ranks = range(index * ranks, (index + 1) * ranks)
        self.protocol: Protocol | None = None
        self.memory = Memory()
        self.instance, self.epoch = -1, 0
        self.met: dict[int, int] = {}
        self.speakers: dict[int, int] = {}
        self.room = self.descriptors = True
        self.wakes_s = self.slow_until_s = self.booted_s = 0.0
        self.damaged: set[tuple[int, Stamp]] = set()
        self.disk = Disk(self)
        self._busy = False
        self._found: tuple[Stamp, list[Slot]] = Stamp(-1, -1), []  # where it was found last

    def start(self) -> None:
        """Begin to tick."""
        self._tick()

    def _tick(self) -> None:
        self.deliver(self.instance, m.Tick())
        self.world.at(_TICK_S, self._tick)

    @property
    def pace(self) -> float:
        """How many times longer than usual everything takes here."""
        return _SLOW if self.world.now < self.slow_until_s else 1.0

    def asleep(self) -> bool:
        """Return true while the SMP is stopped."""
        return self.world.now < self.wakes_s

    def boot(self) -> None:
        """Start an SMP, which holds nothing."""
        world = self.world
        self.protocol = Protocol(world.size.ranks, world.keep, _LINGER_S, world.now)
        self.instance, self.epoch, self.met = next(world.numbers), 0, {}
        self.memory, self.damaged, self.speakers = Memory(), set(), {}
        self._found = Stamp(-1, -1), []
        self.booted_s, self.wakes_s = world.now, 0.0
        world.say("node {}: SMP {} begins", self.index, self.instance)
        if world.persist_every:
            self.disk.attach(self.instance)

    def die(self, reason: str) -> None:
        """Lose the SMP with all that it holds."""
        if self.protocol is None:
            return
        self.world.say("node {}: SMP {} dies: {}", self.index, self.instance, reason)
        self.protocol, self.instance, self.epoch, self.memory = None, -1, 0, Memory()
        self.damaged, self.wakes_s, self._busy = set(), 0.0, False
        self.world.network.died(self)
        self.world.trainers.smp_died(self.index)
        self.world.invariants.changed(self)

    def deliver(self, instance: int, event: m.Event) -> None:
        """Hand an event to an SMP if it still lives, once it is not stopped."""
        if self.asleep():
            self.world.at(self.wakes_s - self.world.now, self.deliver, instance, event)
        elif self.instance == instance:
            self.handle(event)

    def receive(self, instance: int, connection: int, event: m.FromRank) -> None:
        """Take a message of a process; a process that takes a rank over ends the one before."""
        if self.asleep():
            wakes_s = self.wakes_s - self.world.now
            self.world.at(wakes_s, self.receive, instance, connection, event)
        elif self.instance == instance:
            if isinstance(event, m.Hello):
                self.speakers[event.rank] = connection
            if self.speakers.get(event.rank) == connection:
                self.handle(event)

    def handle(self, event: m.Event) -> None:
        """Hand an event to the state machine now, and do what it says."""
        if self.protocol is None:
            return
        try:
            out = self.protocol.handle(event, self.world.now)
        except (InvariantError, ProtocolViolation) as error:
            raise Violation(f"node {self.index}: {error}") from error
        if not isinstance(event, m.Tick):
            self.world.say("node {}: {}", self.index, event)
        for instruction in out:
            self._carry_out(instruction)
        if out and not isinstance(event, m.PeerLinked):  # what was missed is said again then
            self.world.invariants.sends(self, out)
        self.world.invariants.check(self, event)
        if not self._busy and isinstance(event, _LEADS_TO_WORK) and not self.world.replicated:
            self._busy = True
            self.world.at(self.world.soon(1e-4, 1e-3), self._work, self.instance)

    def _work(self, instance: int) -> None:
        """Send and digest what the nodes add to each other's parities, piece by piece."""
        if self.protocol is None or self.instance != instance:
            return
        if self.asleep():
            self.world.at(self.wakes_s - self.world.now, self._work, instance)
            return
        self._busy = False
        spare = m.Spare(self.world.network.with_capacity(self))
        out = self.protocol.handle(spare, self.world.now)
        for instruction in out:
            self._carry_out(instruction)
        if out:
            self._busy = True
            self.world.at(self.world.soon(1e-4, 1e-3), self._work, instance)

    def _carry_out(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.ToPeer():
                self.world.network.send(self, instruction, instruction.blob)
            case m.Reply():
                self._reply(instruction)
            case m.Answer():
                self.disk.answered(instruction)
            case m.Ship(_, rank, slot, start, nbytes, _):
                chunk = bytes(self.memory.slots[rank, slot][start : start + nbytes])
                self.world.network.send(self, instruction, chunk)
            case m.Accumulate(rank, slot, start, coefficient, blob):
                target = self.memory.writable(rank, slot)[start : start + len(blob)]
                accumulate(target, blob, coefficient)
            case m.Digest(rank, slot, start, nbytes):
                bucket = self.memory.view(rank, slot)[start : start + nbytes]
                self.handle(m.Digested(rank, slot, digest_of(bucket)))
            case m.Connect(roster):
                self.world.network.connect(self, roster)
            case m.Allocate(rank, slot, nbytes):
                self._allocate(rank, slot, nbytes)
            case m.Free(rank, slot):
                self.memory.free(rank, slot)
            case m.Stop(reason):
                self.world.trainers.stopped(self, reason)

    def _allocate(self, rank: int, slot: int, nbytes: int) -> None:
        if self.room:
            self.memory.allocate(rank, slot, nbytes)
            self.handle(m.Allocated(rank, slot, nbytes))
        else:
            self.memory.free(rank, slot)
            self.handle(m.AllocationRefused(rank, slot, "there is no room"))

    def _reply(self, reply: m.Reply) -> None:
        fields: dict[str, Any] = dict(reply.fields)
        if reply.verb == "granted":
            fields["memory"] = self.memory.slots[reply.rank, int(fields["slot"])]
        if reply.verb == "committed":
            assert self.protocol is not None
            stamp = Stamp(self.protocol.cluster_commit.epoch, int(fields["step"]))
            self.world.invariants.committed(self, stamp)
        self.world.trainers.reply(self, reply.rank, reply.verb, fields)

    def holds(self, stamp: Stamp) -> bool:
        """Return true if the SMP holds a step of all its ranks, without damage."""
        if self.protocol is None:
            return False
        known, slots = self._found
        lost = [slot for slot in slots if slot.stamp != stamp or slot.state not in READABLE]
        if known == stamp and not lost:
            return not self.damaged or all((r, stamp) not in self.damaged for r in self.ranks)
        found = [self.protocol.node.find(rank, *stamp) for rank in self.ranks]
        if None in found:
            return False
        self._found = stamp, [each[2] for each in found if each is not None]
        return self.holds(stamp)

    def corrupt(self, stamp: Stamp) -> bool:
        """Flip a byte of a step in memory; return false if it is not held."""
        assert self.protocol is not None
        draw = self.world.draw
        rank = draw.choice(self.ranks)
        found = self.protocol.node.find(rank, *stamp)
        if found is None or (rank, stamp) in self.damaged:
            return False
        index, number, slot = found
        self.damaged.add((rank, stamp))
        memory = self.memory.slots[index, number]
        if draw.random() < 0.3:
            at = draw.randrange(len(slot.manifest))
            flipped = bytes([slot.manifest[at] ^ (1 << draw.randrange(8))])
            slot.manifest = slot.manifest[:at] + flipped + slot.manifest[at + 1 :]
        else:
            memory[draw.randrange(len(memory))] ^= 1 << draw.randrange(8)
        return True

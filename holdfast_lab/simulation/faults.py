"""What befalls the simulated cluster, drawn from a seed before the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from holdfast_lab.simulation.world import Size

if TYPE_CHECKING:
    from holdfast_lab.simulation.node import Node
    from holdfast_lab.simulation.trainers import Rank
    from holdfast_lab.simulation.world import World

# How often each kind is drawn. "node" loses SMP and ranks, "reading" an SMP while it is read for a
# restore, "closing" an SMP while its rank waits for the others to end.
KINDS = {
    "node": 3,
    "rank": 3,
    "smp": 5,
    "reading": 2,
    "closing": 1,
    "link": 5,
    "cut": 3,
    "partition": 2,
    "slow": 2,
    "stopped": 1,
    "no memory": 1,
    "no descriptors": 1,
    "full disk": 1,
    "corrupt bytes": 2,
}
MEAN_PAUSE_S = 0.7
BURST_PAUSE_S = 0.05  # some faults follow each other closely
LEAST = 2


@dataclass(frozen=True)
class Fault:
    """One fault; ``other`` and ``seconds`` mean something only for some kinds."""

    number: int
    at_s: float
    kind: str
    node: int
    other: int
    seconds: float

    def __str__(self) -> str:
        return f"fault {self.number} at {self.at_s:.3f} s: {self.kind}, node {self.node}"


def drawn(seed: int, size: Size, first: int = 0) -> list[Fault]:
    """Return the faults of a seed, in the order of time, with numbers from ``first`` on."""
    draw = Random(f"faults {seed} {size}")
    # At most a second before the end, so that what lasts a while has ended by then.
    latest_s = max(size.duration_s - 0.2, 0.5 * size.duration_s)
    found: list[Fault] = []
    at_s = draw.expovariate(2 / MEAN_PAUSE_S)
    while at_s < latest_s or len(found) < LEAST:
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        node, other = draw.sample(range(size.nodes), 2)
        lasts_s = draw.uniform(0.05, 1.0) if draw.random() < 0.8 else draw.uniform(1.0, 7.0)
        found.append(Fault(first + len(found), min(at_s, latest_s), kind, node, other, lasts_s))
        pause_s = BURST_PAUSE_S if draw.random() < 0.4 else MEAN_PAUSE_S
        at_s += draw.expovariate(1 / pause_s)
    return found


class Faults:
    """Applies faults to the world, unless more would be lost than the parities make up for."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world, self._faults = world, faults
        self._reading: list[Fault] = []
        self._closing: list[Fault] = []

    def start(self) -> None:
        """Plan all faults."""
        for fault in self._faults:
            self._world.at(fault.at_s, self._happen, fault)

    def _happen(self, fault: Fault) -> None:
        world, node = self._world, self._world.nodes[fault.node]
        world.say("fault {}: {}, node {}", fault.number, fault.kind, fault.node)
        world.stats[fault.kind] += 1
        match fault.kind:
            case "node" if self._may_lose(node):
                for rank in node.ranks:
                    world.trainers.ranks[rank].die("its node was lost")
                node.die("its node was lost")
            case "rank":
                world.trainers.ranks[node.ranks[-1]].die("it was killed")
            case "smp" if self._may_lose(node):
                node.die("it was killed")
            case "reading":
                self._reading.append(fault)
            case "closing":
                self._closing.append(fault)
            case "link":
                world.network.drop(fault.node, fault.other)
            case "cut":
                world.network.cut(fault.node, fault.other, self._lasts_s(fault))
            case "partition":
                for other in range(fault.other, world.size.nodes):
                    if other != fault.node:
                        world.network.cut(fault.node, other, self._lasts_s(fault))
            case "slow":
                node.slow_until_s = world.now + self._lasts_s(fault)
            case "stopped" if node.protocol is not None:
                node.wakes_s = world.now + self._lasts_s(fault)
                world.at(5.0, world.network.fell_silent, node)
            case "no memory":
                node.room = False
                world.at(self._lasts_s(fault), setattr, node, "room", True)
            case "no descriptors":
                node.descriptors = False
                world.at(self._lasts_s(fault), setattr, node, "descriptors", True)
            case "full disk":
                node.disk.full = True
                world.at(self._lasts_s(fault), setattr, node.disk, "full", False)
            case "corrupt bytes":
                newest = world.invariants.newest
                if newest is not None and node.holds(newest) and self._may_lose(node):
                    node.corrupt(newest)

    def _lasts_s(self, fault: Fault) -> float:
        passed_s = self._world.now - self._world.began_s
        return min(fault.seconds, max(0.05, self._world.size.duration_s - passed_s))

    def _may_lose(self, node: Node) -> bool:
        world = self._world
        lost = world.invariants.at_stake() | {node.index}
        return node.protocol is not None and (world.reckless or not world.too_many(lost))

    def reads(self, node: Node) -> None:
        """Note that a rank is about to read from a node: the node may die at this moment."""
        for fault in self._reading:
            if fault.node == node.index and self._world.draw.random() < 0.2:
                self._reading.remove(fault)
                if self._may_lose(node):
                    node.die("it was killed while it was read")
                return

    def closes(self, rank: Rank) -> None:
        """Note that a rank waits for the others to end: its SMP may die at this moment."""
        node = self._world.nodes[rank.node]
        if any(fault.node == rank.node for fault in self._closing) and self._may_lose(node):
            self._closing = [fault for fault in self._closing if fault.node != rank.node]
            node.die("it was killed while the run ended")

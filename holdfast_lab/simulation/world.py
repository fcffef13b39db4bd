"""The virtual clock and the queue of events, on which everything that is simulated hangs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.snapshot.layout.groups import Dim, Job, Kind
from holdfast.snapshot.layout.node_groups import node_groups

if TYPE_CHECKING:
    from holdfast_lab.simulation.faults import Fault
    from holdfast_lab.simulation.resizing import Former

STEP_S = 0.04  # the mean duration of a training step
CALM_S = 30.0  # within this time after the last fault a step must be committed
_LOGGED = 3000
_LINE = 160


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Size:
    """The size of a simulated run.

    Attributes:
        nodes, ranks: the nodes, and the ranks on each.
        parities: the number of nodes that may be lost.
        steps: the training steps during which faults happen, about.
    """

    nodes: int = 3
    ranks: int = 1
    parities: int = 1
    steps: int = 100
    group_nodes: int = GROUP_NODES

    @property
    def duration_s(self) -> float:
        """The time during which faults happen."""
        return self.steps * STEP_S


class World:
    """One simulated run.

    Everything random in it is drawn from ``draw``, which depends on the seed and the size only.

    Attributes:
        job: the ranks; half of the runs hold replicas, the others have other states on each node.
        keep: the number of clean snapshots kept.
        persist_every: the steps between checkpoints; 0 writes none.
        reckless: true if more may be lost than the parities make up for; then an older step, or
            nothing, may be restored, but never wrong bytes.
        former: the world whose run goes on in this one, if any.
        resizes: true if this one's run goes on with other nodes (``resizing``).
    """

    def __init__(
        self, seed: int, size: Size, faults: Sequence[Fault], former: Former | None = None
    ) -> None:
        from holdfast_lab.simulation.faults import Faults
        from holdfast_lab.simulation.invariants import Invariants
        from holdfast_lab.simulation.network import Network
        from holdfast_lab.simulation.node import Node
        from holdfast_lab.simulation.resizing import is_drawn
        from holdfast_lab.simulation.trainers import Trainers

        self.seed, self.size = seed, size
        self.draw = Random(f"{seed} {size}")
        kind, self.ranks = self.draw.choice([Kind.REPLICATE, Kind.SHARD]), size.nodes * size.ranks
        if former is not None:
            stays = size.nodes == former.world.size.nodes and not former.world.replicated
            kind = Kind.SHARD if stays else Kind.REPLICATE
        self.job: Job = Job((Dim("dim", self.ranks, kind),), size.ranks)
        self.domains = former.domains if former is not None else []
        self.cut = node_groups(self.job, size.parities, size.group_nodes, self.domains)
        self.group_of = {node: group for group in self.cut for node in group}
        self.replicated: bool = kind is Kind.REPLICATE
        self.keep = self.draw.choice([1, 1, 2])
        self.persist_every = self.draw.choice([0, 0, 7])
        self.reckless = self.draw.random() < 0.2
        self.resizes = former is None and not self.reckless and is_drawn(seed, size)
        self.now, self.events, self.finished = 0.0, 0, False
        self.stats: Counter[str] = Counter()
        self.log: deque[tuple[float, str, tuple[object, ...]]] = deque(maxlen=_LOGGED)
        self.numbers = count(1)
        self.former = former
        if former is not None:
            self.keep, self.persist_every, self.reckless = former.world.keep, 0, False
            self.now, self.numbers = former.world.now, former.world.numbers
            self.stats, self.log = former.world.stats, former.world.log
        self.began_s = self.now
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self.network = Network(self)
        self.nodes: list[Node] = [Node(self, index) for index in range(size.nodes)]
        self.invariants = Invariants(self)
        self.trainers = Trainers(self)
        self.faults = Faults(self, faults)
        if former is not None:
            self.invariants.take_over(former.world.invariants)
            self.trainers.life = former.world.trainers.life
            former.hand_over(self.nodes)

    def too_many(self, lost: Collection[int]) -> bool:
        """Return true if a group has lost more nodes than its parities make up for."""
        most = self.size.parities
        return any(sum(node in lost for node in group) > most for group in self.cut)

    def at(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        """Call ``action`` after a delay."""
        heappush(self._queue, (self.now + delay_s, next(self._order), action, arguments))

    def soon(self, least_s: float, most_s: float) -> float:
        """Draw a delay."""
        return least_s + (most_s - least_s) * self.draw.random()

    def say(self, text: str, *arguments: object) -> None:
        """Add a line to the log, which is formatted only if it is shown."""
        self.log.append((self.now, text, arguments))

    def run(self) -> None:
        """Simulate until the run has ended well.

        Raises:
            Violation: an invariant does not hold.
        """
        for node in self.nodes:
            node.start()
        self.trainers.start()
        self.faults.start()
        latest_s, queue = self.began_s + self.size.duration_s + CALM_S, self._queue
        while not self.finished:
            self.now, _, action, arguments = heappop(queue)
            action(*arguments)
            self.events += 1
            if self.now > latest_s:
                raise Violation(
                    f"{CALM_S:g} s after the last fault {self.trainers.lacking()}, newest step "
                    f"{self.invariants.newest}: {self.trainers.waiting()}"
                )

    def story(self, lines: int) -> list[str]:
        """Return the last lines of the log."""
        shown = list(self.log)[-lines:]
        return [f"{at_s:9.4f} s  {_told(text, words)}" for at_s, text, words in shown]


def _told(text: str, words: tuple[object, ...]) -> str:
    line = text.format(*words)
    return line if len(line) < _LINE else line[:_LINE] + " …"

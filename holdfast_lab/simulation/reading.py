"""A rank's access to other nodes and to its disk, in place of sockets and files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.slot_reads import SlotReads
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.restore import choose_step
from holdfast.snapshot.restore.cluster_restore import Tried, load
from holdfast.snapshot.restore.disk_restore import DiskRestore
from holdfast.snapshot.transport import requests
from holdfast.snapshot.transport.frames import Frame
from holdfast.snapshot.transport.remote import Remote
from holdfast_lab.simulation import states

if TYPE_CHECKING:
    from holdfast_lab.simulation.node import Node
    from holdfast_lab.simulation.trainers import Rank


class SimulatedMembership(Membership):
    """A rank among all ranks, without a process group.

    Nodes are found without their addresses, which would take much memory at each of many ranks.
    """

    addresses: Any = property(lambda _: {}, lambda _, addresses: None)

    def __init__(self, rank: Rank) -> None:
        world = rank.world
        self.job, self.parities = world.job, world.size.parities
        self.rank, self.world_size = rank.rank, len(rank.trainers.ranks)
        self.group_nodes = world.size.group_nodes
        self.roster: Roster | None = None
        self._domains, self._domains_said = world.domains, True
        self._cut(())


class SimulatedRemote(Remote):
    """A connection to the memory of a simulated node."""

    def __init__(self, rank: Rank, roster: Roster, node: int, *, attempts: int = 1) -> None:
        super().__init__(roster, node, 0.0, attempts=attempts)
        self._rank = rank

    def _ask(self, header: Mapping[str, object], out: memoryview | None = None) -> Frame:
        world, node = self._rank.world, self._rank.world.nodes[self.node]
        world.faults.reads(node)
        up = node.epoch == self._roster.epoch and node.descriptors and not node.asleep()
        up = up and world.network.reachable(self._rank.node, self.node)
        if node.protocol is None or not up:
            self.failure = f"node {self.node} cannot be read"
            raise ConnectionError(self.failure)
        return _answered(node, header, out)


def _answered(node: Node, header: Mapping[str, object], out: memoryview | None) -> Frame:
    assert node.protocol is not None
    memory: Any = node.memory
    reads = SlotReads(node.protocol, memory, node.handle, lambda: next(node.world.numbers))
    asked = m.parse(requests.FromReadingRank, header)
    fields, data = reads.answer(0, asked)
    if out is not None and fields["verb"] == "bytes":
        out[:] = data
    return Frame.of(fields, bytes(data))


class _Left(Remote):
    """A connection to a node that is left in a rehearsal, whatever the network does."""

    def __init__(self, rank: Rank, roster: Roster, node: int, *, attempts: int = 1) -> None:
        super().__init__(roster, node, 0.0, attempts=attempts)
        self._rank = rank

    def _ask(self, header: Mapping[str, object], out: memoryview | None = None) -> Frame:
        node = self._rank.world.nodes[self.node]
        assert node.protocol is not None
        return _answered(node, header, out)


def rehearsed(rank: Rank, stamp: Stamp, lost: Collection[int]) -> Tried:
    """Load a rank's state of a step as if these nodes were lost."""
    membership, world = SimulatedMembership(rank), rank.world
    inventories = [
        {"epoch": 0, "slots": [], "mirrors": []}
        if node.protocol is None or node.index in lost
        else node.protocol.cluster_commit.inventory()
        for node in world.nodes
    ]
    ranks = membership.ranks_of_group()
    about: Any = inventories, membership.sets, world.size.parities, ranks, membership.world_size
    found = [each for each in choose_step.candidates(*about) if each.stamp == stamp]
    if not found:
        return Tried({}, damage="no candidate")
    chosen: Any = found[0], None, partial(_Left, rank)
    return load(membership, states.tree_of, lambda _: None, *chosen)


class SimulatedDisk(DiskRestore):
    """The checkpoints on a simulated disk."""

    def __init__(self, rank: Rank) -> None:
        self._disk, self._together = rank.world.nodes[rank.node].disk, True
        self._step, self._tree = None, {}

    @property
    def directory(self) -> str:
        """The name of the simulated directory."""
        return "the simulated disk"

    def unloadable(self) -> str:
        """Return ``""``: nothing is damaged on a simulated disk."""
        return ""

    def _find(self, limit: int) -> None:
        steps = [step for step in self._disk.steps if step <= limit]
        self._step = max(steps, default=None)
        self._tree = {} if self._step is None else {"token": self._disk.steps[self._step]}

"""A run that goes on with other nodes: fewer, as many or one more, numbered anew.

Once all ranks have seen a commit, nodes are lost for good while a further step is under way, and
all ranks end. The SMPs that are left are taken over by a second world, whose nodes are shuffled.
Replicas go on as replicas. States that are divided (FSDP2) are put together: every rank of the new
run holds the whole tensor (DDP), so that each reads from the shards of all former ranks. Steps
that as many nodes wrote stay where they are, on nodes with other numbers. In half of the runs
others were in between that committed nothing: the former parity groups are not known any more, and
the nodes are in failure domains, by which new groups are cut.

**Not covered**: a new division of a tensor among the new ranks (``dtensors`` needs a mesh of real
processes), another number of ranks on a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from holdfast import config
from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.manifest import Manifest, Sharding
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.restore.choose_step import Candidate
from holdfast.snapshot.restore.cluster_restore import Tried, load
from holdfast_lab.simulation import states

if TYPE_CHECKING:
    from holdfast.snapshot.layout.flat_buffer import Tree
    from holdfast.snapshot.node.membership import Membership
    from holdfast.snapshot.protocol.roster import Roster
    from holdfast.snapshot.transport.remote import Remote
    from holdfast_lab.simulation.node import Node
    from holdfast_lab.simulation.world import Size, World

SHARE = 0.125  # of the runs that lose nothing more than parities make up for
MOST_RANKS = 24  # each reads the shards of all
_STEPS = 15


def is_drawn(seed: int, size: Size) -> bool:
    """Return true if the run of a seed goes on with other nodes."""
    small = size.nodes * size.ranks <= MOST_RANKS
    return small and Random(f"resize {seed} {size}").random() < SHARE


@dataclass(frozen=True)
class Former:
    """The world before, which of its nodes are left in their new order, and the new size."""

    world: World
    hosts: tuple[Node, ...]
    size: Size

    @classmethod
    def of(cls, world: World) -> Former:
        """Draw which nodes are lost, how many come new, and how all are numbered."""
        size, draw = world.size, Random(f"resized {world.seed} {world.size}")
        lost = world.invariants.lacking()
        for node in draw.sample(range(size.nodes), size.parities):
            if not world.too_many(lost | {node}):
                lost.add(node)
        hosts = [node for node in world.nodes if node.index not in lost]
        draw.shuffle(hosts)
        least = max(len(hosts), size.parities + 1)
        nodes = draw.randint(least, max(least, size.nodes + 1))
        return cls(world, tuple(hosts), replace(size, nodes=nodes, steps=_STEPS))

    @property
    def lengths(self) -> list[int]:
        """The lengths of the shards of its ranks; empty if they hold replicas."""
        ranks = range(0 if self.world.replicated else self.world.ranks)
        return [states.tensors_of(0, rank)[0].numel() for rank in ranks]

    @property
    def domains(self) -> list[str]:
        """The failure domains of the nodes, if other runs were in between; none otherwise."""
        draw, nodes = Random(f"between {self.world.seed} {self.world.size}"), self.size.nodes
        return draw.choices("abc", k=nodes) if draw.random() < 0.5 else []

    @property
    def epoch(self) -> int:
        """The last epoch of the world before."""
        return max(node.epoch for node in self.world.nodes)

    def hand_over(self, nodes: Sequence[Node]) -> None:
        """Let the first nodes of a new world go on with the SMPs that are left."""
        for node, host in zip(nodes, self.hosts, strict=False):
            node.protocol, node.memory, node.epoch = host.protocol, host.memory, host.epoch
            node.booted_s, node.wakes_s = host.booted_s, host.wakes_s
            if node.protocol is not None:
                node.instance = next(node.world.numbers)
                for holder in list(node.protocol.leases._readers):
                    node.handle(m.Gone(holder))
                for local, rank in enumerate(node.protocol.node.ranks):
                    if rank.connected:
                        node.handle(m.Disconnected(local))


def sharding(rank: int, ranks: int) -> Sharding:
    """Return the place of a rank's shard in the tensor that all ranks divide."""
    lengths = [states.tensors_of(0, each)[0].numel() for each in range(ranks)]
    ends, everyone = list(accumulate(lengths)), tuple(range(ranks))
    place = (ends[rank] - lengths[rank],)
    return Sharding((ends[-1],), (1,), (("Shard", 0),), (ranks,), ("shard",), everyone, place)


class _Training:
    """What the library asks of a model's training in order to deal a state to it."""

    parts, optimizer, loader, samples = ("model",), None, None, 0

    def __init__(self, former: Former) -> None:
        self._former = former

    def states(self, _: object) -> Tree:
        nbytes = sum(self._former.lengths)
        return {"tensors": [torch.empty(nbytes, dtype=torch.uint8)]} if nbytes else {}

    def tree(self, described: Manifest, tensors: list[torch.Tensor]) -> Tree:
        tree: Tree = flat_buffer.unflatten(described.skeleton, tensors)
        return {**tree, "rng": {}, "step": 0, "epoch": None, "dealt": True}


def loaded(
    former: Former,
    membership: Membership,
    note: Callable[[str], None],
    remote: Callable[..., Remote],
    candidate: Candidate,
    roster: Roster,
) -> Tried:
    """Load a step as ``cluster_restore.load``; deal it to this rank if other ranks wrote it."""
    training: Any = _Training(former) if candidate.former else None
    rank = mock.patch.object(config, "rank", partial(int, membership.rank))
    size = mock.patch.object(config, "world_size", partial(int, membership.world_size))
    with rank, size:
        return load(membership, states.tree_of, note, candidate, roster, remote, training)


def is_dealt(tree: Tree, rank: int, former: Former) -> bool:
    """Return true if every byte of a state is right that was dealt to a rank."""
    token, base = tree["token"], rank if rank < former.world.ranks else 0
    wanted = states.all_tensors(token, base, former.world.replicated)
    if former.lengths:
        shards = [states.tensors_of(token, each)[0] for each in range(former.world.ranks)]
        wanted[0] = torch.cat(shards)
    return states.are_equal(wanted, tree["tensors"])

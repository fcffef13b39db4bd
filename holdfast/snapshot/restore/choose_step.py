"""The step that a run goes on from after processes or nodes were lost, decided from what is left.

Every node states its inventory (``ClusterCommit.inventory``): the slots of its own ranks, and the
manifests that it mirrors for others. All ranks decide alike, as all see the same inventories.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import SnapshotMismatch
from holdfast.snapshot.layout.groups import ShardingGroup
from holdfast.snapshot.protocol.roster import HeldStep, NodeInventory, Stamp

StripeSet = tuple[int, ...]


def stripe_sets(groups: Iterable[ShardingGroup]) -> tuple[StripeSet, ...]:
    """Return the ranks, one a node, that stripe a part of a state together; of all groups."""
    return tuple(
        tuple(members[part] for members in group.members)
        for group in groups
        for part in range(min(map(len, group.members)))
    )


@dataclass(frozen=True)
class Candidate:
    """A step that can be put together again.

    Attributes:
        stamp: epoch and step.
        slots: of every rank whose bytes survive, the node that has them.
        manifests: of every rank, a node that has its manifest, or a mirror of it.
        mirrors: of a rank, a node with a mirror, should the other one die meanwhile.
    """

    stamp: Stamp
    slots: Mapping[int, int]
    manifests: Mapping[int, int]
    mirrors: Mapping[int, int] = field(default_factory=dict)

    def lost(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of ``ranks`` whose bytes have to be rebuilt."""
        return tuple(rank for rank in ranks if rank not in self.slots)


def candidates(
    inventories: Sequence[NodeInventory],
    sets: Sequence[StripeSet],
    parities: int,
    world_size: int,
) -> list[Candidate]:
    """Return the steps that can be restored, newest first.

    Args:
        inventories: of every node, in the order of the nodes.
        sets: the ranks that protect each other now.
        parities: how many of a set may be lost.
        world_size: ranks of the run; of every one the manifest is needed.

    Raises:
        SnapshotMismatch: what is held was written by another number of nodes.
    """
    slots = _by_stamp([said["slots"] for said in inventories])
    mirrors = _by_stamp([said["mirrors"] for said in inventories])
    _check_nodes(inventories)
    found = []
    for stamp in sorted(slots, reverse=True):
        # A slot's own manifest comes first: a mirror is for when it is lost.
        candidate = Candidate(stamp, slots[stamp], mirrors[stamp] | slots[stamp], mirrors[stamp])
        described = set(candidate.manifests) >= set(range(world_size))
        if described and all(len(candidate.lost(ranks)) <= parities for ranks in sets):
            found.append(candidate)
    return found


def _by_stamp(held: Sequence[Sequence[HeldStep]]) -> defaultdict[Stamp, dict[int, int]]:
    found: defaultdict[Stamp, dict[int, int]] = defaultdict(dict)
    for node, rows in enumerate(held):
        for row in rows:
            found[Stamp(row["epoch"], row["step"])].setdefault(int(row["rank"]), node)
    return found


def _check_nodes(inventories: Sequence[NodeInventory]) -> None:
    odd = {held["nodes"] for inventory in inventories for held in inventory["slots"]}
    odd -= {len(inventories)}
    if odd:
        raise SnapshotMismatch(
            f"the SMPs hold snapshots of a run on {sorted(odd)} nodes, this one is on "
            f"{len(inventories)}: start as many nodes, or use another run_dir and load a "
            "checkpoint there"
        )

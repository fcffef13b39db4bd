"""The step from which a run continues after processes or nodes were lost.

Every node states its inventory (``ClusterCommit.inventory``): the slots of its own ranks, and the
manifests that it mirrors for others. All ranks see the same inventories and decide alike.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import SnapshotMismatch
from holdfast.snapshot.layout.groups import StripeSet
from holdfast.snapshot.protocol.roster import HeldStep, NodeInventory, Stamp


@dataclass(frozen=True)
class Candidate:
    """A step that can be rebuilt.

    Attributes:
        stamp: epoch and step.
        slots: for every rank whose bytes survive, the node that has them.
        manifests: for every rank, a node that has its manifest, or a mirror of it.
        mirrors: for some ranks, a node with a mirror, in case the node in ``manifests`` dies.
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
    ranks: Iterable[int],
) -> list[Candidate]:
    """Return the steps that can be restored, newest first.

    Args:
        inventories: those of all nodes, in the order of the nodes.
        sets: the sets of ranks that protect each other now.
        parities: the number of ranks of a set that may be lost.
        ranks: the ranks of the parity group, all of whose manifests are needed.
    """
    slots = _by_stamp([said["slots"] for said in inventories])
    mirrors = _by_stamp([said["mirrors"] for said in inventories])
    _check_nodes(inventories)
    found, needed = [], set(ranks)
    for stamp in sorted(slots, reverse=True):
        # The manifest in a slot is preferred to its mirrors.
        candidate = Candidate(stamp, slots[stamp], mirrors[stamp] | slots[stamp], mirrors[stamp])
        described = candidate.manifests.keys() >= needed
        if described and all(len(candidate.lost(ranks)) <= parities for ranks in sets):
            found.append(candidate)
    return found


def none_before(step: int, keep: int) -> str:
    """Return the message that no snapshot is older than a step."""
    return (
        f"no intact snapshot of a step before {step} is held with keep={keep}: "
        "a larger keep leaves older ones to try"
    )


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

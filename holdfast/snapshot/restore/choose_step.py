"""The step from which a run continues after processes or nodes were lost.

Every node states its inventory (``ClusterCommit.inventory``): the slots of its own ranks, and the
manifests that it mirrors for others. All ranks see the same inventories and decide alike.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from holdfast.snapshot.layout.groups import StripeSet
from holdfast.snapshot.protocol.roster import HeldStep, NodeInventory, Stamp

Sets = tuple[StripeSet, ...]


@dataclass(frozen=True)
class Candidate:
    """A step that can be rebuilt.

    Attributes:
        slots: for every rank whose bytes survive, the node that has them.
        manifests: for every rank, nodes that have its manifest, or a mirror of it, best first.
        sets: for every rank of which a slot states them, the stripe sets of its sharding group when
            the step was written: the nodes may be cut into other groups by now.
        lacking: of the stripe set that lost most ranks, how many it lost.
        former: true if another number of ranks or nodes wrote it, whose numbers all are then.
        local_ranks: the number of ranks of each node that wrote it.
    """

    stamp: Stamp
    slots: Mapping[int, int]
    manifests: Mapping[int, Sequence[int]]
    sets: Mapping[int, Sets] = field(default_factory=dict)
    lacking: int = 0
    former: bool = False
    local_ranks: int = 1


def candidates(
    inventories: Sequence[NodeInventory],
    sets: Sequence[StripeSet],
    parities: int,
    members: Iterable[int],
    world_size: int,
) -> list[Candidate]:
    """Return the steps that can be restored, newest first.

    Each set of ranks that protected each other may lose as many as there are ``parities``. All
    manifests of ``members``, the ranks of the parity group, are needed, and the sets, as the slots
    state them, of those that are in one of ``sets`` now. Of a step that another number of ranks or
    nodes wrote, all manifests are needed, and the sets of all ranks.
    """
    found, own, striping = [], set(members), {*chain.from_iterable(sets)}
    for step in held_steps(inventories, world_size):
        told = step.manifests.keys() >= own and step.sets.keys() >= striping
        if (told or step.former) and step.lacking <= parities:
            found.append(step)
    return found


def held_steps(inventories: Sequence[NodeInventory], world_size: int) -> Iterator[Candidate]:
    """Yield all steps in the inventories, newest first, but none of former ranks in part."""
    slots = _by_stamp([said["slots"] for said in inventories])
    mirrors = _by_stamp([said["mirrors"] for said in inventories])
    rows = [row for said in inventories for row in said["slots"]]
    for stamp in sorted(slots, reverse=True):
        # The manifest in a slot is preferred to its mirrors.
        ours = [row for row in rows if (row["epoch"], row["step"]) == stamp]
        ranks, nodes = ours[0]["ranks"], ours[0]["nodes"]
        former, sets = (ranks, nodes) != (world_size, len(inventories)), dict[int, Sets]()
        for row in ours:
            group = tuple(map(tuple, row["sets"]))  # a rank that is idle is in none of them
            sets |= dict.fromkeys([row["rank"], *chain.from_iterable(group)], group)
        manifests = defaultdict[int, list[int]](list)
        for rank, node in (*slots[stamp].items(), *mirrors[stamp].items()):
            manifests[rank].append(node)
        # Ranks whose sets no slot states may be of a group that never held this step.
        if not former or manifests.keys() & sets.keys() >= set(range(ranks)):
            needed = {*chain.from_iterable(sets.values())}
            lacking = max((len({*each} - slots[stamp].keys()) for each in needed), default=0)
            yield Candidate(stamp, slots[stamp], manifests, sets, lacking, former, ranks // nodes)


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

"""What the nodes of a run tell each other when they join it, as rosters; decided without I/O."""

from collections.abc import Sequence

from holdfast.snapshot.layout import groups, node_groups
from holdfast.snapshot.layout.groups import Job, ShardingGroup
from holdfast.snapshot.node.session import Listening
from holdfast.snapshot.protocol.roster import Roster


def held_groups(places: Sequence[Listening], nodes: int) -> list[tuple[int, ...]]:
    """Return the parity groups whose steps the SMPs hold, by the latest agreement of the run.

    ``places`` are those of all nodes. Nothing is returned of another number of nodes, or if the
    groups contradict each other.
    """
    known = [place for place in places if place.group and place.run_nodes == nodes]
    latest = max((place.epoch for place in known), default=0)
    found = sorted({place.group for place in known if place.epoch == latest})
    members = [node for group in found for node in group]
    fits = len(set(members)) == len(members) and set(members) <= set(range(nodes))
    return found if fits else []


def ranks_of(group: Sequence[int], local: int) -> list[int]:
    """Return the ranks on the nodes of a group, each of which has ``local`` ranks."""
    return [node * local + rank for node in group for rank in range(local)]


def make_roster(
    job: Job,
    parities: int,
    cut: Sequence[tuple[int, ...]],
    node: int,
    places: Sequence[Listening],
    secret: str,
    domains: Sequence[str] = (),
) -> Roster:
    """Return the roster of a node in a new epoch.

    Args:
        job: the ranks of the run.
        parities: the number of nodes of each group that may be lost.
        cut: the parity groups (``node_groups``).
        node: the node.
        places: the places of all nodes.
        secret: a text that the nodes share from now on.
        domains: the failure domain of each node, if they are known.
    """
    group = next(group for group in cut if node in group)
    found = groups.sharding_groups(job, parities, [group])
    local = job.ranks_per_node
    mirrors = {rank: _mirror_nodes(found, rank, parities) for rank in ranks_of(group, local)}
    parents, children = node_groups.tree_neighbours(cut, node)
    own = ranks_of([node], local)
    return Roster(
        epoch=1 + max(place.epoch for place in places),
        node=node,
        run_nodes=job.nodes,
        group=group,
        addresses={n: places[n][:2] for n in (*group, *parents, *children)},
        secret=secret,
        parities=parities,
        first_rank=own[0],
        mirror_nodes=tuple(mirrors[rank] for rank in own),
        mirrored_ranks=tuple(rank for rank, nodes in mirrors.items() if node in nodes),
        sets=tuple(groups.stripe_sets([groups.seat(found, rank).group]) for rank in own),
        parents=parents,
        children=children,
        weak_domains=node_groups.weak_domains(group, domains, parities),
    )


def _mirror_nodes(found: Sequence[ShardingGroup], rank: int, parities: int) -> tuple[int, ...]:
    """Return the nodes that mirror a rank's manifest: those after it in its sharding group."""
    seat = groups.seat(found, rank)
    nodes = seat.group.nodes
    following = range(seat.index + 1, seat.index + 1 + parities)
    return tuple(nodes[index % len(nodes)] for index in following)

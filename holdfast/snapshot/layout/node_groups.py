"""Parity groups: the nodes of a run, cut into small groups that protect and seal their own states.

Nodes whose states are interchangeable are dealt out evenly. Replicas that fit into a group stay
together, because they compute their parities without the network. Nodes of one failure domain (a
rack, a switch) go to different groups as far as possible; where none are known, neighbours do.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from holdfast.errors import ConfigError
from holdfast.planner.parity_groups import group_count
from holdfast.snapshot.layout.groups import Job, sharding_groups

Nodes = tuple[int, ...]
# A group's children in the commit tree: a node then has at most about 8 + 8 + 1 links.
FAN_OUT = 8


def node_groups(
    job: Job, parities: int, most: int, domains: Sequence[str] = (), kept: Iterable[Nodes] = ()
) -> tuple[Nodes, ...]:
    """Return the parity groups of a run; each node is in one.

    Of each group, of ``most`` nodes or fewer, as many may be lost as there are ``parities``.
    ``domains`` has the failure domain of each node, empty where it is unknown. Groups that are
    ``kept``, from an earlier start of the run, stay as they are.

    **Guarantees**: of a domain, a group of interchangeable nodes has no more than its even part.
    All nodes form one group if the job's states cannot be protected in smaller ones. A state on too
    few nodes raises ConfigError.
    """
    everyone, known = tuple(range(job.nodes)), [*domains, *[""] * job.nodes]
    kept = [tuple(group) for group in kept]
    left = sorted(set(everyone).difference(*kept))
    tries = [[*kept, *_dealt(job, left, parities, most, known)]] if kept else []
    if job.nodes > most:
        tries.append(_dealt(job, everyone, parities, most, known))
    for cut in tries:
        with suppress(ConfigError):
            sharding_groups(job, parities, cut)
            return tuple(sorted(cut))
    sharding_groups(job, parities)
    return (everyone,)


def _dealt(
    job: Job, nodes: Sequence[int], parities: int, most: int, domains: Sequence[str]
) -> list[Nodes]:
    found, by_size = list[Nodes](), defaultdict[int, list[Nodes]](list)
    for each, alike in _classes(job, nodes):
        if alike and len(each) > most:
            sizes, count = Counter(domains[n] for n in each), group_count(len(each), most, parities)
            order = sorted(each, key=lambda n: (-sizes[domains[n]], domains[n], n))
            found += [tuple(sorted(order[n::count])) for n in range(count)]
        else:
            by_size[min(len(each), most)].append(each)
    for size, classes in by_size.items():
        count = -(-len(classes) // (most // size))
        found += [tuple(sorted(sum(classes[n::count], ()))) for n in range(count)]
    return found


def _classes(job: Job, nodes: Sequence[int]) -> Iterator[tuple[Nodes, bool]]:
    """Yield the sets of nodes that hold replicas of each other, and whether all hold the same.

    Nodes without a replica on another node form one set, in which none is unlike another.
    """
    joined, states = {node: node for node in nodes}, defaultdict[int, list[int]](list)

    def first(node: int) -> int:
        while joined[node] != node:
            node = joined[node]
        return node

    for state, ranks in enumerate(job.holders()):
        holders = sorted({job.node(rank) for rank in ranks} & joined.keys())
        for node in holders:
            states[node].append(state)
            joined[first(node)] = first(holders[0])
    members = defaultdict[int, list[int]](list)
    for node in nodes:
        members[first(node)].append(node)
    single = tuple(node for each in members.values() if len(each) == 1 for node in each)
    if single:
        yield single, True
    for each in members.values():
        if len(each) > 1:
            yield tuple(each), all(states[node] == states[each[0]] for node in each)


def weak_domains(group: Nodes, domains: Sequence[str], parities: int) -> tuple[str, ...]:
    """Return the domains of which a group has more nodes than it may lose."""
    counts = Counter(domains[node] for node in group if node < len(domains))
    return tuple(name for name, count in sorted(counts.items()) if name and count > parities)


def tree_neighbours(cut: Sequence[Nodes], node: int) -> tuple[Nodes, Nodes]:
    """Return a node's parents and children in the commit trees.

    The groups form a tree; along each of its edges, the nodes of two groups are paired by their
    places in them, so that each place has a tree of its own.
    """
    own = next(number for number, group in enumerate(cut) if node in group)
    below = range(own * FAN_OUT + 1, min(len(cut), own * FAN_OUT + FAN_OUT + 1))
    parents = _paired(cut[own], cut[(own - 1) // FAN_OUT])[node] if own else ()
    return parents, tuple(child for n in below for child in _paired(cut[own], cut[n])[node])


def _paired(ones: Nodes, others: Nodes) -> Mapping[int, Nodes]:
    found = defaultdict[int, list[int]](list)
    for place in range(max(len(ones), len(others))):
        found[ones[place % len(ones)]].append(others[place % len(others)])
    return {node: tuple(each) for node, each in found.items()}

"""Sharding groups: the ranks that protect each other's state, derived from the shape of the job.

Ranks that differ only along REPLICATE dimensions hold the same state. If such replicas are on
several nodes they form a *replicated* group: the nodes divide the one state, and each computes its
parities from its own replica. A state whose replicas are all on one node is protected together with
states of other nodes in a *reduced* group: each node keeps its own state, and the blocks of a
stripe are sent over the network to the node that keeps their parity.

Source: REFT (Wang et al. 2023, §4.1), whose groups are the data-parallel replicas of one pipeline
stage; reduced groups are ours.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from math import prod
from typing import Any

from holdfast.errors import ConfigError


class Kind(Enum):
    """The relation between the states of the ranks along one dimension of the job."""

    REPLICATE = "replicate"  # DDP, the outer dimension of HSDP: every rank the same state
    SHARD = "shard"  # FSDP, the inner dimension of HSDP, ZeRO
    TENSOR = "tensor"
    PIPELINE = "pipeline"


class Mode(Enum):
    """The way in which a group computes its parities: from replicas, or from blocks sent to it."""

    REPLICATED = "replicated"
    REDUCED = "reduced"


# Names with the same meaning everywhere. "dp", "cp" and "ep" have several meanings, so that the
# user must state their kind.
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("ddp", "replicate", "dp_replicate"), Kind.REPLICATE),
    **dict.fromkeys(("fsdp", "shard", "dp_shard", "dp_shard_cp"), Kind.SHARD),
    **dict.fromkeys(("tp", "tensor"), Kind.TENSOR),
    **dict.fromkeys(("pp", "pipeline"), Kind.PIPELINE),
}


@dataclass(frozen=True)
class Dim:
    """One dimension of the job: its name, the number of ranks along it, and its kind."""

    name: str
    size: int
    kind: Kind


@dataclass(frozen=True)
class Job:
    """The ranks of a job: its dimensions, outermost first, and the number of ranks on each node.

    Rank r is on node r // ranks_per_node. ``ranks`` lists the ranks in the order of their
    coordinates, last dimension fastest; empty means 0, 1, 2, … Impossible sizes raise ConfigError,
    as do ``ranks`` that do not name every rank once.
    """

    dims: tuple[Dim, ...]
    ranks_per_node: int
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = [dim.size for dim in self.dims]
        world = prod(sizes)
        if min([self.ranks_per_node, *sizes]) < 1 or world % self.ranks_per_node:
            raise ConfigError(
                f"dimensions {sizes} with ranks_per_node={self.ranks_per_node}: sizes must be at "
                f"least 1, and every node must have as many of the {world} ranks"
            )
        if self.ranks and sorted(self.ranks) != list(range(world)):
            raise ConfigError(
                f"the mesh has {len(self.ranks)} ranks, {min(self.ranks)} … {max(self.ranks)}, "
                f"and dimensions {sizes}: give the mesh of the whole job, not a part of it"
            )

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return prod(dim.size for dim in self.dims) // self.ranks_per_node

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def holders(self) -> list[tuple[int, ...]]:
        """Return the ranks that hold each different state, in ascending order."""
        found = defaultdict(list)
        coordinates = product(*(range(dim.size) for dim in self.dims))
        ranks = self.ranks or range(prod(dim.size for dim in self.dims))
        for rank, place in zip(ranks, coordinates, strict=True):
            pairs = zip(self.dims, place, strict=True)
            found[tuple(at for dim, at in pairs if dim.kind is not Kind.REPLICATE)].append(rank)
        return sorted(tuple(sorted(same)) for same in found.values())


def of_mesh(mesh: Any, ranks_per_node: int, kinds: Mapping[str, Kind] = KINDS) -> Job:
    """Return the job that a torch ``DeviceMesh`` describes by its names, shape and ranks.

    ``kinds`` has the kind of each name: ``KINDS``, extended by the caller's own names.

    Raises:
        ConfigError: a dimension has no name or no known kind, or as ``Job``.
    """
    names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
    if not names or len(names) != len(shape):
        raise ConfigError(f"a mesh of shape {shape} without names: make it with mesh_dim_names")
    unknown = [name for name in names if name not in kinds]
    if unknown:
        raise ConfigError(
            f"mesh dimensions {unknown} may replicate or divide the state: say which, as "
            f"kinds={{**KINDS, {unknown[0]!r}: Kind.REPLICATE}} or Kind.SHARD"
        )
    dims = tuple(Dim(name, size, kinds[name]) for name, size in zip(names, shape, strict=True))
    ranks = getattr(mesh, "mesh", None)
    order = () if ranks is None else tuple(int(rank) for rank in ranks.flatten().tolist())
    return Job(dims, ranks_per_node, order)


@dataclass(frozen=True)
class Spread:
    """The layout of parameters on a mesh, in terms of the mesh of the whole job.

    ``names``, ``shape`` and ``ranks`` are those of the job's mesh, ``dims`` the dimensions of the
    parameters' own one, and ``divided`` those along which some parameter is divided.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dims: frozenset[str]
    divided: frozenset[str]


def of_model(model: Any, world_size: int, ranks_per_node: int, mesh: Any = None) -> Job:
    """Return the job that follows from the placement of a model's parameters, or raise ConfigError.

    Ranks along a dimension that divides a DTensor hold different states; ranks along a dimension
    that replicates all of them hold the same. Without DTensors all ranks hold the same state. A
    dimension of the job's mesh that no parameter is on must have a name of ``KINDS``, because it
    may be pipeline stages. If ``mesh`` is given, the mesh of the whole job, it is used instead.
    """
    if mesh is not None:
        return of_mesh(mesh, ranks_per_node)
    placed = {
        (parameter.device_mesh, parameter.placements)
        for parameter in model.parameters()
        if hasattr(parameter, "device_mesh")
    }
    return of_spreads([_spread(*one) for one in placed], world_size, ranks_per_node)


def _spread(mesh: Any, placements: Sequence[Any]) -> Spread:
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    # A dimension without a name has its number.
    sides = [m.mesh_dim_names or tuple(map(str, range(len(m.shape)))) for m in (root, mesh)]
    pairs = zip(sides[1], placements, strict=True)
    divided = frozenset(name for name, placement in pairs if not placement.is_replicate())
    ranks = tuple(int(rank) for rank in root.mesh.flatten().tolist())
    return Spread(tuple(sides[0]), tuple(root.shape), ranks, frozenset(sides[1]), divided)


def of_spreads(spreads: Sequence[Spread], world_size: int, ranks_per_node: int) -> Job:
    """Return the job in which parameters have these layouts, as ``of_model``."""
    if not spreads:
        return Job((Dim("replicate", world_size, Kind.REPLICATE),), ranks_per_node)
    meshes = {(spread.names, spread.shape, spread.ranks) for spread in spreads}
    if len(meshes) > 1:
        shapes = sorted(str(dict(zip(names, shape, strict=True))) for names, shape, _ in meshes)
        raise _untold(f"parameters are on meshes that are not parts of one: {', '.join(shapes)}")
    names, shape, ranks = meshes.pop()
    if len(ranks) != world_size:
        raise _untold(f"parameters are on a mesh of {len(ranks)} of the {world_size} ranks")
    used = frozenset[str]().union(*(spread.dims for spread in spreads))
    divided = frozenset[str]().union(*(spread.divided for spread in spreads))
    if strange := sorted((used - set(names)) | {n for n in names if n not in used | set(KINDS)}):
        raise _untold(f"the mesh dimensions {strange} are flattened ones, or hold no parameter")
    own = {name: Kind.SHARD if name in divided else Kind.REPLICATE for name in used}
    kinds = ({**KINDS, **own}[name] for name in names)
    dims = tuple(Dim(*one) for one in zip(names, shape, kinds, strict=True))
    return Job(dims, ranks_per_node, ranks)


def _untold(why: str) -> ConfigError:
    return ConfigError(
        f"the model does not show which ranks hold the same state: {why}; give mesh=, a "
        f"DeviceMesh of all ranks whose dimensions have names of {sorted(KINDS)}"
    )


StripeSet = tuple[int, ...]


@dataclass(frozen=True)
class ShardingGroup:
    """Nodes that protect one state, or the states of all of them, together.

    ``members[i]`` are the ranks of ``nodes[i]``, which hold the same state and divide the work.
    """

    mode: Mode
    nodes: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Seat:
    """A rank's place: node ``index`` of ``group``, as number ``part`` of ``parts`` ranks there."""

    group: ShardingGroup
    index: int
    part: int
    parts: int


def sharding_groups(
    job: Job, parities: int = 1, cut: Sequence[tuple[int, ...]] | None = None
) -> tuple[ShardingGroup, ...]:
    """Return the groups that protect a job's states; every rank is in exactly one.

    The nodes of each parity group of ``cut`` (``node_groups``) protect no others; nodes in none are
    left out. By default all nodes are one.

    **Guarantees**: a group's members are on different nodes, so the loss of a node costs each group
    at most one of its nodes. A state on too few nodes to survive the loss of ``parities`` raises
    ConfigError.
    """
    cut = [tuple(range(job.nodes))] if cut is None else cut
    part_of = {node: number for number, nodes in enumerate(cut) for node in nodes}
    found: list[list[ShardingGroup]] = [[] for _ in cut]
    lonely = [defaultdict[int, list[tuple[int, ...]]](list) for _ in cut]
    for holders in job.holders():
        parts = defaultdict[int, dict[int, tuple[int, ...]]](dict)
        for rank in holders:
            if (node := job.node(rank)) in part_of:
                by_node = parts[part_of[node]]
                by_node[node] = (*by_node.get(node, ()), rank)
        for part, by_node in parts.items():
            if len(by_node) > 1:
                found[part].append(_group(Mode.REPLICATED, by_node, parities))
            else:
                (node,) = by_node
                lonely[part][node].append(by_node[node])
    for groups, alone in zip(found, lonely, strict=True):
        for layer in range(max(map(len, alone.values()), default=0)):
            layers = ((node, held[layer:]) for node, held in sorted(alone.items()))
            states = {node: rest[0] for node, rest in layers if rest}
            groups.append(_group(Mode.REDUCED, states, parities))
    return tuple(group for groups in found for group in groups)


def stripe_sets(groups: Iterable[ShardingGroup]) -> tuple[StripeSet, ...]:
    """Return the sets of ranks, one per node, that stripe a part of a state together."""
    return tuple(
        tuple(members[part] for members in group.members)
        for group in groups
        for part in range(min(map(len, group.members)))
    )


def seat(groups: Iterable[ShardingGroup], rank: int) -> Seat:
    """Return the place of a rank."""
    for group in groups:
        for index, members in enumerate(group.members):
            if rank in members:
                return Seat(group, index, members.index(rank), len(members))
    raise ValueError(f"rank {rank} is in none of the sharding groups: is it one of this job?")


def _group(mode: Mode, members: Mapping[int, tuple[int, ...]], parities: int) -> ShardingGroup:
    nodes = tuple(members)
    if len(nodes) > parities:
        return ShardingGroup(mode, nodes, tuple(members.values()))
    ranks = members[nodes[0]]
    if mode is Mode.REPLICATED:
        where = f"is on nodes {list(nodes)} only"
    elif len(ranks) > 1:
        where = f"has all its {len(ranks)} replicas on node {nodes[0]}, and would be lost with it"
    else:
        where = f"is on node {nodes[0]} alone"
    raise ConfigError(
        f"the state of rank {ranks[0]} {where}: to survive the loss of {parities}, a group needs "
        f"{parities + 1} nodes or more; use more nodes or fewer parities, or place its replicas "
        "on different nodes"
    )

"""Sharding groups: which ranks protect each other's state, from the shape of the job.

Ranks that differ only along REPLICATE dimensions hold the same state. Where such replicas live on
several nodes they form a *replicated* group: the nodes divide the one state, and parities are
computed locally. A state whose holders all live on one node has no replica to survive that node; it
is protected together with states of other nodes in a *reduced* group: each node keeps its own
state, and the blocks of a stripe go over the network to the node that keeps their parity.

Source: REFT (Wang et al. 2023, §4.1), whose groups are the data-parallel replicas of one pipeline
stage; reduced groups are ours.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, product
from math import prod
from typing import Any

from holdfast.errors import ConfigError


class Kind(Enum):
    """The effect of a dimension of the job on the state."""

    REPLICATE = "replicate"  # DDP, the outer dimension of HSDP: every rank the same state
    SHARD = "shard"  # FSDP, the inner dimension of HSDP, ZeRO
    TENSOR = "tensor"
    PIPELINE = "pipeline"


class Mode(Enum):
    """The way in which the parities of a group come about."""

    REPLICATED = "replicated"
    REDUCED = "reduced"


# Names that mean one thing wherever they are used. "dp", "cp" and "ep" do not: they must be told.
KINDS: Mapping[str, Kind] = {
    "ddp": Kind.REPLICATE,
    "replicate": Kind.REPLICATE,
    "dp_replicate": Kind.REPLICATE,
    "fsdp": Kind.SHARD,
    "shard": Kind.SHARD,
    "dp_shard": Kind.SHARD,
    "dp_shard_cp": Kind.SHARD,
    "tp": Kind.TENSOR,
    "tensor": Kind.TENSOR,
    "pp": Kind.PIPELINE,
    "pipeline": Kind.PIPELINE,
}


@dataclass(frozen=True)
class Dim:
    """One dimension of the job: its name, number of ranks along it, and kind."""

    name: str
    size: int
    kind: Kind


@dataclass(frozen=True)
class Job:
    """The ranks of a job: ``dims`` outermost first, and where they run.

    Rank r lives on node r // ranks_per_node. ``ranks`` are the ranks in the order of their
    coordinates, last dimension fastest; empty means 0, 1, 2, ….

    Raises:
        ConfigError: sizes that are no job, or ranks that are not each of them once.
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
        """Return the ranks that hold each different state, ascending."""
        found = defaultdict(list)
        coordinates = product(*(range(dim.size) for dim in self.dims))
        ranks = self.ranks or range(prod(dim.size for dim in self.dims))
        for rank, place in zip(ranks, coordinates, strict=True):
            pairs = zip(self.dims, place, strict=True)
            found[tuple(at for dim, at in pairs if dim.kind is not Kind.REPLICATE)].append(rank)
        return sorted(tuple(sorted(same)) for same in found.values())


def of_mesh(mesh: Any, ranks_per_node: int, kinds: Mapping[str, Kind] = KINDS) -> Job:
    """Return the job that a torch ``DeviceMesh`` describes by its names, shape and ranks.

    Args:
        mesh: has ``mesh_dim_names``, ``shape`` and, unless in order, ``mesh`` (tensor of ranks).
        ranks_per_node: ranks on each node; torchrun's ``LOCAL_WORLD_SIZE``.
        kinds: what the names mean; ``KINDS``, extended by your own.

    Raises:
        ConfigError: a dimension without name or known kind, or as ``Job``.
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
    """The layout of parameters on a mesh: its dimensions within the mesh of the whole job.

    Attributes:
        names, shape, ranks: of the job's mesh; a mesh without names has its dimensions' numbers.
        dims: those of them that the parameters' own mesh has.
        divided: those of ``dims`` along which some parameter is divided.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dims: frozenset[str]
    divided: frozenset[str]


def of_model(model: Any, world_size: int, ranks_per_node: int, mesh: Any = None) -> Job:
    """Return the job that a model's parameters tell of.

    Dimensions along which a DTensor is divided hold different states, those along which all are
    replicated the same; without DTensors all ranks do. A dimension of the job's mesh that none of
    the parameters is on must have a name of ``KINDS``: it may be pipeline stages.

    Args:
        model: its ``parameters()`` are looked at.
        world_size: ranks of the job.
        ranks_per_node: ranks on each node; torchrun's ``LOCAL_WORLD_SIZE``.
        mesh: the mesh of the whole job, to be believed instead (``of_mesh``).

    Raises:
        ConfigError: the parameters do not tell; says why, and to give ``mesh``. Or as ``Job``.
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
    dims = _names_of(mesh)
    pairs = zip(dims, placements, strict=True)
    divided = frozenset(name for name, placement in pairs if not placement.is_replicate())
    ranks = tuple(int(rank) for rank in root.mesh.flatten().tolist())
    return Spread(_names_of(root), tuple(root.shape), ranks, frozenset(dims), divided)


def _names_of(mesh: Any) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or map(str, range(len(mesh.shape))))


def of_spreads(spreads: Sequence[Spread], world_size: int, ranks_per_node: int) -> Job:
    """Return the job in which parameters are spread so; a pure function, else as ``of_model``."""
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
    kinds = (_kind(name, used, divided) for name in names)
    dims = tuple(Dim(*one) for one in zip(names, shape, kinds, strict=True))
    return Job(dims, ranks_per_node, ranks)


def _kind(name: str, used: frozenset[str], divided: frozenset[str]) -> Kind:
    if name not in used:
        return KINDS[name]
    return Kind.SHARD if name in divided else Kind.REPLICATE


def _untold(why: str) -> ConfigError:
    return ConfigError(
        f"which ranks hold the same state cannot be seen from the model: {why}; give mesh=, a "
        f"DeviceMesh of all ranks whose dimensions have names of {sorted(KINDS)}"
    )


@dataclass(frozen=True)
class ShardingGroup:
    """Nodes that protect a state, or their states, together.

    ``members[i]`` are the ranks of ``nodes[i]``, all holding the same state; they divide the work
    of the group's node i (``stripes.portion``), where all nodes have as many by dividing the state
    before it is striped.
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
    job: Job, parities: int = 1, max_nodes: int | None = None
) -> tuple[ShardingGroup, ...]:
    """Return the groups that protect a job's states; every rank is in exactly one.

    Args:
        job: the ranks, what they hold and where they run.
        parities: nodes that each group must survive the loss of, 1 or 2.
        max_nodes: split larger groups. Fewer nodes together are safer against several losses, and
            cost each node more memory and, with replicas, more copying (1/n of the state each).

    **Guarantees**: a group's members live on different nodes, so the loss of a node costs each
    group at most one of its nodes.

    Raises:
        ConfigError: ``max_nodes`` is too small, or a state cannot be protected: too few nodes.
    """
    if max_nodes is not None and max_nodes <= parities:
        raise ConfigError(
            f"max_nodes={max_nodes}: a group that is to survive the loss of {parities} needs "
            f"{parities + 1} nodes or more"
        )
    groups: list[ShardingGroup] = []
    lonely: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for holders in job.holders():
        by_node = _by_node(job, holders)
        if len(by_node) > 1:
            groups += _split(Mode.REPLICATED, by_node, parities, max_nodes)
        else:
            lonely[job.node(holders[0])].append(holders)
    for layer in range(max(map(len, lonely.values()), default=0)):
        states = {node: lonely[node][layer] for node in sorted(lonely) if len(lonely[node]) > layer}
        groups += _split(Mode.REDUCED, states, parities, max_nodes)
    return tuple(groups)


def seat(groups: Iterable[ShardingGroup], rank: int) -> Seat:
    """Return the place of a rank.

    Raises:
        ValueError: in none of the groups.
    """
    for group in groups:
        for index, members in enumerate(group.members):
            if rank in members:
                return Seat(group, index, members.index(rank), len(members))
    raise ValueError(f"rank {rank} is in none of the sharding groups: is it one of this job?")


def _by_node(job: Job, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for rank in ranks:
        found[job.node(rank)] = (*found.get(job.node(rank), ()), rank)
    return found


def _split(
    mode: Mode, members: Mapping[int, tuple[int, ...]], parities: int, max_nodes: int | None
) -> list[ShardingGroup]:
    nodes, size = list(members), len(members)
    count = 1 if max_nodes is None else -(-size // max_nodes)
    edges = [number * size // count for number in range(count + 1)]
    parts = [nodes[start:stop] for start, stop in pairwise(edges)]
    smallest = min(parts, key=len)
    if len(smallest) <= parities:
        raise _too_few(mode, smallest, members, parities, max_nodes)
    return [ShardingGroup(mode, tuple(p), tuple(members[node] for node in p)) for p in parts]


def _too_few(
    mode: Mode,
    nodes: Sequence[int],
    members: Mapping[int, tuple[int, ...]],
    parities: int,
    max_nodes: int | None,
) -> ConfigError:
    ranks = members[nodes[0]]
    if len(members) > parities:
        return ConfigError(
            f"max_nodes={max_nodes} leaves a group of {len(nodes)} of {len(members)} nodes, too "
            f"few to survive the loss of {parities}: choose another max_nodes"
        )
    if mode is Mode.REPLICATED:
        where = f"is on nodes {list(nodes)} only"
    elif len(ranks) > 1:
        where = f"has all its {len(ranks)} replicas on node {nodes[0]}, and would be lost with it"
    else:
        where = f"is on node {nodes[0]} alone"
    return ConfigError(
        f"the state of rank {ranks[0]} {where}: to survive the loss of {parities}, a group needs "
        f"{parities + 1} nodes or more; use more nodes or fewer parities, or place its replicas "
        "on different nodes"
    )

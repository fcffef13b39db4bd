"""Every rank sits in one group, with replicas or partners on other nodes, or is told why not."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from holdfast.errors import ConfigError
from holdfast.snapshot.layout.groups import (
    KINDS,
    Dim,
    Job,
    Kind,
    Mode,
    ShardingGroup,
    Spread,
    of_mesh,
    of_model,
    of_spreads,
    seat,
    sharding_groups,
)


def job(ranks_per_node: int, *sizes: tuple[str, int], ranks: tuple[int, ...] = ()) -> Job:
    dims = tuple(Dim(name, size, KINDS[name]) for name, size in sizes)
    return Job(dims, ranks_per_node, ranks)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    kinds = draw(st.lists(st.sampled_from(list(Kind)), min_size=1, max_size=3))
    dims = tuple(Dim(kind.value, draw(st.integers(1, 4)), kind) for kind in kinds)
    world = 1
    for dim in dims:
        world *= dim.size
    per_node = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    ranks = draw(st.permutations(range(world))) if draw(st.booleans()) else ()
    return Job(dims, per_node, tuple(ranks))


def protected(any_job: Job, parities: int) -> tuple[ShardingGroup, ...]:
    try:
        return sharding_groups(any_job, parities)
    except ConfigError:
        assume(False)
        raise


PARITIES = st.integers(1, 2)


@given(jobs(), PARITIES)
def test_every_rank_has_one_seat_on_its_own_node_in_a_group_of_several_nodes(
    any_job: Job, parities: int
) -> None:
    groups = protected(any_job, parities)
    world = any_job.nodes * any_job.ranks_per_node
    counts = Counter(rank for group in groups for members in group.members for rank in members)
    assert counts == Counter(range(world))
    for rank in range(world):
        place = seat(groups, rank)
        assert rank in place.group.members[place.index]
        assert any_job.node(rank) == place.group.nodes[place.index]
        assert 0 <= place.part < place.parts == len(place.group.members[place.index])
    state_of = {rank: ranks[0] for ranks in any_job.holders() for rank in ranks}
    for group in groups:
        assert len(set(group.nodes)) == len(group.nodes) == len(group.members)
        assert parities < len(group.nodes) <= any_job.nodes
        # Members on a node hold one state, replicas all the same.
        states = [{state_of[rank] for rank in members} for members in group.members]
        assert all(len(state) == 1 for state in states)
        replicated = group.mode is Mode.REPLICATED
        assert len(set.union(*states)) == (1 if replicated else len(group.nodes))


PAIRS = ((0, 1), (2, 3), (4, 5))
FIRST_AND_SECOND = [((0,), (2,), (4,)), ((1,), (3,), (5,))]


@pytest.mark.parametrize(
    ("dims", "mode", "members"),
    [
        ([("ddp", 6)], Mode.REPLICATED, [PAIRS]),
        ([("dp_replicate", 3), ("dp_shard", 2)], Mode.REPLICATED, FIRST_AND_SECOND),
        ([("fsdp", 6)], Mode.REDUCED, FIRST_AND_SECOND),
        # Replicas inside a node share the work and lean on other nodes.
        ([("pp", 3), ("ddp", 2)], Mode.REDUCED, [PAIRS]),
    ],
)
def test_groups_of_three_nodes_with_two_ranks_each(
    dims: list[tuple[str, int]], mode: Mode, members: list[Any]
) -> None:
    groups = sharding_groups(job(2, *dims))
    found = [(group.mode, group.nodes, group.members) for group in groups]
    assert found == [(mode, (0, 1, 2), each) for each in members]


def test_groups_of_several_stages_and_of_many_nodes() -> None:
    # REFT's: two stages, three data-parallel paths, tensor-parallel inside a node of two ranks.
    groups = sharding_groups(job(2, ("pp", 2), ("ddp", 3), ("tp", 2)))
    assert [group.nodes for group in groups] == [(0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5)]
    groups = sharding_groups(job(1, ("fsdp", 6)), 2)
    assert [group.nodes for group in groups] == [(0, 1, 2, 3, 4, 5)]


LONELY = Job((Dim("tp", 3, Kind.TENSOR), Dim("ddp", 2, Kind.REPLICATE)), 2, (0, 1, 2, 4, 3, 5))


@pytest.mark.parametrize(
    ("any_job", "parities", "message"),
    [
        (job(4, ("ddp", 4)), 1, "has all its 4 replicas on node 0, and would be lost"),
        # Ranks 0 and 1 hold a state on node 0; the other state is on nodes 1 and 2.
        (LONELY, 1, "has all its 2 replicas on node 0"),
        (
            job(4, ("fsdp", 4)),
            1,
            "rank 0 is on node 0 alone: to survive the loss of 1, a group needs 2",
        ),
        (job(1, ("ddp", 2)), 2, r"is on nodes \[0, 1\] only: .* a group needs 3"),
        (job(1, ("ddp", 2), ("tp", 4)), 2, "use more nodes or fewer parities"),
    ],
)
def test_what_cannot_be_protected_says_why(any_job: Job, parities: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharding_groups(any_job, parities)


@pytest.mark.parametrize("dims", [[("ddp", 0)], [("ddp", 3)], [("ddp", 2), ("tp", -1)]])
def test_sizes_that_are_no_job_are_refused(dims: list[tuple[str, int]]) -> None:
    with pytest.raises(ConfigError, match="every node must have as many"):
        job(2, *dims)


def test_a_rank_of_another_job_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 9 is in none"):
        seat(sharding_groups(job(1, ("ddp", 3))), 9)


def mesh_of(names: Any, shape: tuple[int, ...], ranks: Any = None) -> Any:
    return SimpleNamespace(mesh_dim_names=names, shape=shape, mesh=ranks)


def test_ambiguous_names_must_be_told() -> None:
    with pytest.raises(ConfigError, match=r"\['dp', 'cp'\] may replicate or divide"):
        of_mesh(mesh_of(("dp", "cp"), (2, 2)), 1)
    known = {**KINDS, "dp": Kind.REPLICATE, "cp": Kind.SHARD}
    described = of_mesh(mesh_of(("dp", "cp"), (2, 2)), 1, known)
    assert [dim.kind for dim in described.dims] == [Kind.REPLICATE, Kind.SHARD]
    assert described.holders() == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (mesh_of(None, (4,)), "without names"),
        (mesh_of(("ddp",), (2, 2)), "without names"),
        (mesh_of(("ddp",), (2,), torch.tensor([2, 3])), "mesh of the whole job"),
    ],
)
def test_a_mesh_that_does_not_describe_the_job_is_refused(mesh: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_mesh(mesh, 1)


def spread(shape: dict[str, int], dims: str, divided: str, first: int = 0) -> Spread:
    world = 1
    for size in shape.values():
        world *= size
    ranks = tuple(range(first, first + world))
    used = frozenset(dims.split()), frozenset(divided.split())
    return Spread(tuple(shape), tuple(shape.values()), ranks, *used)


HSDP = {"dp_replicate": 3, "dp_shard": 2}
WITH_TP = {"dp_shard": 3, "tp": 2}
STAGES = {"pp": 2, "ddp": 3}


@pytest.mark.parametrize(
    ("spreads", "holders"),
    [
        ([], [(0, 1, 2, 3, 4, 5)]),
        ([spread({"0": 6}, "0", "0")], [(0,), (1,), (2,), (3,), (4,), (5,)]),
        ([spread(HSDP, "dp_replicate dp_shard", "dp_shard")], [(0, 2, 4), (1, 3, 5)]),
        (
            [spread(WITH_TP, "tp", "tp"), spread(WITH_TP, "dp_shard", "dp_shard")],
            [(0,), (1,), (2,), (3,), (4,), (5,)],
        ),
        ([spread({"ddp": 3, "tp": 2}, "tp", "tp")], [(0, 2, 4), (1, 3, 5)]),
        ([spread(STAGES, "ddp", "")], [(0, 1, 2), (3, 4, 5)]),
        ([spread({"0": 6}, "0", "")], [(0, 1, 2, 3, 4, 5)]),
    ],
)
def test_parameters_tell_which_ranks_hold_the_same_state(
    spreads: list[Spread], holders: list[tuple[int, ...]]
) -> None:
    assert of_spreads(spreads, 6, 2).holders() == holders


@pytest.mark.parametrize(
    ("spreads", "message"),
    [
        ([spread({"0": 4}, "0", "0")], "mesh of 4 of the 6 ranks"),
        (
            [spread({"0": 6}, "0", "0"), spread({"a": 3, "b": 2}, "a b", "a")],
            r"not parts of one: \{'0': 6\}, \{'a': 3, 'b': 2\}; give mesh=",
        ),
        ([spread({"dp": 3, "tp": 2}, "tp", "tp")], r"\['dp'\] are flattened ones, or hold no"),
        ([spread({"a": 3, "b": 2}, "a_b", "a_b")], r"\['a', 'a_b', 'b'\] are flattened"),
        ([spread({"0": 6}, "0", "0", first=6)], "give the mesh of the whole job"),
    ],
)
def test_parameters_that_do_not_tell_ask_for_a_mesh(spreads: list[Spread], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_spreads(spreads, 6, 2)


def model_on(*parameters: tuple[Any, str]) -> Any:
    """A model of plain parameters, and of some on a mesh (S: divided, R: replicated)."""
    placements = {"S": Shard(0), "R": Replicate()}
    placed = [
        SimpleNamespace(device_mesh=mesh, placements=tuple(placements[c] for c in kinds))
        for mesh, kinds in parameters
    ]
    return SimpleNamespace(parameters=lambda: [torch.ones(1), *placed])


class Part:
    """One dimension of a mesh, without a process group that slicing it would need."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh_dim_names, self.shape, self._mesh = ("dp_shard",), (2,), mesh

    def _get_root_mesh(self) -> DeviceMesh:
        return self._mesh


@pytest.fixture
def mesh() -> DeviceMesh:
    """Four replicas of two shards."""
    names = ("dp_replicate", "dp_shard")
    ranks = torch.arange(8).view(2, 4).t().contiguous()
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


REPLICAS = [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_a_torch_mesh_is_read_as_it_is(mesh: DeviceMesh) -> None:
    described = of_mesh(mesh, 4)
    replicate, shard = described.dims
    assert replicate == Dim("dp_replicate", 4, Kind.REPLICATE)
    assert shard == Dim("dp_shard", 2, Kind.SHARD)
    assert described.holders() == REPLICAS


def test_the_job_of_a_model_is_read_off_its_parameters(mesh: DeviceMesh) -> None:
    assert of_model(model_on(), 8, 4).holders() == [tuple(range(8))]
    for kinds in ("RS", "RR"):
        job_of_model = of_model(model_on((mesh, "RR"), (mesh, kinds)), 8, 4)
        assert job_of_model.holders() == (REPLICAS if kinds == "RS" else [tuple(range(8))])
        assert job_of_model.ranks_per_node == 4
    assert of_model(model_on((Part(mesh), "S")), 8, 4).holders() == REPLICAS


def test_a_mesh_that_is_given_is_believed() -> None:
    given_mesh = mesh_of(("pp", "fsdp"), (2, 2))
    assert of_model(model_on(), 4, 1, given_mesh) == of_mesh(given_mesh, 1)

"""Parity groups: small, of different failure domains, the same over restarts, and as planned."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_groups import job, jobs

from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.planner import Fleet
from holdfast.planner.intervals import memory_loss_rate
from holdfast.planner.parity_groups import described, group_sizes
from holdfast.snapshot.layout.groups import Job, Mode, seat, sharding_groups
from holdfast.snapshot.layout.node_groups import (
    FAN_OUT,
    node_groups,
    tree_neighbours,
    weak_domains,
)
from holdfast.snapshot.node.membership import Membership, held_groups
from holdfast.snapshot.node.session import Listening
from holdfast.snapshot.protocol.roster import Roster
from holdfast.snapshot.transport.frames import encode

PARITIES = st.integers(1, 2)
MOST = st.integers(3, 16)


def formed(sizes: tuple[tuple[int, int], ...]) -> list[int]:
    """Return the size of each group, the largest first."""
    return [size for size, count in sizes for _ in range(count)]


@given(st.integers(2, 300), PARITIES, MOST, st.sampled_from(["ddp", "fsdp"]), st.integers(1, 3))
def test_the_runtime_forms_the_groups_that_are_planned(
    nodes: int, parities: int, most: int, dim: str, local: int
) -> None:
    if nodes <= parities:
        return
    cut = node_groups(job(local, (dim, nodes * local)), parities, most)
    assert sorted(node for group in cut for node in group) == list(range(nodes))
    sizes = [len(group) for group in cut]
    assert sorted(sizes, reverse=True) == formed(group_sizes(nodes, most, parities))
    assert parities < min(sizes) <= max(sizes) <= max(most, 2 * parities + 1)
    assert max(sizes) - min(sizes) <= 1
    if nodes > most >= 8:
        assert min(sizes) >= 4


def test_nine_nodes_are_five_and_four() -> None:
    assert [len(group) for group in node_groups(job(1, ("ddp", 9)), 1, 8)] == [5, 4]
    assert described(9, 8) == "1 group of 5, 1 group of 4"
    assert described(1024, 8) == "128 groups of 8"


def test_the_plan_counts_the_losses_of_the_groups_that_are_formed() -> None:
    fleet = Fleet(9, 8, 1e6)
    by_group = sum(memory_loss_rate(1e-6, size, 1, 600.0) for size in (5, 4))
    assert fleet.memory_losses_per_s(1, 600.0) == pytest.approx(by_group, rel=1e-12)
    curves = fleet.survival(1.0)
    cut = node_groups(job(1, ("ddp", 9)), 1, 8)
    lost = 1.0
    for group in cut:
        n, alive = len(group), 2.718281828459045 ** (-curves.hardware * 3.0)
        lost *= alive**n + n * (1 - alive) * alive ** (n - 1)
    assert curves.with_snapshots(3.0) == pytest.approx(lost, rel=1e-9)


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=60), MOST, st.booleans())
def test_a_group_has_no_more_nodes_of_a_domain_than_its_even_part(
    domains: list[str], most: int, replicas: bool
) -> None:
    run = job(1, ("ddp" if replicas else "fsdp", len(domains)))
    cut = node_groups(run, 1, most, domains)
    for group in cut:
        counts = Counter(domains[node] for node in group)
        for domain, count in counts.items():
            assert count <= -(-domains.count(domain) // len(cut))
        weak = tuple(sorted(domain for domain, count in counts.items() if count > 1))
        assert weak_domains(group, domains, 1) == weak
    assert weak_domains(cut[0], [""] * len(domains), 1) == ()


@given(jobs(), PARITIES, MOST)
def test_whatever_the_job_every_rank_is_protected_within_its_group_or_all_are_one(
    any_job: Job, parities: int, most: int
) -> None:
    try:
        sharding_groups(any_job, parities)
    except ConfigError:
        with pytest.raises(ConfigError):
            node_groups(any_job, parities, most)
        return
    cut = node_groups(any_job, parities, most)
    found = sharding_groups(any_job, parities, cut)
    for rank in range(any_job.nodes * any_job.ranks_per_node):
        place = seat(found, rank)
        (own,) = [group for group in cut if any_job.node(rank) in group]
        assert set(place.group.nodes) <= set(own)
        assert len(place.group.nodes) > parities


def test_replicas_that_fit_into_a_group_stay_together() -> None:
    hsdp = job(1, ("dp_replicate", 2), ("dp_shard", 20))
    cut = node_groups(hsdp, 1, 8)
    assert sorted(map(len, cut)) == [8] * 5
    assert {group.mode for group in sharding_groups(hsdp, 1, cut)} == {Mode.REPLICATED}


def test_groups_stay_as_long_as_an_smp_holds_steps_of_them() -> None:
    run, domains = job(1, ("ddp", 12)), [*"aaaabbbbcccc"]
    before = node_groups(run, 1, 4, domains)
    moved = ["c", *domains[1:]]
    assert node_groups(run, 1, 4, moved) != before
    places = [Listening("", 0, 3, group=group, run_nodes=12) for group in before for _ in group]
    lost = [place if place.group != before[1] else Listening("", 0, 0) for place in places]
    kept = held_groups(lost, 12)
    assert kept == sorted({before[0], before[2]})
    assert node_groups(run, 1, 4, moved, kept) == before
    # Of another number of nodes, or of groups that contradict each other, nothing is kept.
    assert held_groups(lost, 11) == []
    odd = Listening("", 0, 3, group=(0, 1, 2, 3), run_nodes=12)
    assert held_groups([*lost, odd], 12) == []
    # What an SMP remembers of an earlier agreement does not count.
    assert held_groups([*lost, odd._replace(epoch=2)], 12) == kept


@pytest.mark.parametrize(
    ("given", "slurm", "domain"),
    [("", "", ""), ("rack-7", "top.leaf3.n12", "rack-7"), ("", "top.leaf3.n12", "top.leaf3")],
)
def test_a_failure_domain_is_named_by_the_user_or_by_slurm(
    given: str, slurm: str, domain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_DOMAIN", given)
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", slurm)
    assert config.failure_domain() == domain


def member(run: Job, parities: int, cut: list[tuple[int, ...]], node: int = 0) -> Membership:
    """The membership of the first rank of a node, without a process group."""
    made = Membership.__new__(Membership)
    made.job, made.parities, made.rank = run, parities, node * run.ranks_per_node
    made._domains, made._domains_said = [], False
    made.take_cut(cut)
    return made


def test_a_group_that_does_not_survive_the_loss_of_a_rack_says_so_once() -> None:
    run = job(1, ("ddp", 3))
    places = [Listening("10.0.0.1", 1, 0)] * 3
    membership = member(run, 1, node_groups(run, 1, 8))
    membership._domains = ["a", "b", ""]
    membership._say_weak_domains(membership.make_roster(places, "00"))
    assert [event.kind for event in events.recent()] == []
    membership._domains = ["a", "b", "a"]
    roster = membership.make_roster(places, "00")
    with pytest.warns(RuntimeWarning, match=r"more than 1 of them in \['a'\]"):
        membership._say_weak_domains(roster)
    membership._say_weak_domains(roster)
    (said,) = events.recent()
    assert said.kind == "domain_shared"
    assert said.detail == {"group": [0, 1, 2], "domains": ["a"]}


@pytest.mark.parametrize("dim", ["ddp", "fsdp"])
def test_a_roster_names_the_group_and_its_neighbours_however_many_nodes_there_are(dim: str) -> None:
    nodes, local = 4096, 8
    run = job(local, (dim, nodes * local))
    cut = node_groups(run, 2, 8)
    places = [Listening("fd00::1234:5678:9abc:def0", 65535, 3)] * nodes
    for node in (0, 9, nodes - 1):
        roster = member(run, 2, cut, node).make_roster(places, "00" * 32)
        assert len(roster.group) == 8
        assert set(roster.peers) == {*roster.members, *roster.parents, *roster.children}
        assert len(roster.peers) <= 7 + 8 + 1
        assert {roster.node_of(rank) for rank in roster.mirrored_ranks} <= set(roster.members)
        assert len(encode(roster.encode())) < 8192  # a header may have 65,536 bytes
        assert Roster.parse(roster.encode()) == roster


@given(st.lists(st.integers(2, 5), min_size=1, max_size=40))
def test_in_the_commit_trees_every_node_reaches_the_root_group(sizes: list[int]) -> None:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    cut = [tuple(range(*pair)) for pair in pairwise([0, *ends])]
    group_of = {node: number for number, group in enumerate(cut) for node in group}
    for node, number in group_of.items():
        parents, children = tree_neighbours(cut, node)
        assert bool(parents) == (number > 0)
        assert all(node in tree_neighbours(cut, parent)[1] for parent in parents)
        below = {group_of[child] for child in children}
        first = number * FAN_OUT + 1
        assert below == set(range(first, min(first + FAN_OUT, len(cut))))

"""Several nodes whose SMPs, memories, replicas and restores go wrong: never other bits."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import snapshot_fault_ranks as ranks
from cluster_runs import STEPS, Calm, Make, check, fails, start
from snapshot_fault_ranks import FAULT_STEP
from snapshot_memory import flip_a_bit, slot_file

from bench import nodes_rank
from bench.nodes import Cluster
from bench.nodes_rank import Work
from holdfast import config
from holdfast.snapshot.node import launch
from holdfast.snapshot.transport.links import SILENCE_S

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NODES = 3
BLOCKS = 3  # of a node's buffer: two of data, then the parity


def status(cluster: Cluster, node: int) -> dict[str, Any]:
    found = launch.smp_status(cluster.run_dir(node))
    assert found is not None
    return found


def leave(cluster: Cluster, keep: int = 1) -> None:
    """Train to ``FAULT_STEP``, and leave nothing but the SMPs, which hold that step."""
    cluster.start(partial(ranks.held, keep))
    clean = [list(range(FAULT_STEP + 1))[-keep:]]
    run_dirs = [cluster.run_dir(node) for node in range(cluster.nodes)]

    def holds(run_dir: Path) -> bool:
        return (launch.smp_status(run_dir) or {}).get("clean") == clean

    cluster.until(lambda: all(map(holds, run_dirs)), "no commit")
    cluster.kill_trainers()


def told(cluster: Cluster, rank: int) -> dict[str, list[Any]]:
    """What events said in training, by kind."""
    path, found = cluster.directory / f"events-{rank}.jsonl", dict[str, list[Any]]()
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    for event in map(json.loads, lines):
        found.setdefault(event["kind"], []).append(event["detail"])
    return found


def known(cluster: Cluster, rank: int) -> int:
    """The newest step that a rank has last heard of as committed."""
    found = [line["committed"] for line in cluster.said(rank) if "committed" in line]
    return -1 if not found or found[-1] is None else int(found[-1])


def all_commit_again(cluster: Cluster) -> None:
    step = cluster.committed() + 3
    everyone = range(cluster.world)
    cluster.until(lambda: all(known(cluster, rank) >= step for rank in everyone), "no commit")


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        pytest.param("killed", "replica", marks=pytest.mark.representative),
        ("stopped", "fsdp"),
    ],
)
def test_an_smp_fails_while_trainers_live_and_another_node_is_lost_later(
    make: Make, calm: Calm, fault: str, layout: str
) -> None:
    cluster = make(NODES, pace_s=0.2)
    start(cluster, layout)
    cluster.until_committed(1)
    smp = cluster.smp(1)
    if fault == "killed":
        smp.kill()
    else:
        smp.suspend()
        time.sleep(SILENCE_S + 1.0)
        smp.resume()
    all_commit_again(cluster)
    assert (cluster.smp(1).pid != smp.pid) == (fault == "killed")
    cluster.lose([2])
    committed = cluster.committed()
    cluster.work = replace(cluster.work, pace_s=0.0)
    start(cluster, layout)
    step, events = check(cluster, calm(NODES, layout))
    assert step >= committed
    assert "snapshot_rebuilt" in events


def damage(cluster: Cluster, places: list[tuple[int, int]], step: int = FAULT_STEP) -> None:
    """Flip a bit in blocks of the nodes' buffers."""
    for node, block in places:
        file = slot_file(status(cluster, node), step)
        flip_a_bit(file, block * (file.stat().st_size // BLOCKS) + 5)


# Block 0 of node 0 and block 1 of node 2 are of stripe 1, whose parity is the last of node 1; block
# 0 of node 1 is of stripe 2, whose parity is the last of node 2.
@pytest.mark.parametrize(
    ("places", "keep", "step", "rebuilt"),
    [
        ([], 1, FAULT_STEP, []),
        pytest.param([(0, 0), (1, 0)], 1, FAULT_STEP, [0, 1], marks=pytest.mark.representative),
        ([(1, 2), (1, 0)], 1, FAULT_STEP, [1]),
        ([(0, 0), (1, 2)], 2, FAULT_STEP - 1, []),
        ([(0, 0), (1, 2)], 1, None, []),
    ],
)
def test_bits_flipped_in_the_memory_of_smps_are_found_and_rebuilt_or_an_older_step_is_taken(
    make: Make,
    calm: Calm,
    places: list[tuple[int, int]],
    keep: int,
    step: int | None,
    rebuilt: list[int],
) -> None:
    cluster = make(NODES)
    leave(cluster, keep)
    damage(cluster, places)
    cluster.start(partial(ranks.keeping, keep))
    if step is None:
        fails(cluster)
        assert all("SnapshotLost: step 3" in cluster.log(rank) for rank in range(NODES))
        return
    found, events = check(cluster, calm(NODES))
    assert found == step
    told_of = {node for detail in events.get("snapshot_rebuilt", []) for node in detail["nodes"]}
    assert sorted(told_of) == rebuilt
    corrupt = {detail["step"] for detail in events.get("snapshot_corrupt", [])}
    assert corrupt == ({FAULT_STEP} if step < FAULT_STEP else set())


def test_without_digests_flipped_bits_reach_the_state(make: Make, calm: Calm) -> None:
    cluster = make(NODES)
    leave(cluster)
    damage(cluster, [(0, 0)])
    cluster.start(ranks.trusting)
    cluster.until(lambda: all(map(cluster.said, range(NODES))), "no restore")
    for rank in range(NODES):
        restored = cluster.said(rank)[0]
        assert restored["restored"] == FAULT_STEP
        assert restored["digest"] != calm(NODES).digests(rank)[FAULT_STEP]


@pytest.mark.representative
def test_a_replica_that_diverged_is_named_and_the_step_given_up(make: Make, calm: Calm) -> None:
    cluster = make(NODES, pace_s=0.2)
    cluster.start(ranks.diverging)
    everyone = range(NODES)
    cluster.until(lambda: all("replica_diverged" in told(cluster, r) for r in everyone), "no event")
    cluster.kill_trainers()
    found = [detail for rank in everyone for detail in told(cluster, rank)["replica_diverged"]]
    assert all(detail["ranks"] == [[0, 1]] for detail in found)
    assert min(detail["step"] for detail in found) == FAULT_STEP
    assert cluster.committed() < FAULT_STEP
    cluster.work = replace(cluster.work, pace_s=0.0)
    cluster.start()
    assert check(cluster, calm(NODES))[0] == FAULT_STEP - 1


@pytest.mark.parametrize("victim", ["smp", "ranks"])
def test_killed_while_restoring_the_next_start_restores(
    make: Make, calm: Calm, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    cluster = make(NODES)
    leave(cluster)
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "10")
    cluster.start(ranks.pausing)
    cluster.until(lambda: len([*cluster.directory.glob("restoring-*")]) == NODES, "no restore")
    if victim == "smp":
        cluster.smp(1).kill()
        (cluster.directory / "go").touch()
        fails(cluster)
        assert "SmpUnavailable: the SMP was lost while restoring" in cluster.log(1)
    cluster.kill_trainers()
    cluster.start()
    step, events = check(cluster, calm(NODES))
    assert step == FAULT_STEP
    assert ("snapshot_rebuilt" in events) == (victim == "smp")


def test_what_does_not_fit_is_refused_and_other_parities_fit(make: Make, calm: Calm) -> None:
    cluster = make(NODES)
    leave(cluster)
    work = cluster.work
    refusals: list[tuple[Work, int, Callable[..., None], str]] = [
        (replace(work, width=17), NODES, nodes_rank.run, "SnapshotMismatch: "),
        (work, NODES, partial(ranks.keeping, 2), "ConfigError: the SMP was started with keep=1"),
    ]
    for cluster.work, cluster.nodes, target, message in refusals:
        cluster.start(target)
        fails(cluster)
        assert all(message in cluster.log(rank) for rank in range(cluster.nodes)), cluster.logs()
    cluster.work, cluster.nodes = replace(work, parities=2), NODES
    cluster.start()
    assert check(cluster, calm(NODES))[0] == FAULT_STEP
    assert all(cluster.said(r)[-1]["status"]["cluster"]["parities"] == 2 for r in range(NODES))


def test_two_runs_side_by_side_do_not_disturb_each_other(make: Make, calm: Calm) -> None:
    struck, other = make(2, pace_s=0.1), make(2, pace_s=0.1)
    for cluster in (struck, other):
        cluster.start()
    for cluster in (struck, other):
        cluster.until_committed(2)
    struck.lose([1])
    committed = struck.committed()
    struck.start()
    step, events = check(struck, calm(2))
    assert step >= committed
    assert "snapshot_rebuilt" in events
    for rank, end in enumerate(other.finish()):
        assert end["digest"] == calm(2).digests(rank)[STEPS]
        assert end["kinds"] == []
        assert end["status"]["cluster"]["offline"] == []


def test_ranks_that_were_given_different_parities_are_told(make: Make) -> None:
    cluster = make(NODES)
    cluster.start(ranks.disagreeing)
    fails(cluster)
    assert all("ConfigError: rank" in cluster.log(rank) for rank in range(NODES))


def test_a_node_that_cannot_be_reached_for_a_moment_costs_no_snapshot(
    make: Make, calm: Calm
) -> None:
    cluster = make(NODES)
    leave(cluster)
    cluster.start(partial(ranks.refused, 10**6))
    fails(cluster)
    assert "is held, and could not be read" in cluster.logs()
    assert [status(cluster, node)["clean"] for node in range(NODES)] == [[[FAULT_STEP]]] * NODES
    cluster.start(partial(ranks.refused, 4))
    step, events = check(cluster, calm(NODES))
    assert step == FAULT_STEP
    assert "snapshot_corrupt" not in events


def test_a_wrong_address_of_a_node_is_said_and_the_finished_run_ends_well(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, "5")
    cluster = make(2, steps=12, pace_s=0.1)
    cluster.start(ranks.misdirected)
    for rank, end in enumerate(cluster.finish()):
        assert (end["done"], known(cluster, rank)) == (12, -1)
        assert end["kinds"].count("snapshots_suspended") == 1
    assert "none was committed" in cluster.logs()
    assert "HOLDFAST_ADDRESS" in cluster.logs()


def test_a_lost_smp_is_replaced_although_its_rank_does_not_need_it_now(make: Make) -> None:
    cluster = make(2, steps=STEPS, pace_s=600.0)  # as if ranks waited in a collective
    cluster.start()
    cluster.until(lambda: cluster.committed() >= 0 or all(map(cluster.said, range(2))), "no start")
    cluster.until(lambda: all(status(cluster, node)["commits"] for node in range(2)), "no commit")
    lost = cluster.smp(1)
    lost.kill()

    def replaced() -> bool:
        found = launch.smp_status(cluster.run_dir(1))
        return found is not None and found["pid"] != lost.pid and found["cluster"] is not None

    cluster.until(replaced, "the SMP is not replaced")
    cluster.until(lambda: not status(cluster, 0)["cluster"]["offline"], "no link")
    cluster.kill_trainers()

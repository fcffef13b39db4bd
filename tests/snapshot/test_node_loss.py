"""Nodes lost whole, with their SMP: the others rebuild what they held, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_runs import Calm, Make, check, fails, start

from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 6
PACE_S = 0.1


# Replicas divide the work on one state; FSDP2 and HSDP have a state of each rank's own.
@pytest.mark.parametrize(
    ("layout", "nodes", "local", "parities", "lost"),
    [
        pytest.param("replica", 3, 1, 1, (1,), marks=pytest.mark.representative),
        # FSDP2 and HSDP have two parities and two ranks a node as well.
        pytest.param("replica", 3, 1, 2, (0, 2), marks=pytest.mark.campaign),
        pytest.param("replica", 2, 2, 1, (1,), marks=pytest.mark.campaign),
        pytest.param("fsdp", 3, 1, 1, (1,), marks=pytest.mark.representative),
        ("fsdp", 3, 1, 2, (0, 2)),
        ("hsdp", 2, 2, 1, (1,)),
        ("folded", 2, 2, 1, (0,)),
    ],
)
def test_a_lost_node_is_rebuilt_and_training_ends_with_the_same_bits(
    make: Make,
    calm: Calm,
    layout: str,
    nodes: int,
    local: int,
    parities: int,
    lost: tuple[int, ...],
) -> None:
    reference = calm(nodes * local, layout)
    cluster = make(nodes, local, steps=STEPS, pace_s=PACE_S, parities=parities)
    start(cluster, layout)
    cluster.until_committed(2)
    cluster.lose(lost)
    committed = cluster.committed()
    start(cluster, layout)
    step, events = check(cluster, reference)
    assert step >= committed
    assert "snapshot_rebuilt" in events


@pytest.mark.parametrize(
    ("layout", "lost", "order"),
    [
        pytest.param("replica", (1,), range(6), marks=pytest.mark.representative),
        # One of each group; then the launcher numbers the nodes anew, across groups.
        ("fsdp", (0, 3), (5, 4, 3, 2, 1, 0)),
    ],
)
def test_groups_of_three_nodes_rebuild_what_each_of_them_has_lost(
    make: Make,
    calm: Calm,
    layout: str,
    lost: tuple[int, ...],
    order: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = calm(6, layout)
    cluster = make(6, steps=STEPS, pace_s=PACE_S, group_nodes=3)
    start(cluster, layout)
    cluster.until_committed(2)
    for node in range(6):
        status = launch.smp_status(cluster.run_dir(node))
        assert status is not None
        assert status["cluster"]["group"] == [[0, 2, 4], [1, 3, 5]][node % 2]
        assert len(status["peers"]) <= 3
    cluster.lose(lost)
    committed, place = cluster.committed(), cluster.run_dir
    monkeypatch.setattr(cluster, "run_dir", lambda node: place(order[node]))
    start(cluster, layout)
    step, events = check(cluster, reference)
    assert step >= committed
    assert {node for each in events["snapshot_rebuilt"] for node in each["nodes"]} == set(lost)


def test_more_nodes_lost_than_parities_are_not_papered_over(make: Make) -> None:
    cluster = make(3, steps=STEPS, pace_s=PACE_S)
    cluster.start()
    cluster.until_committed(3)
    cluster.lose((0, 1))
    cluster.start()
    fails(cluster)
    assert "SnapshotLost: step" in cluster.log(2)
    assert "was held by too few of 3 nodes" in cluster.log(2)


def test_without_parities_a_lost_node_is_lost(make: Make) -> None:
    cluster = make(2, steps=STEPS, pace_s=PACE_S, parities=0)
    cluster.start()
    cluster.until_committed(3)
    cluster.lose((1,))
    cluster.start()
    cluster.until(lambda: all(cluster.said(rank) for rank in range(2)), "no restore")
    cluster.kill_trainers()
    assert [cluster.said(rank)[0]["restored"] is None for rank in range(2)] == [False, True]


def test_beyond_the_parities_the_newest_checkpoint_is_loaded_again_and_again(
    make: Make, calm: Calm, tmp_path: Path
) -> None:
    # Slow at first, as the persisters must have started before it ends.
    cluster = make(3, steps=STEPS, pace_s=5.0, persist_dir=tmp_path / "disk", persist_every=1)
    folders = [Checkpoints(tmp_path / "disk" / f"node-{node}") for node in range(3)]

    def common() -> int:
        return max(set.intersection(*(set(folder.steps()) for folder in folders)), default=0)

    cluster.start()
    cluster.until_committed(2)
    cluster.until(lambda: common() > 0, "nothing is persisted")
    cluster.lose((0, 1))
    persisted = common()
    cluster.start()
    cluster.until(lambda: common() > persisted, "nothing is persisted any more")
    cluster.lose((1, 2))
    persisted = common()
    cluster.work = replace(cluster.work, pace_s=0.0)
    cluster.start()
    step, events = check(cluster, calm(3))
    assert step >= persisted > 1
    assert events["restored"][0]["source"] == "disk"

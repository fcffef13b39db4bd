"""Nodes lost whole, with their SMP: the others rebuild what they held, bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.nodes import Cluster
from bench.nodes_rank import Work
from holdfast.snapshot.persist import Checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 6
PACE_S = 0.1
Make = Callable[..., Cluster]
Calm = Callable[[int], Cluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a cluster, and ends what is left of it."""
    made: list[Cluster] = []

    def cluster(nodes: int, local: int = 1, **work: Any) -> Cluster:
        given = {"steps": STEPS, "pace_s": PACE_S} | work
        made.append(Cluster(Work(tmp_path / f"run-{len(made)}", **given), nodes, local))
        return made[-1]

    yield cluster
    for left in made:
        left.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """An undisturbed run of so many ranks, which on however many nodes end alike."""
    known: dict[int, Cluster] = {}

    def cluster(world: int) -> Cluster:
        if world not in known:
            work = Work(tmp_path_factory.mktemp("calm"), STEPS, parities=0)
            known[world] = Cluster(work, 1, world)
            known[world].start()
            known[world].finish()
        return known[world]

    return cluster


def check_restored(cluster: Cluster, reference: Cluster, committed: int) -> int:
    """Every rank found the same step, not older than the last commit, and its bits; the step."""
    found = [cluster.said(rank)[0] for rank in range(cluster.world)]
    steps = {said["restored"] for said in found}
    assert len(steps) == 1, found
    step = steps.pop()
    assert step is not None
    assert step >= committed
    for rank, said in enumerate(found):
        assert said["before"] != said["digest"]
        assert said["digest"] == reference.digests(rank)[step]
    return int(step)


def check_end(cluster: Cluster, reference: Cluster) -> None:
    """Every rank ended with the bits of the undisturbed run."""
    for rank, end in enumerate(cluster.finish()):
        assert end["done"] == STEPS
        assert end["digest"] == reference.digests(rank)[STEPS]


def kinds(cluster: Cluster) -> set[str]:
    """The events of all ranks while they restored."""
    events = [cluster.said(rank)[0]["events"] for rank in range(cluster.world)]
    return {kind for rank in events for kind, _ in rank}


@pytest.mark.parametrize(
    ("nodes", "local", "parities", "lost"),
    [(2, 1, 1, (0,)), (3, 1, 1, (1,)), (3, 1, 2, (0, 2)), (2, 2, 1, (1,)), (4, 1, 2, (1, 2))],
)
def test_a_lost_node_is_rebuilt_and_training_ends_with_the_same_bits(
    make: Make, calm: Calm, nodes: int, local: int, parities: int, lost: tuple[int, ...]
) -> None:
    reference = calm(nodes * local)
    cluster = make(nodes, local, parities=parities)
    cluster.start()
    cluster.until_committed(3)
    cluster.lose(lost)
    committed = cluster.committed()
    cluster.start()
    check_end(cluster, reference)
    check_restored(cluster, reference, committed)
    assert "snapshot_rebuilt" in kinds(cluster)


def test_all_trainers_lost_everything_is_read_and_nothing_rebuilt(make: Make, calm: Calm) -> None:
    cluster = make(3)
    cluster.start()
    cluster.until_committed(3)
    cluster.kill_trainers()
    committed = cluster.committed()
    cluster.start()
    check_end(cluster, calm(3))
    check_restored(cluster, calm(3), committed)
    assert kinds(cluster) == {"restored"}


def test_more_nodes_lost_than_parities_are_not_papered_over(make: Make) -> None:
    cluster = make(3)
    cluster.start()
    cluster.until_committed(3)
    cluster.lose((0, 1))
    cluster.start()
    for rank in cluster.ranks:
        rank.join(60)
    assert [rank.exitcode for rank in cluster.ranks] == [1, 1, 1]
    assert "SnapshotLost: step" in cluster.log(2)
    assert "was held by too few of 3 nodes" in cluster.log(2)


def test_without_parities_a_lost_node_is_lost(make: Make) -> None:
    cluster = make(2, parities=0)
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
    # Slow, as the persisters must have started before it ends.
    cluster = make(3, persist_dir=tmp_path / "disk", persist_every=1, pace_s=3.0)
    folders = [Checkpoints(tmp_path / "disk" / f"node-{node}") for node in range(3)]

    def common() -> int:
        return max(set.intersection(*(set(folder.steps()) for folder in folders)), default=0)

    cluster.start()
    cluster.until_committed(2)
    cluster.until(lambda: common() > 0, "nothing is persisted")
    for lost in ((0, 1), (1, 2)):
        cluster.lose(lost)
        persisted = common()
        cluster.start()
        if lost == (0, 1):
            cluster.until(lambda known=persisted: common() > known, "nothing is persisted any more")
    check_end(cluster, calm(3))
    assert check_restored(cluster, calm(3), persisted) > 1
    restored = [event for event in cluster.said(0)[0]["events"] if event[0] == "restored"]
    assert restored[0][1]["source"] == "disk"

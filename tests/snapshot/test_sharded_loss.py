"""Nodes lost that held states of their own (FSDP2, HSDP): rebuilt from parities, bit for bit."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import snapshot_sharded_rank

from bench.nodes import Cluster
from bench.nodes_rank import Work
from holdfast.snapshot.links import SILENCE_S

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

STEPS = 6
Make = Callable[..., Cluster]
Calm = Callable[[str, int], Cluster]


def start(cluster: Cluster, layout: str = "fsdp") -> None:
    """Start every rank on a model divided so."""
    cluster.start(partial(snapshot_sharded_rank.run, layout))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes a cluster, and ends what is left of it."""
    made: list[Cluster] = []

    def cluster(nodes: int, local: int = 1, **work: Any) -> Cluster:
        given = {"steps": STEPS, "pace_s": 0.1} | work
        made.append(Cluster(Work(tmp_path / f"run-{len(made)}", **given), nodes, local))
        return made[-1]

    yield cluster
    for left in made:
        left.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """An undisturbed run of so many ranks, all on one node."""
    known: dict[tuple[str, int], Cluster] = {}

    def cluster(layout: str, world: int) -> Cluster:
        if (layout, world) not in known:
            work = Work(tmp_path_factory.mktemp("calm"), STEPS, parities=0)
            known[layout, world] = Cluster(work, 1, world)
            start(known[layout, world], layout)
            known[layout, world].finish()
        return known[layout, world]

    return cluster


def check(cluster: Cluster, reference: Cluster, committed: int) -> dict[str, list[Any]]:
    """All ranks found one step, as new as the last commit, and its bits, and ended alike.

    Returns:
        What their events said while they restored, by kind.
    """
    ends = cluster.finish()
    found = [cluster.said(rank)[0] for rank in range(cluster.world)]
    (step,) = {said["restored"] for said in found}
    assert step is not None
    assert step >= committed
    events: dict[str, list[Any]] = {}
    for rank, (said, end) in enumerate(zip(found, ends, strict=True)):
        assert said["before"] != said["digest"]
        assert said["digest"] == reference.digests(rank)[step]
        assert end["digest"] == reference.digests(rank)[STEPS]
        for kind, detail in said["events"]:
            events.setdefault(kind, []).append(detail)
    return events


@pytest.mark.parametrize(
    ("layout", "nodes", "local", "parities", "lost"),
    [
        ("fsdp", 3, 1, 1, (1,)),
        ("fsdp", 2, 2, 1, (0,)),
        ("fsdp", 3, 1, 2, (0, 2)),
        ("hsdp", 2, 2, 1, (1,)),
        ("folded", 2, 2, 1, (0,)),
    ],
)
def test_a_lost_node_is_rebuilt_and_training_ends_with_the_same_bits(
    make: Make, calm: Calm, layout: str, nodes: int, local: int, parities: int, lost: Any
) -> None:
    reference = calm(layout, nodes * local)
    cluster = make(nodes, local, parities=parities)
    start(cluster, layout)
    cluster.until_committed(2)
    cluster.lose(lost)
    committed = cluster.committed()
    start(cluster, layout)
    events = check(cluster, reference, committed)
    assert "snapshot_rebuilt" in events


def test_an_smp_that_stood_still_catches_up(make: Make, calm: Calm) -> None:
    cluster = make(3, pace_s=0.5)
    start(cluster)
    cluster.until_committed(1)
    stopped = cluster.smp(1)
    stopped.suspend()
    time.sleep(SILENCE_S + 1.0)
    stopped.resume()
    cluster.until_committed(cluster.committed() + 1)
    cluster.lose((2,))
    committed = cluster.committed()
    start(cluster)
    assert "snapshot_rebuilt" in check(cluster, calm("fsdp", 3), committed)

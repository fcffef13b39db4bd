"""Runs on several nodes, each compared with an undisturbed run of as many ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from snapshot_fault_ranks import sharded

from bench import nodes_rank
from bench.nodes import Cluster
from bench.nodes_rank import Work

STEPS = 20

Make = Callable[..., Cluster]
Calm = Callable[..., Cluster]


def start(cluster: Cluster, layout: str = "replica") -> None:
    """Start every rank, on replicas or on a model divided so."""
    cluster.start(nodes_rank.run if layout == "replica" else partial(sharded, layout))


def undisturbed(folder: Path, layout: str, world: int) -> Cluster:
    """A finished run of so many ranks, all on one node; on any number of nodes they end alike."""
    cluster = Cluster(Work(folder, STEPS, parities=0), 1, world)
    start(cluster, layout)
    cluster.finish()
    return cluster


def check(cluster: Cluster, reference: Cluster) -> tuple[int, dict[str, list[Any]]]:
    """All ranks found one step, with the right bits, and ended with those of the calm run.

    Returns:
        The step, and what events said while restoring, by kind.
    """
    ends = cluster.finish()
    found = [cluster.said(rank)[0] for rank in range(cluster.world)]
    (step,) = {said["restored"] for said in found}
    events: dict[str, list[Any]] = {}
    for rank, (said, end) in enumerate(zip(found, ends, strict=True)):
        assert said["before"] != said["digest"]
        assert said["digest"] == reference.digests(rank)[step]
        assert end["done"] == cluster.work.steps
        assert end["digest"] == reference.digests(rank)[end["done"]]
        for kind, detail in said["events"]:
            events.setdefault(kind, []).append(detail)
    return step, events


def fails(cluster: Cluster) -> None:
    """Wait until every rank has failed."""
    for rank in cluster.ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in cluster.ranks]
    assert codes == [1] * cluster.world, cluster.logs()
    cluster.ranks.clear()

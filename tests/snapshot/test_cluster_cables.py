"""A node's network goes and comes back while everything on it lives."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import snapshot_lone_rank
from snapshot_waits import PATIENCE_S, until

from holdfast import config
from holdfast.snapshot.node import launch
from holdfast.snapshot.transport.links import SILENCE_S
from holdfast_lab.trainer.hosts import Cluster, hosts, kind_here
from holdfast_lab.trainer.namespaces import Switch

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("forked_python"),
]

ROOT = str(Path(__file__).parents[2])
NODES = 3


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := kind_here()[1]:
        pytest.skip(f"no namespaces: {reason}")
    with hosts(NODES, tmp_path / "hosts", kind=Switch.kind) as made:
        yield made


def start(cluster: Cluster, attempt: int) -> list[Any]:
    """A rank on every host."""
    return [
        host.run(
            [sys.executable, snapshot_lone_rank.__file__, str(cluster.folder), str(attempt)],
            env={
                "RANK": str(rank),
                "WORLD_SIZE": str(NODES),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": cluster[0].address,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": ROOT,
                config.TIMEOUT_VARIABLE: str(PATIENCE_S),
            },
            log=cluster.folder / f"log-{rank}-{attempt}",
        )
        for rank, host in enumerate(cluster)
    ]


def said(cluster: Cluster, rank: int, attempt: int = 0) -> list[dict[str, Any]]:
    path = cluster.folder / f"rank-{rank}-{attempt}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def last(cluster: Cluster, rank: int, what: str) -> int:
    found = [line.get(what) for line in said(cluster, rank)]
    return max((value for value in found if value is not None), default=-1)


def of_all(cluster: Cluster, what: str) -> list[int]:
    return [last(cluster, rank, what) for rank in range(NODES)]


def pids(cluster: Cluster) -> list[int]:
    found = [launch.smp_status(host.run_dir) for host in cluster]
    return [status["pid"] for status in found if status is not None]


def commits_beyond(cluster: Cluster, step: int) -> None:
    until(lambda: min(of_all(cluster, "committed")) > step, f"all commit more than {step}", 40.0)


def test_a_link_that_is_down_costs_snapshots_and_no_more(cluster: Cluster) -> None:
    ranks = start(cluster, 0)
    commits_beyond(cluster, 3)
    cluster[1].link(up=False)
    steps, smps = of_all(cluster, "step"), pids(cluster)
    time.sleep(SILENCE_S + 2.0)
    assert all(new > old + 2 for new, old in zip(of_all(cluster, "step"), steps, strict=True))
    assert max(of_all(cluster, "committed")) <= max(steps)
    cluster[1].link(up=True)
    commits_beyond(cluster, max(of_all(cluster, "step")) + 2)
    assert pids(cluster) == smps
    assert [rank.poll() for rank in ranks] == [None] * NODES
    for rank in ranks:
        (trainer,) = psutil.Process(rank.pid).children()  # what is entered by is no trainer
        trainer.kill()
        rank.wait(PATIENCE_S)
    check_lost_node(cluster)


def check_lost_node(cluster: Cluster) -> None:
    """With one node lost as well, all ranks restore what had been committed."""
    committed = max(of_all(cluster, "committed"))
    cluster[2].replace()
    start(cluster, 1)
    until(lambda: all(said(cluster, rank, 1) for rank in range(NODES)), "all restore", 40.0)
    found = [said(cluster, rank, 1)[0] for rank in range(NODES)]
    (step,) = {line["restored"] for line in found}
    assert step >= committed
    for rank, line in enumerate(found):
        (then,) = [old["digest"] for old in said(cluster, rank) if old.get("step") == step]
        assert line["before"] != line["digest"] == then

"""A node's network goes and comes back while everything on it lives."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import snapshot_lone_rank
from snapshot_waits import PATIENCE_S, until

from bench import nodes
from bench.nodes_rank import Work
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


def start(cluster: Cluster, run: nodes.Cluster) -> list[Any]:
    """Start a rank on every host; ``run`` reads what each of them says."""
    run.attempt += 1
    started = []
    for rank, host in enumerate(cluster):
        log = cluster.folder / f"log-{rank}-{run.attempt}"
        words = [snapshot_lone_rank.__file__, run.directory, run.attempt, log]
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(NODES),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": cluster[0].address,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ROOT,
            config.TIMEOUT_VARIABLE: str(PATIENCE_S),
            config.RUN_ID_VARIABLE: "one run",  # its starts have different arguments
        }
        started.append(host.run([sys.executable, *map(str, words)], env=place, log=log))
    return started


def newest(run: nodes.Cluster, what: str) -> list[int]:
    """Return the newest step that each rank has said to be done, or ``committed``."""
    found = [[line.get(what) for line in run.said(rank)] for rank in range(NODES)]
    return [max((step for step in steps if step is not None), default=-1) for steps in found]


def pids(cluster: Cluster) -> list[int]:
    found = [launch.smp_status(host.run_dir) for host in cluster]
    return [status["pid"] for status in found if status is not None]


def commits_beyond(run: nodes.Cluster, step: int) -> None:
    until(lambda: min(newest(run, "committed")) > step, f"all commit more than {step}", 40.0)


def test_a_link_that_is_down_costs_snapshots_and_no_more(cluster: Cluster) -> None:
    run = nodes.Cluster(Work(cluster.folder, steps=0), NODES)
    ranks = start(cluster, run)
    commits_beyond(run, 3)
    cluster[1].link(up=False)
    steps, smps = newest(run, "step"), pids(cluster)
    time.sleep(SILENCE_S + 2.0)
    assert all(new > old + 2 for new, old in zip(newest(run, "step"), steps, strict=True))
    assert max(newest(run, "committed")) <= max(steps)
    cluster[1].link(up=True)
    commits_beyond(run, max(newest(run, "step")) + 2)
    assert pids(cluster) == smps
    assert [rank.poll() for rank in ranks] == [None] * NODES
    for rank in ranks:
        (trainer,) = psutil.Process(rank.pid).children()  # what is entered by is no trainer
        trainer.kill()
        rank.wait(PATIENCE_S)
    committed = run.committed()
    cluster[2].replace()  # one node is lost as well
    start(cluster, run)
    until(lambda: all(run.said(rank) for rank in range(NODES)), "all restore", 40.0)
    found = [run.said(rank)[0] for rank in range(NODES)]
    (step,) = {line["restored"] for line in found}
    assert step >= committed
    for rank, line in enumerate(found):
        assert line["before"] != line["digest"] == run.digests(rank)[step]

"""Replicas that come apart after the reduction: back to where they were one, or an error."""

from functools import partial
from pathlib import Path
from typing import Any

import diverging_ranks as ranks
import pytest

from bench.nodes import Cluster
from bench.nodes_rank import Work

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def trained(folder: Path, struck: str, *, reacts: bool = True, nodes: int = 3) -> list[Any]:
    cluster = Cluster(Work(folder / f"{struck}-{reacts}", steps=0), nodes)
    cluster.start(partial(ranks.run, struck, reacts))
    try:
        cluster.finish()
    finally:
        cluster.close()
    return [cluster.said(rank)[-1] for rank in range(nodes)]


def kinds(line: Any) -> list[str]:
    return [event["kind"] for event in line["events"]]


@pytest.mark.representative
def test_one_wrong_update_is_rolled_back_and_leaves_no_trace(tmp_path: Path) -> None:
    right = trained(tmp_path, "never")
    blind = trained(tmp_path, "once", reacts=False)
    found = trained(tmp_path, "once")
    assert len({line["state"] for line in right}) == 1
    assert len({line["state"] for line in blind}) == 2
    assert not any("rollback" in kinds(line) for line in right + blind)
    assert [line["state"] for line in found] == [line["state"] for line in right]
    for line in found:
        (back,) = [event for event in line["events"] if event["kind"] == "rollback"]
        assert "different parameters" in back["detail"]["cause"]
        assert "on rank 1" in back["detail"]["cause"]
        assert not line["error"]


def test_a_rank_that_keeps_erring_ends_the_run_and_is_named(tmp_path: Path) -> None:
    found = trained(tmp_path, "always")
    assert all("on rank 1, also after 2 roll-backs" in line["error"] for line in found)
    assert [e["rank"] for line in found for e in line["events"] if e["kind"] == "evict"] == [1]


def test_a_wrong_last_update_ends_the_run_in_an_error(tmp_path: Path) -> None:
    found = trained(tmp_path, "at last")
    assert all("the last one: replicas hold different" in line["error"] for line in found)
    assert all("on rank 1; restart" in line["error"] for line in found)
    assert any("replica_diverged" in kinds(line) for line in found)
    assert len({line["state"] for line in found}) == 2

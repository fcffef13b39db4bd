"""Ranks whose models, losses or gradients differ decide together all the same, or are refused."""

from pathlib import Path

import pytest
import unequal_ranks as ranks
from gloo_ranks import Ranks

from bench.nodes import Cluster
from bench.nodes_rank import Work

pytestmark = pytest.mark.processes


def test_an_overflow_on_one_rank_skips_the_snapshot_on_all(tmp_path: Path, run_dir: Path) -> None:
    said = [lines[-1] for lines in Ranks(tmp_path / "a", 2, ranks.overflow, run_dir).finished()]
    before, after = ranks.OVERFLOW, ranks.OVERFLOW + 2
    begun = [*range(1, before + 1), before, *range(after, ranks.STEPS + 1)]
    assert [line["begun"] for line in said] == [begun, begun]
    assert said[0]["scale"] == 2 * said[1]["scale"]  # torch's scaler knows its own rank only


def test_a_shadow_of_another_stage_is_refused_before_a_weight_moves(tmp_path: Path) -> None:
    for (said,) in Ranks(tmp_path / "a", 2, ranks.shadowed).finished():
        assert "ranks 0 and 1 hold different parameters" in said["error"]
        assert 'dimension "pp"' in said["error"]
        assert not said["moved"]


def test_a_rank_without_a_loss_is_told_what_to_return(tmp_path: Path) -> None:
    first, other = Ranks(tmp_path / "a", 2, ranks.without_a_loss).finished()
    assert "such as the first stage of a pipeline, returns torch.zeros(())" in first[0]["error"]
    assert other[0]["error"].startswith("RuntimeError")  # it does not wait for ever


def test_stages_on_nodes_are_not_taken_for_replicas_that_came_apart(tmp_path: Path) -> None:
    nodes = Cluster(Work(tmp_path / "nodes", steps=0), 2)
    nodes.start(ranks.run_on_nodes)
    try:
        nodes.finish()
    finally:
        nodes.close()
    for rank in range(2):
        without, told = nodes.said(rank)
        assert "hold different states before the first step" in without["error"]
        assert 'dimension "pp"' in without["error"]
        assert not without["moved"]
        assert told == {"error": "", "moved": True, "kinds": []}

"""Checkpoints of which a node has no part: to come, removed by the run, another run's, or lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_scrub import LOCAL, STEP, files, found, made, persist, verdicts, written

from holdfast.cli.main import main


def by_step(place: Path, **options: Any) -> dict[int, str]:
    """The verdicts on steps, each of which has one."""
    said = found(place, **options)
    assert len({each.step for each in said}) == len(said)
    return {each.step: each.verdict for each in said}


def test_the_newest_step_is_incomplete_while_a_node_may_write_it_and_then_lost(
    tmp_path: Path,
) -> None:
    made(tmp_path)
    written(tmp_path, STEP + 1, nodes=(0, 1))
    (one,) = found(tmp_path)
    assert (one.step, one.verdict) == (STEP + 1, "incomplete")
    assert "ranks [4, 5] are in no folder: it may still be being written" in one.problem
    (one,) = found(tmp_path, late=True)
    assert (one.step, one.verdict) == (STEP + 1, "beyond repair")
    assert "ranks [4, 5] are in no folder: no restart can use it; put back" in one.problem


def test_a_hole_among_a_nodes_steps_is_lost_or_repaired_from_parity(tmp_path: Path) -> None:
    for place, scrubbed in ((tmp_path / "bare", False), (tmp_path / "parity", True)):
        written(place, STEP, STEP + 1, STEP + 2)
        assert not scrubbed or found(place) == []
        held = files(place)
        shutil.rmtree(place / "node-1" / f"step-{STEP + 1}")
        assert by_step(place, repair=False) == {
            STEP + 1: "repairable" if scrubbed else "beyond repair"
        }
        if scrubbed:
            assert {*verdicts(place)} == {"repaired"}
            assert files(place) == held


def test_what_the_run_is_removing_is_no_loss(tmp_path: Path) -> None:
    written(tmp_path, STEP, STEP + 1)
    written(tmp_path, STEP + 2, nodes=(0,), keep=2)
    steps = {STEP: "incomplete", STEP + 2: "incomplete"}
    assert by_step(tmp_path) == steps
    # A trainer has died meanwhile, and node 0 alone has written its last step.
    assert by_step(tmp_path, late=True) == steps | {STEP + 2: "beyond repair"}


@pytest.mark.parametrize("scrubbed", [False, True])
def test_the_steps_of_a_node_that_has_got_another_disk_are_lost_or_repaired(
    tmp_path: Path, scrubbed: bool
) -> None:
    written(tmp_path, STEP, STEP + 1)
    assert not scrubbed or found(tmp_path) == []
    shutil.rmtree(tmp_path / "node-2")
    written(tmp_path, STEP + 2)
    while_fresh = by_step(tmp_path, repair=False)
    assert while_fresh == {STEP: "incomplete", STEP + 1: "incomplete"}
    verdict = "repairable" if scrubbed else "beyond repair"
    assert by_step(tmp_path, late=True, repair=False) == dict.fromkeys(while_fresh, verdict)


def test_ranks_that_are_lost_with_a_whole_node_are_named_also_of_the_newest_step(
    tmp_path: Path,
) -> None:
    written(tmp_path, STEP, STEP + 1)
    shutil.rmtree(tmp_path / "node-2")
    assert by_step(tmp_path) == {STEP: "beyond repair", STEP + 1: "incomplete"}
    said = found(tmp_path, late=True)
    assert [each.verdict for each in said] == ["beyond repair"] * 2
    assert all("ranks [4, 5]" in each.problem for each in said)
    written(tmp_path / "two", STEP, nodes=(0, 1))
    (tmp_path / "two" / "node-2").mkdir()  # made by a run that begins, and empty
    assert verdicts(tmp_path / "two") == ["incomplete"]
    assert verdicts(tmp_path / "two", late=True) == ["beyond repair"]


def test_only_nodes_of_one_run_protect_each_other(tmp_path: Path) -> None:
    """Two nodes go on as another run, and the third has its checkpoint of the same step."""
    for node in (0, 1):
        persist(tmp_path, node, STEP, run="b", world_size=2 * LOCAL)
    persist(tmp_path, 2, STEP, run="a")
    (one,) = found(tmp_path, late=True)
    assert (one.verdict, "ranks [0, 1, 2, 3] are" in one.problem) == ("beyond repair", True)
    noted = json.loads((tmp_path / "node-0" / f"step-{STEP}" / "parity.json").read_text())
    assert noted["members"].keys() == {"node-0", "node-1"}
    assert not (tmp_path / "node-2" / f"step-{STEP}" / "parity.json").exists()
    held = files(tmp_path)
    shutil.rmtree(tmp_path / "node-2")
    shutil.rmtree(tmp_path / "node-1")
    assert {*verdicts(tmp_path)} == {"repaired"}
    assert files(tmp_path) == {name: held[name] for name in held if "node-2" not in name}


def test_nodes_of_two_runs_are_not_one_whole_checkpoint(tmp_path: Path) -> None:
    for node, run in enumerate("aab"):
        persist(tmp_path, node, STEP, run=run)
    said = found(tmp_path, late=True)
    assert [each.verdict for each in said] == ["beyond repair"] * 2
    assert {each.problem.split(" are")[0].split("ranks ")[1] for each in said} == {
        "[4, 5]",
        "[0, 1, 2, 3]",
    }
    assert not list(tmp_path.glob("*/*/parity*"))


def test_the_command_line_says_that_a_node_alone_has_no_parity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, STEP, nodes=(1,))
    words = ["snapshots", "scrub", "--persist-dir", str(tmp_path)]
    assert verdicts(tmp_path, late=True) == ["unprotected"]
    assert main(words) == 0
    assert "snapshots in memory with parities, an object" in capsys.readouterr().out
    written(tmp_path, STEP, nodes=(0, 2))
    assert main(words) == 0
    assert "parities" not in capsys.readouterr().out

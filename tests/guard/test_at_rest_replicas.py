"""Ranks that divide their copies repair a state that changed at rest from the parts of all."""

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import Ranks
from replica_ranks import STEPS, Strike, train_struck

pytestmark = pytest.mark.processes

WEIGHT, MOMENT = "model.0.weight", "optimizer.state.5.exp_avg_sq"


def of_kind(said: list[dict[str, Any]], kind: str) -> list[list[Any]]:
    """Step, op and rung of the events of a kind on one rank."""
    return [event[1:] for event in said[-1]["events"] if event[0] == kind]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.representative), 4])
def test_changed_bits_are_repaired_in_place_from_the_parts_of_all_ranks(
    tmp_path: Path, run_dir: Path, ranks: int
) -> None:
    """In a rank's own part and in another's, on one rank and on two at once."""
    last = ranks - 1
    strikes = [
        Strike(2, 0, weight=True),
        Strike(4, last, weight=True),
        Strike(6, 0, weight=False),
        Strike(6, last, weight=False),
        Strike(8, 0, weight=True),
        Strike(8, last, weight=True),
    ]
    found = Ranks(tmp_path / "ranks", ranks, train_struck, run_dir, strikes).finished()
    owners = {line["op"]: line["owner"] for said in found for line in said[:-1]}
    assert owners == {WEIGHT: 0, MOMENT: last}
    for rank, said in enumerate(found):
        end = said[-1]
        assert end["begin"] != end["calm"] == end["digest"]
        struck = [(s.step, WEIGHT if s.weight else MOMENT) for s in strikes if s.rank == rank]
        assert of_kind(said, "state_fault") == [[*each, "correct"] for each in struck]
        assert of_kind(said, "rollback") == []
        # All repeat the pass of a changed weight; a moment needs none. The first is a rehearsal.
        repeated = [step for step in range(STEPS) if end["computed"].count(step) > 1]
        assert repeated == [0, 2, 4, 8]


def test_a_part_whose_copy_is_damaged_too_is_not_copied_back(tmp_path: Path, run_dir: Path) -> None:
    strikes = [Strike(5, 1, weight=True, spoiled=True)]
    found = Ranks(tmp_path / "ranks", 2, train_struck, run_dir, strikes).finished()
    assert of_kind(found[1], "state_fault") == [[5, WEIGHT, ""]]
    for said in found:
        assert [row[0] for row in of_kind(said, "rollback")] == [5]
        assert said[-1]["begin"] != said[-1]["calm"] == said[-1]["digest"]

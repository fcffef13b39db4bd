"""Lock-step, parameter synchronisation and drift between two ranks, one of which errs."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "snapshot"))
sys.path.insert(0, str(Path(__file__).parent))

import lockstep_ranks as ranks
from gloo_ranks import Ranks

pytestmark = pytest.mark.processes


def ran(folder: Path, job: Any, *arguments: Any) -> list[list[dict[str, Any]]]:
    pair = Ranks(folder, 2, job, *arguments)
    try:
        return pair.finished()
    finally:
        pair.kill()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run without faults and without instruments."""
    said = ran(tmp_path_factory.mktemp("calm") / "run", ranks.train, "", "")
    assert said[0][0]["state"] == said[1][0]["state"]
    return str(said[0][0]["state"])


@pytest.mark.parametrize("instrument", ["lockstep", "parameter_sync", "drift"])
def test_nothing_is_found_where_nothing_is_wrong(
    calm: str, tmp_path: Path, instrument: str
) -> None:
    said = [lines[0] for lines in ran(tmp_path / "run", ranks.train, instrument, "")]
    assert [line["state"] for line in said] == [calm, calm]
    for line in said:
        assert not any(row["mismatches"] for row in line["rows"])
        assert not any(line["noise"] or ())
        assert not any(line["drift"] or ())
        if instrument == "lockstep":
            names = {(row["module"], row["direction"]) for row in line["rows"]}
            assert names == {
                *((name, "forward") for name in ("first", "middle", "norm", "last")),
                *((name, "backward") for name in ("middle", "norm", "last")),
            }
            assert {row["calls"] for row in line["rows"]} == {ranks.STEPS}


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_lockstep_names_the_submodule_that_erred_and_mends_it(
    calm: str, tmp_path: Path, passes: str
) -> None:
    said = [lines[0] for lines in ran(tmp_path / "run", ranks.train, "lockstep", passes)]
    assert said[0]["rows"] == said[1]["rows"]
    (row,) = (row for row in said[0]["rows"] if row["mismatches"])
    assert (row["module"], row["direction"]) == ("middle", passes)
    assert (row["mismatches"], row["struck_calls"], row["calls"]) == (1, 1, ranks.STEPS)
    assert row["frequency"] == 1 / (ranks.STEPS * 16 * 8)
    assert 0.25 < row["severity"] <= 0.5  # the top mantissa bit: half of 1 … 2
    assert said[0]["state"] == calm
    assert said[1]["state"] == calm


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_without_it_the_error_stays(calm: str, tmp_path: Path, passes: str) -> None:
    said = [lines[0] for lines in ran(tmp_path / "run", ranks.train, "", passes)]
    assert said[0]["state"] == calm
    assert said[1]["state"] != calm


def test_parameter_sync_measures_the_noise_of_the_step_and_lets_none_remain(
    calm: str, tmp_path: Path
) -> None:
    said = [lines[0] for lines in ran(tmp_path / "run", ranks.train, "parameter_sync", "forward")]
    assert said[0]["noise"] == said[1]["noise"]
    struck = [step for step, noise in enumerate(said[0]["noise"]) if noise]
    assert struck == [ranks.STRUCK_STEP]
    assert said[0]["worst_noise"] == max(said[0]["noise"])
    assert [step for step, far in enumerate(said[0]["drift"]) if far] == struck
    assert [line["state"] for line in said] == [calm, calm]


def test_drift_goes_on_after_the_error(calm: str, tmp_path: Path) -> None:
    said = [lines[0] for lines in ran(tmp_path / "run", ranks.train, "drift", "forward")]
    struck = [step for step, far in enumerate(said[0]["drift"]) if far]
    assert struck == list(range(ranks.STRUCK_STEP, ranks.STEPS))
    assert [step for step, noise in enumerate(said[0]["noise"]) if noise] == struck
    assert (said[0]["state"] == calm, said[1]["state"] == calm) == (True, False)


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    for rank, lines in enumerate(ran(tmp_path / "run", ranks.refuse)):
        own, none, both, neither, last = lines
        assert f"partner = {rank}: this is rank {rank} of 2" in own["error"]
        assert "partner = 7: this is rank" in none["error"]
        assert "both say reference=True" in both["error"]
        assert "both say reference=False" in neither["error"]
        assert (last["error"], last["rows"]) == (None, 0)

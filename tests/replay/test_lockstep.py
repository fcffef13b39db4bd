"""Lock-step, parameter synchronisation and drift between two ranks, one of which errs."""

from pathlib import Path
from typing import Any

import lockstep_ranks as ranks
import pytest
from gloo_ranks import Ranks

pytestmark = [pytest.mark.processes, pytest.mark.representative]


Said = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What two ranks said of a training with each instrument, by it and the pass that is struck."""
    cases = [(i, p) for i in ("", "lockstep", "parameter_sync", "drift") for p in ranks.PASSES]
    first, second = Ranks(tmp_path_factory.mktemp("all"), 2, ranks.train_each, cases).finished()
    return {case: [first[n], second[n]] for n, case in enumerate(cases)}


@pytest.fixture(scope="module")
def calm(said: Said) -> str:
    """The weights of a run without faults and without instruments."""
    first, second = said["", ""]
    assert first["state"] == second["state"]
    return str(first["state"])


@pytest.mark.parametrize("instrument", ["lockstep", "parameter_sync", "drift"])
def test_nothing_is_found_where_nothing_is_wrong(calm: str, said: Said, instrument: str) -> None:
    found = said[instrument, ""]
    assert [line["state"] for line in found] == [calm, calm]
    for line in found:
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
    calm: str, said: Said, passes: str
) -> None:
    found = said["lockstep", passes]
    assert found[0]["rows"] == found[1]["rows"]
    (row,) = (row for row in found[0]["rows"] if row["mismatches"])
    assert (row["module"], row["direction"]) == ("middle", passes)
    assert (row["mismatches"], row["wrong_calls"], row["calls"]) == (1, 1, ranks.STEPS)
    assert row["frequency"] == 1 / (ranks.STEPS * 16 * 8)
    assert 0.25 < row["severity"] <= 0.5  # the top mantissa bit: half of 1 … 2
    assert [line["state"] for line in found] == [calm, calm]
    without = [line["state"] == calm for line in said["", passes]]
    assert without == [True, False]


def test_parameter_sync_measures_the_noise_of_the_step_and_lets_none_remain(
    calm: str, said: Said
) -> None:
    found = said["parameter_sync", "forward"]
    assert found[0]["noise"] == found[1]["noise"]
    struck = [step for step, noise in enumerate(found[0]["noise"]) if noise]
    assert struck == [ranks.STRUCK_STEP]
    assert found[0]["worst_noise"] == max(found[0]["noise"])
    assert [step for step, far in enumerate(found[0]["drift"]) if far] == struck
    assert [line["state"] for line in found] == [calm, calm]


def test_drift_goes_on_after_the_error(calm: str, said: Said) -> None:
    found = said["drift", "forward"]
    struck = [step for step, far in enumerate(found[0]["drift"]) if far]
    assert struck == list(range(ranks.STRUCK_STEP, ranks.STEPS))
    assert [step for step, noise in enumerate(found[0]["noise"]) if noise] == struck
    assert (found[0]["state"] == calm, found[1]["state"] == calm) == (True, False)


def test_what_is_no_pair_is_refused(tmp_path: Path) -> None:
    for rank, lines in enumerate(Ranks(tmp_path / "run", 2, ranks.refuse).finished()):
        own, none, both, neither, last = lines
        assert f"partner = {rank}: this is rank {rank} of 2" in own["error"]
        assert "partner = 7: this is rank" in none["error"]
        assert "both say reference=True" in both["error"]
        assert "both say reference=False" in neither["error"]
        assert (last["error"], last["rows"]) == (None, 0)

"""Wrong collectives are found, whoever issued them, and a Guard's step is done again."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import collective_ranks as ranks
import pytest
from gloo_ranks import Ranks
from snapshot_waits import PATIENCE_S

pytestmark = pytest.mark.processes

COUNT = 3
FAULTS: dict[str, dict[str, Any]] = {
    "low bit": {"kind": "flip-0", "index": 4},
    "high bit": {"kind": "flip-30", "index": 4999},
    "lost": {"kind": "lost"},
    "stale": {"kind": "stale"},
    "wrong sum": {"kind": "value=9", "index": 77},
    "wrong addend": {"kind": "value=9", "index": 77, "given": True},
}
SUMMED = ("all_reduce", "reduce_scatter")


def by_name(said: list[list[dict[str, Any]]], *keys: str) -> dict[Any, list[dict[str, Any]]]:
    """What every rank said, by the values of these keys."""
    found = defaultdict(list)
    for lines in said:
        for line in lines:
            found[tuple(line.get(key) for key in keys)].append(line)
    return found


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every collective on every kind of data, and with every fault."""
    said = Ranks(tmp_path_factory.mktemp("single"), COUNT, ranks.single, FAULTS).finished()
    return by_name(said, "data", "fault", "name")


@pytest.mark.representative
def test_clean_collectives_give_no_alarm_whatever_they_move(singles: Any) -> None:
    clean = {key: lines for key, lines in singles.items() if key[0]}
    assert len(clean) == len(ranks.CLEAN) * 14
    alarms = {key: lines for key, lines in clean.items() if any(x["wrong"] for x in lines)}
    assert alarms == {}


@pytest.mark.representative
def test_every_fault_is_found_and_who_got_it_is_named(singles: Any) -> None:
    seen = 0
    for (_, fault, name), lines in singles.items():
        op, _, way = name.partition(", ")
        sums = op in SUMMED and way != "maximum"
        if fault is None or (op == "broadcast" and fault == "wrong addend"):
            continue
        if fault in ("wrong sum", "wrong addend") and not sums:
            continue  # of what is not summed these are other faults
        if fault == "low bit" and op == "reduce_scatter":
            continue  # less than rounding does
        assert [line["wrong"] for line in lines] == [True] * COUNT, (fault, name)
        named = {e["rank"] for line in lines for e in line["events"]}
        everywhere = op == "all_reduce" and fault in ("wrong sum", "wrong addend")
        assert named == ({-1} if everywhere else named & {0, 1, 2}), (fault, name)
        if fault not in ("wrong sum", "wrong addend"):
            assert named == {1}, (fault, name)
        seen += 1
    assert seen > 60


def test_the_link_and_the_place_are_told(singles: Any) -> None:
    (gathered,) = [e for x in singles[None, "low bit", "all_gather"] for e in x["events"]]
    assert gathered["detail"]["sent_by"] == [0]
    assert gathered["kind"] == "collective_fault"
    assert gathered["detail"]["group"] == [0, 1, 2]
    scattered = [e for x in singles[None, "high bit", "reduce_scatter"] for e in x["events"]]
    assert [event["detail"]["elements_from"] for event in scattered] == [[4096]]


@pytest.mark.representative
def test_a_check_that_fails_on_one_rank_ends_those_of_its_group_on_all(tmp_path: Path) -> None:
    said = Ranks(tmp_path, COUNT, ranks.failing).finished()
    sums = {line["sum"] for lines in said for line in lines[:3]}
    assert len(sums) == 1
    for lines in said:
        assert [line["found"] for line in lines[:3]] == [0, 0, 0]
        assert [line["noted"] for line in lines[:3]] == [1, 1, 2]
        assert lines[3]["events"] == [["check_failed", "MemoryError()"]]


def test_a_rank_that_does_not_come_to_the_check_ends_the_run_and_the_check_is_named(
    tmp_path: Path,
) -> None:
    """The process group itself would wait for three times as long as the test."""
    (line,), (late,) = Ranks(tmp_path, 2, ranks.absent).finished()
    assert not late["error"]
    assert "not all of ranks [0, 1] came to the check of their collectives" in line["error"]
    assert 1 <= line["took_s"] < PATIENCE_S


DDP = {"op": "all_reduce", "elements": 100, "kind": "flip-28", "index": 333}
FSDP = {"elements": 100, "kind": "flip-28", "index": 33}
ON, OFF = {"collectives": True}, dict[str, Any]()
SCENARIOS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ddp": ("ddp", {}, ON),
    "fsdp": ("fsdp", {}, ON),
    "hsdp": ("hsdp", {}, ON),
    "ddp, bare": ("ddp", {}, OFF),
    "ddp, copy": ("ddp", DDP, ON),
    "ddp, copy, off": ("ddp", DDP, OFF),
    "ddp, addend": ("ddp", DDP | {"given": True}, ON),
    "ddp, addend, off": ("ddp", DDP | {"given": True}, OFF),
    "ddp, stale": ("ddp", DDP | {"kind": "stale"}, ON),
    "ddp, stale, off": ("ddp", DDP | {"kind": "stale"}, OFF),
    "ddp, lost": ("ddp", DDP | {"kind": "lost"}, ON),
    "ddp, lost, off": ("ddp", DDP | {"kind": "lost"}, OFF),
    "ddp, buffers": ("ddp", {"op": "broadcast", "elements": 90, "index": 5}, ON),
    "fsdp, gathered": ("fsdp", FSDP | {"op": "all_gather"}, ON),
    "fsdp, gathered, off": ("fsdp", FSDP | {"op": "all_gather"}, OFF),
    "fsdp, scattered": ("fsdp", FSDP | {"op": "reduce_scatter"}, ON),
    "fsdp, scattered, off": ("fsdp", FSDP | {"op": "reduce_scatter"}, OFF),
    "hsdp, copy": ("hsdp", DDP, ON),
    "hsdp, copy, off": ("hsdp", DDP, OFF),
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every training, with what each rank said of it."""
    said = Ranks(tmp_path_factory.mktemp("train"), COUNT, ranks.train, SCENARIOS).finished()
    return {name: lines for (name,), lines in by_name(said, "name").items()}


def states(lines: list[dict[str, Any]]) -> list[str]:
    return [line["state"] for line in lines]


@pytest.mark.representative
def test_a_calm_training_keeps_its_bits_and_records_nothing(trainings: Any) -> None:
    assert states(trainings["ddp"]) == states(trainings["ddp, bare"])
    for layout in ("ddp", "fsdp", "hsdp"):
        assert [line["events"] for line in trainings[layout]] == [[]] * COUNT
        assert {line["passes"] for line in trainings[layout]} == {1}


@pytest.mark.representative
def test_a_wrong_collective_repeats_the_step_and_the_end_is_that_of_the_calm_run(
    trainings: Any,
) -> None:
    for name, lines in trainings.items():
        layout, *rest = name.split(", ")
        if not rest or rest[-1] in ("off", "bare"):
            continue
        assert states(lines) == states(trainings[layout]), name
        # A rank that only got its consequence needs a third run, to confirm the second.
        assert [line["passes"] for line in lines] == [2 + ("gathered" in name)] * COUNT, name
        found = [e for line in lines for e in line["events"] if e["kind"] == "collective_fault"]
        assert {event["step"] for event in found} == {ranks.STRUCK}, name
        assert {event["rank"] for event in found} == {-1 if "addend" in name else 1}, name


@pytest.mark.representative
def test_unchecked_the_same_faults_reach_the_weights(trainings: Any) -> None:
    off = [name for name in trainings if name.endswith("off")]
    assert len(off) == 7
    for name in off:
        lines, layout = trainings[name], name.split(",")[0]
        assert states(lines) != states(trainings[layout]), name
        assert {line["passes"] for line in lines} == {1}, name

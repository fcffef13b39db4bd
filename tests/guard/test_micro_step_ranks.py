"""Micro-steps on several ranks: all of them decide and repeat together, and reduce alike."""

from pathlib import Path
from typing import Any

import pytest
import split_ranks as ranks
from gloo_ranks import Ranks
from shadow_ranks import STEPS, STRUCK_STEP

pytestmark = pytest.mark.processes

INFINITE = {"ranks": [1], "passes": "infinite"}
AUDITED, SHADOWED = {"audit": 1.0}, {"shadow": 1.0}


def scenarios(layout: str) -> list[dict[str, Any]]:
    """A bare run, a healthy one, and faults in one micro-step of one rank."""
    first, middle, last = ({"ranks": [1], "only": n} for n in range(ranks.PARTS))
    return [
        {"name": name, "layout": layout} | options
        for name, options in {
            "bare": {},
            "bare, struck": {"fault": middle},
            "healthy": {"guard": {}},
            "audited": {"guard": AUDITED},
            "infinite": {"guard": {}, "fault": INFINITE | {"only": 1}},
            "first": {"guard": AUDITED, "fault": first},
            "middle": {"guard": AUDITED, "fault": middle},
            "last": {"guard": AUDITED, "fault": last},
            "unaudited": {"guard": {}, "fault": middle},
        }.items()
    ]


SHADOWS = [
    {"name": "shadowed", "layout": "ddp", "guard": SHADOWED},
    {"name": "persistent", "layout": "ddp", "guard": SHADOWED, "fault": {"ranks": [1]}},
    {"name": "persistent, alone", "layout": "ddp", "guard": AUDITED, "fault": {"ranks": [1]}},
]


def said_in(folder: Path, count: int, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What every rank said, by the scenario's name."""
    said = Ranks(folder / "run", count, ranks.train, cases).finished()
    return {case["name"]: [lines[n] for lines in said] for n, case in enumerate(cases)}


def states(lines: list[dict[str, Any]]) -> list[str]:
    return [line["state"] for line in lines]


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.representative), "fsdp"])
def test_a_step_is_repeated_by_all_ranks_from_its_first_micro_step(
    tmp_path: Path, layout: str
) -> None:
    found = said_in(tmp_path, 2, scenarios(layout))
    right = states(found["bare"])
    assert not set(states(found["bare, struck"])) & set(right)
    assert states(found["unaudited"]) == states(found["bare, struck"])
    for name in ("healthy", "audited"):
        assert states(found[name]) == right, name
        assert [line["events"] for line in found[name]] == [[], []]
    assert [line["passes"] for line in found["healthy"]] == [STEPS * ranks.PARTS] * 2
    for name in ("infinite", "first", "middle", "last"):
        assert states(found[name]) == right, name
        for line in found[name]:
            (event,) = line["events"]
            assert (event["kind"], event["step"]) == ("rerun", STRUCK_STEP)
            assert event["detail"]["verdict"] == "transient"


def test_shadows_correct_a_rank_that_agrees_with_itself(tmp_path: Path) -> None:
    found = said_in(tmp_path, 3, [{"name": "bare", "layout": "ddp"}, *SHADOWS])
    right = states(found["bare"])
    assert states(found["shadowed"]) == right
    assert [line["events"] for line in found["shadowed"]] == [[]] * 3
    assert not set(states(found["persistent, alone"])) & set(right)
    assert states(found["persistent"]) == right
    named = [e for line in found["persistent"] for e in line["events"]]
    assert {e["rank"] for e in named if e["kind"] == "shadow_mismatch"} == {1}

"""Loops of several ranks: struck or killed, they end with the bits of the calm run."""

from pathlib import Path
from typing import Any

import pytest

from holdfast_lab.zoo.ranks import campaign
from holdfast_lab.zoo.ranks.campaign import Outcome, judged, outcomes
from holdfast_lab.zoo.ranks.jobs import run
from holdfast_lab.zoo.ranks.loops import LOOPS, STEPS
from holdfast_lab.zoo.ranks.rank import Scenario
from holdfast_lab.zoo.ranks.strikes import FIRST, KINDS, Strike

SEED = 1
# Loops that differ from another one in the layout only, and the faults that depend on it most.
VARIATIONS, HARDEST = ("ddp-nodes", "fsdp-nodes", "hsdp", "pp-nodes", "pp-ddp"), ("rest", "kill")
# Of FSDP all, and of the others some in turn: `make campaign` has each loop with each fault.
IN_TURN = (("forward", "audited", "rest"), ("backward", "outside", "kill"))


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("fsdp", marks=pytest.mark.representative),
        *(name for name in LOOPS if name != "fsdp"),
    ],
)
def test_every_run_ends_with_the_bits_of_the_calm_one(loop: str) -> None:
    """Without a Guard the same fault changes them; a refused loop is not struck."""
    kinds = HARDEST if loop in VARIATIONS else IN_TURN[list(LOOPS).index(loop) % 2]
    kinds = KINDS if loop == "fsdp" else kinds
    found = outcomes(loop, SEED, kinds)
    ending = "refused" if LOOPS[loop].refused else "equal"
    assert {one.outcome for one in found} == {ending}, found
    assert [one.kind for one in found] == (["calm"] if ending == "refused" else ["calm", *kinds])


@pytest.mark.processes
def test_nodes_without_the_whole_state_roll_back_together(tmp_path: Path) -> None:
    """The check at rest finds the flip on one rank only, and its node cannot repair it."""
    strike = Strike("rest", rank=1, step=5, micro_batch=0, draw=4)
    scenarios = [Scenario("bare", None, guarded=False), Scenario("rest", strike, guarded=True)]
    lines = run("fsdp-nodes", SEED, scenarios, tmp_path)
    assert digests("rest", lines) == digests("bare", lines)
    first, second = (set(line["events"]) for line in lines["rest"])
    assert first == {"restored", "rollback"}
    assert second == {"restored", "rollback", "state_fault"}


def digests(name: str, lines: Any) -> list[str]:
    return [line["digest"] for line in lines[name]]


def said(*digests: str, kinds: tuple[str, ...] = (), first: int = 0, refused: str = "") -> Any:
    return [
        {"digest": digest, "events": list(kinds), "first": first, "refused": refused}
        for digest in digests
    ]


@pytest.mark.parametrize(
    ("kind", "struck", "bare", "outcome"),
    [
        ("calm", said("a", "b"), None, "equal"),
        ("calm", said("a", "b", kinds=("rerun",)), None, "alarm"),
        ("calm", said("a", "c"), None, "differs"),
        ("calm", said("a"), None, "differs"),
        ("calm", said("c", "d", refused="why"), None, "refused"),
        ("outside", said("a", "b", kinds=("rerun",)), said("a", "c"), "equal"),
        ("outside", said("a", "b"), said("a", "c"), "unseen"),
        ("outside", said("a", "b", kinds=("rerun",)), said("a", "b"), "harmless"),
        ("outside", said("a", "c", kinds=("rerun",)), said("a", "c"), "differs"),
        ("kill", said("a", "b", kinds=("restored",), first=3), None, "equal"),
        ("kill", said("a", "b", kinds=("restored",)), None, "unseen"),
    ],
)
def test_how_a_run_ended_is_told_from_what_its_ranks_said(
    kind: str, struck: Any, bare: Any, outcome: str
) -> None:
    lines = {"bare": said("a", "b"), kind: struck, f"bare-{kind}": bare}
    assert judged(kind, lines) == outcome


def test_the_exit_code_says_whether_all_runs_ended_equal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = {1: "equal", 2: "refused", 3: "differs"}
    monkeypatch.setattr(
        campaign, "outcomes", lambda loop, seed: [Outcome(loop, seed, "calm", ends[seed])]
    )
    assert campaign.main(["--loops", "tp,pp", "--seeds", "1-2"]) == 0
    assert campaign.main(["--loops", "tp", "--seeds", "3", "--json", str(tmp_path / "a")]) == 1
    assert '"outcome": "differs"' in (tmp_path / "a").read_text()


def test_strikes_are_drawn_within_the_loop_and_differ_between_seeds() -> None:
    for loop in LOOPS.values():
        for kind in KINDS:
            drawn = [Strike.drawn(kind, loop, seed) for seed in range(20)]
            assert drawn == [Strike.drawn(kind, loop, seed) for seed in range(20)]
            assert {one.rank for one in drawn} == set(range(loop.ranks))
            assert {one.micro_batch for one in drawn} == set(range(loop.micro_batches))
            assert all(FIRST <= one.step < STEPS for one in drawn)

"""Who is named for a step that does not end, from what the ranks say."""

from holdfast.liveness.answers import Answer
from holdfast.liveness.pace import LOOKS, Stragglers
from holdfast.liveness.verdict import Entered, excused, judge

SUM, COPY = "gloo:all_reduce", "gloo:broadcast"


def said(rank: int, state: str = "stalled", **groups: Entered) -> Answer:
    """The answer of a rank, with the newest collective of each group."""
    return {
        "rank": rank,
        "host": "a",
        "pid": 100 + rank,
        "started": 1,
        "state": state,
        "step": 7,
        "at_s": 0.0,
        "own_s": 0.0,
        "groups": {name: (*each,) for name, each in groups.items()},
    }


def named(*answers: Answer, world_size: int = 3) -> list[int]:
    found = {answer["rank"]: answer for answer in answers}
    return sorted(judge(found, world_size, {}).behind)


def test_a_rank_that_does_not_answer_is_behind() -> None:
    waits = Entered(5, SUM, "[]", True)
    assert named(said(0, world=waits), said(2, world=waits)) == [1]
    answers = {0: said(0), 2: said(2)}
    assert judge(answers, 3, {1: "stopped"})[::2] == ({1: "stopped"}, True)
    found = judge(answers, 3, {})  # it may be about to answer
    assert (list(found.behind), found.is_sure) == ([1], False)


def test_a_rank_that_has_left_is_behind() -> None:
    waits = Entered(5, SUM, "[]", True)
    assert named(said(0, world=waits), said(1, "ended"), said(2, world=waits)) == [1]


def test_a_rank_that_has_not_entered_the_collective_is_behind() -> None:
    waits, before = Entered(5, SUM, "[]", True), Entered(4, SUM, "[]", False)
    assert named(said(0, world=waits), said(1, world=before), said(2, world=waits)) == [1]


def test_a_rank_that_is_held_up_in_another_group_is_not_the_cause() -> None:
    """Rank 1 waits for rank 2 in one group, and rank 0 for rank 1 in another."""
    ahead, before = Entered(5, SUM, "[]", True), Entered(4, SUM, "[]", False)
    inner, late = Entered(9, SUM, "[]", True), Entered(8, SUM, "[]", False)
    answers = said(0, outer=ahead), said(1, outer=before, inner=inner), said(2, inner=late)
    assert named(*answers) == [2]


def test_a_rank_in_another_collective_than_most_is_behind() -> None:
    waits, other = Entered(5, SUM, "[]", True), Entered(5, COPY, "[]", True)
    assert named(said(0, world=waits), said(1, world=other), said(2, world=waits)) == [1]


def test_nobody_is_named_if_all_wait_in_the_same_collective() -> None:
    waits = Entered(5, SUM, "[]", True)
    found = judge({rank: said(rank, world=waits) for rank in range(3)}, 3, {})
    assert not found.behind
    assert not found.is_sure
    assert SUM in found.waiting_in


def test_a_rank_that_computes_or_pauses_excuses_the_others() -> None:
    for state in ("busy", "paused"):
        assert excused({0: said(0), 1: said(1, state)})
    assert not excused({0: said(0), 1: said(1)})


def test_a_straggler_is_named_once_after_enough_looks_in_a_row() -> None:
    usual, slow = {0: 1.0, 1: 1.02, 2: 0.99}, {0: 1.0, 1: 1.02, 2: 3.0}
    compared = Stragglers()
    found = [compared.look(slow) for _ in range(2 * LOOKS)]
    assert found[LOOKS - 1] == {2: 3.0 / 1.01}
    assert sum(map(bool, found)) == 1
    for _ in range(LOOKS):
        assert not compared.look(usual)
    assert [bool(compared.look(slow)) for _ in range(LOOKS)] == [False, False, True]


def test_one_slow_look_or_a_wide_spread_names_nobody() -> None:
    compared = Stragglers()
    for _ in range(10):
        assert not compared.look({0: 1.0, 1: 1.0, 2: 3.0})
        assert not compared.look({0: 1.0, 1: 1.0, 2: 1.0})
    for _ in range(10):
        assert not compared.look({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})
    assert not compared.look({0: 1.0})

"""The history: what a roll-back to any held snapshot needs, and no more."""

import torch

from holdfast.replay.history import History


def _steps(history: History, since: int) -> list[int]:
    return [past.step for past in history.since(since)]


def test_it_reaches_back_to_the_oldest_snapshot_that_is_held() -> None:
    history = History(keep=2)
    for step in range(10):
        history.remember(step, f"batch {step}", clean=max(0, step - 1))
    assert _steps(history, 7) == [7, 8, 9]
    assert [past.batch for past in history.since(8)] == ["batch 8", "batch 9"]
    assert _steps(history, 6) == []


def test_everything_is_kept_until_there_is_a_clean_snapshot() -> None:
    history = History(keep=2)
    for step in range(5):
        history.remember(step, None, clean=None)
    assert _steps(history, 0) == [0, 1, 2, 3, 4]


def test_after_a_roll_back_the_still_older_snapshot_stays_in_reach() -> None:
    history = History(keep=2)
    for step in range(6):
        history.remember(step, None, clean=max(0, step - 1))
    history.rolled_back(4)
    history.remember(6, None, clean=4)
    assert _steps(history, 3) == [3, 4, 5, 6]
    history.rolled_back(3)
    assert _steps(history, 3) == [3, 4, 5, 6]


def test_a_step_that_is_tried_again_replaces_its_former_batch() -> None:
    history = History()
    history.remember(3, "raised", clean=3)
    history.remember(3, "again", clean=3)
    assert [past.batch for past in history.since(3)] == ["again"]


def test_the_random_state_is_that_before_the_step() -> None:
    history = History()
    history.remember(0, None, clean=0)
    drawn = torch.rand(4)
    history.since(0)[0].rng.restore()
    assert torch.equal(torch.rand(4), drawn)

"""The history: what a roll-back to any held snapshot needs, and no more."""

import torch

from holdfast.replay.history import History
from holdfast.rng import set_rng_state


def _steps(history: History, since: int) -> list[int]:
    return [past.step for past in history.since(since)]


def test_it_reaches_back_to_the_oldest_snapshot_that_is_held() -> None:
    history = History(keep=2)
    for step in range(5):
        history.remember(step, f"batch {step}", clean=None)
    assert _steps(history, 0) == [0, 1, 2, 3, 4]  # there is no clean snapshot yet
    for step in range(5, 10):
        history.remember(step, f"batch {step}", clean=max(0, step - 1))
    assert _steps(history, 7) == [7, 8, 9]
    assert [past.record for past in history.since(8)] == ["batch 8", "batch 9"]
    assert _steps(history, 6) == []


def test_a_step_has_its_newest_batch_and_the_random_state_before_it() -> None:
    history = History()
    history.remember(3, "raised", clean=3)
    torch.rand(1)
    history.remember(3, "again", clean=3)
    drawn = torch.rand(4)
    (past,) = history.since(3)
    set_rng_state(past.rng)
    assert (past.record, torch.rand(4).tolist()) == ("again", drawn.tolist())


def test_after_a_roll_back_the_still_older_snapshot_stays_in_reach() -> None:
    history = History(keep=2)
    for step in range(6):
        history.remember(step, None, clean=max(0, step - 1))
    history.rolled_back(4)
    history.remember(6, None, clean=4)
    assert _steps(history, 3) == [3, 4, 5, 6]
    history.rolled_back(3)
    assert _steps(history, 3) == [3, 4, 5, 6]

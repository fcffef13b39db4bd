"""Damage that repeats: back to the last clean snapshot, and the batches since then again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import (
    STEPS,
    STRUCK,
    WEIGHT_FAULT,
    Run,
    always_wrong,
    events_of,
    interruption,
    kinds,
    snapshots_of,
)

from holdfast import events
from holdfast.errors import SnapshotCorrupt, UncorrectableFault
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.replay.history import History
from holdfast.snapshot.restore import newest_state


@pytest.mark.parametrize(("step", "every"), [(0, 1), (1, 1), (STRUCK, 1), (STRUCK, 3)])
def test_a_damaged_weight_is_rolled_back_and_the_batches_since_then_are_replayed(
    run_dir: Path, step: int, every: int
) -> None:
    fault = replace(WEIGHT_FAULT, step=step)
    right = Run().bare().digest()
    damaged = Run().inject(fault)
    with protect(damaged.model, verify=False):
        assert damaged.bare().digest() != right
    events.clear()
    run = Run().inject(fault)
    with protect(run.model):
        run.guarded(snapshots=snapshots_of(run, run_dir, every=every))
    assert run.digest() == right
    (event,) = events_of("rollback")
    back = event.detail["to_step"]
    assert (event.step, event.rung, event.detail["from_step"]) == (step, "rollback", step)
    assert max(0, step - 1 - every) <= back <= max(0, step - 1)
    assert back % every == 0
    assert run.computed == [*range(step), *[step] * 4, *range(back, STEPS)]
    assert run.loader.position == STEPS


def test_without_snapshots_a_damaged_weight_stops_the_run() -> None:
    run = Run().inject(WEIGHT_FAULT)
    steps_applied = Run().bare(STRUCK).scheduler.state_dict()
    with protect(run.model), pytest.raises(UncorrectableFault, match=f"step {STRUCK}: .*no snap"):
        run.guarded()
    assert run.scheduler.state_dict() == steps_applied
    assert [event.detail["verdict"] for event in events_of("rerun")] == ["persistent"]


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("elements", [1, 5])
def test_a_weight_damaged_within_a_step_is_rolled_back(run_dir: Path, elements: int) -> None:
    """Contiguous bytes of a weight are many rows of the B that its forward product takes."""
    # The additional pass must leave no trace in running statistics.
    clean, run = (Run(dropout=0, without=["batch_norm"]) for _ in range(2))
    plain_pass, struck = run.forward_backward, []

    def struck_pass(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] == STRUCK and not struck:
            with torch.no_grad():
                run.model(batch[1])  # the weight is encoded, then damaged
            struck.append(batch[0])
            run.model.up.weight.data.flatten()[:elements] = 1e6
        return plain_pass(batch)

    run.forward_backward = struck_pass  # type: ignore[method-assign]
    with protect(run.model):
        run.guarded(snapshots=snapshots_of(run, run_dir))
    assert "operand_fault" in kinds()
    assert "rollback" in kinds()
    assert "weight_changed_unseen" not in kinds()
    assert run.digest() == clean.bare().digest()


@pytest.mark.parametrize("died_at", [STRUCK, STRUCK + 1, STRUCK + 2])
def test_a_death_right_after_a_roll_back_loses_no_batch(run_dir: Path, died_at: int) -> None:
    first, second = Run().inject(WEIGHT_FAULT), Run()
    first.damage = interruption(lambda number: number == died_at and bool(events_of("rollback")))
    with protect(first.model), pytest.raises(KeyboardInterrupt):
        first.guarded(snapshots=snapshots_of(first, run_dir))
    assert first.computed[-1] == died_at
    second.guarded(snapshots=snapshots_of(second, run_dir))
    assert second.computed == list(range(second.computed[0], STEPS))
    assert second.digest() == Run().bare().digest()


def test_a_corrupt_snapshot_is_passed_over_for_an_older_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, offered = newest_state._verified, []

    def damaged(offer: Any, training: Any) -> Any:
        offered.append(offer.step)
        if len(offered) == 1:
            raise SnapshotCorrupt("a bit of model.up.weight flipped")
        return original(offer, training)

    monkeypatch.setattr(newest_state, "_verified", damaged)
    run = Run().inject(WEIGHT_FAULT)
    snapshots = snapshots_of(run, run_dir)
    with protect(run.model), Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            snapshots.wait_committed()
            guard.step(run.forward_backward, batch)
    assert offered == [STRUCK, STRUCK - 1]
    assert events_of("rollback")[0].detail["to_step"] == STRUCK - 1
    assert len(events_of("snapshot_corrupt")) == 1
    assert run.digest() == Run().bare().digest()
    assert run.loader.position == STEPS


def test_a_roll_back_further_than_the_batches_reach_is_an_error(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    run.damage = always_wrong(run, 6)
    monkeypatch.setattr(History, "since", lambda history, step: history._steps[-1:][step < 6 :])
    with pytest.raises(UncorrectableFault, match=r"rolled back to step \d, .*forgotten"):
        run.guarded(snapshots=snapshots_of(run, run_dir))

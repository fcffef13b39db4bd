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
from holdfast.snapshot.client.snapshots import Snapshots
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
    rehearsal = [0] if step else []
    assert run.computed == [*rehearsal, *range(step), *[step] * 4, *range(back, STEPS)]
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

    def damaged(offer: Any, *about: Any) -> Any:
        offered.append(offer.step)
        if len(offered) == 1:
            raise SnapshotCorrupt("a bit of model.up.weight flipped")
        return original(offer, *about)

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


def flip_bit_30(weight: torch.Tensor) -> None:
    weight.data.view(torch.int32).view(-1)[:1] ^= 1 << 30


def grow(weight: torch.Tensor) -> None:
    weight.data.mul_(1e6)


def struck_between_steps(run: Run, harm: Any) -> Run:
    """Damage a weight once, after the backward pass of a step and before its optimizer."""

    def damage(number: int) -> None:
        if number == STRUCK and run.computed.count(STRUCK) == 1:
            harm(run.model.down.weight)

    run.damage = damage
    return run


def train_committing(run: Run, snapshots: Snapshots) -> None:
    """Train so that each step finds the snapshot of the step before committed."""
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=0.0) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            snapshots.wait_committed()
            guard.step(run.forward_backward, batch)


@pytest.mark.parametrize("harm", [flip_bit_30, grow])
def test_damage_within_the_newest_snapshot_is_escaped_by_an_older_one(
    run_dir: Path, harm: Any
) -> None:
    right = Run().bare().digest()
    assert struck_between_steps(Run(), harm).bare().digest() != right
    events.clear()
    run = struck_between_steps(Run(), harm)
    train_committing(run, snapshots_of(run, run_dir))
    assert [event.detail["to_step"] for event in events_of("rollback")] == [STRUCK + 1, STRUCK]
    assert "nonfinite_genuine" not in kinds()
    assert run.digest() == right
    assert run.loader.position == STEPS


def test_every_kept_snapshot_is_tried_before_a_result_counts_as_the_programs_own(
    run_dir: Path,
) -> None:
    """The value was damaged three steps ago, and no step since then has used it."""

    def with_spare(run: Run) -> Run:
        run.model.register_buffer("spare", torch.ones(1))
        return run

    def lost_later(run: Run) -> Run:
        run.damage = lambda number: (
            flip_bit_30(run.model.spare)
            if number == STRUCK and run.computed.count(STRUCK) == 1
            else None
        )
        plain_pass = run.forward_backward

        def rarely_used(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
            inputs = batch[1] * run.model.spare if batch[0] == STRUCK + 3 else batch[1]
            return plain_pass((batch[0], inputs))

        run.forward_backward = rarely_used  # type: ignore[method-assign]
        return run

    right = with_spare(Run()).bare().digest()
    assert lost_later(with_spare(Run())).bare().digest() != right
    events.clear()
    run = lost_later(with_spare(Run()))
    train_committing(run, snapshots_of(run, run_dir, keep=4))
    tried = [event.detail["to_step"] for event in events_of("rollback")]
    assert tried == [STRUCK + 3, STRUCK + 2, STRUCK + 1, STRUCK]
    assert run.digest() == right


def test_damage_that_every_kept_snapshot_holds_ends_the_run(run_dir: Path) -> None:
    run = struck_between_steps(Run(), flip_bit_30)
    with pytest.raises(UncorrectableFault, match=rf"step {STRUCK + 1}: .* 1 roll-back.*keep=1"):
        train_committing(run, snapshots_of(run, run_dir, keep=1))
    assert run.computed[-1] == STRUCK + 1
    assert "nonfinite_genuine" not in kinds()
    second = Run()
    with snapshots_of(second, run_dir, keep=1) as snapshots:
        assert snapshots.restore() == STRUCK + 1  # the suspect snapshot was not given up


def test_an_absurd_loss_of_the_programs_own_is_applied_once_older_snapshots_show_it(
    run_dir: Path,
) -> None:
    huge = {STRUCK: 1e6 * torch.ones(6, 8).cumsum(1).cumsum(0)}
    plain = {"special": huge, "dropout": 0, "without": ["norm", "batch_norm"]}
    bare, run = Run(**plain), Run(**plain)
    train_committing(run, snapshots_of(run, run_dir))
    assert run.digest() == bare.bare().digest()
    back = [event.detail["to_step"] for event in events_of("rollback") if event.step == STRUCK]
    assert back[:2] == [STRUCK, STRUCK - 1]

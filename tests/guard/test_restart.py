"""What a run says when it begins: from where it goes on, or that it begins again."""

import logging
from pathlib import Path

import pytest
import torch
from guard_cases import STEPS, Run, events_of, interruption, snapshots_of

from holdfast.guard import Guard


def test_what_was_restored_is_logged(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Run(), Run()
    first.damage = interruption(lambda number: number == 7)
    with pytest.raises(KeyboardInterrupt):
        first.guarded(snapshots=snapshots_of(first, run_dir))
    with caplog.at_level(logging.INFO, "holdfast.guard"):
        second.guarded(snapshots=snapshots_of(second, run_dir))
    (line,) = (each.message for each in caplog.records if "guarding" in each.message)
    assert f"resumes at step {second.computed[0]} from memory ({run_dir})" in line


def train_on(run_dir: Path, steps: int, **options: object) -> Run:
    run = Run()
    run.guarded(steps, snapshots=snapshots_of(run, run_dir, **options))
    return run


def test_more_steps_of_a_finished_run_begin_at_0_and_say_so(run_dir: Path) -> None:
    train_on(run_dir, 6)
    with pytest.warns(UserWarning, match="was finished at step 6, .* begins at step 0; to cont"):
        again = train_on(run_dir, 9)
    assert again.computed == [0, *range(9)]
    (event,) = events_of("begun_again")
    assert event.detail["finished_step"] == 6
    with pytest.warns(UserWarning, match="was finished at step 9"):
        train_on(run_dir, 1)


@pytest.mark.processes
@pytest.mark.representative
def test_more_steps_of_a_finished_run_continue_from_its_checkpoint(
    run_dir: Path, tmp_path: Path
) -> None:
    run = Run()
    snapshots = snapshots_of(run, run_dir, persist_dir=tmp_path / "disk")
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(run.loader, steps=6):
            guard.step(run.forward_backward, batch)
        snapshots.persist()
    again = train_on(run_dir, STEPS, persist_dir=tmp_path / "disk")
    assert again.computed == list(range(6, STEPS))
    assert again.digest() == Run().bare().digest()
    assert not events_of("begun_again")


def test_a_weight_edited_after_the_step_is_said_once_with_the_remedy(run_dir: Path) -> None:
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    said = pytest.warns(UserWarning, match=r"down.weight was changed .* guard.step\(..., after=fn")
    with said as warnings, Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(run.loader, steps=4):
            guard.step(run.forward_backward, batch)
            with torch.no_grad():
                run.model.down.weight.mul_(0.999)
    assert len([each for each in warnings if "was changed" in str(each.message)]) == 1
    assert {event.detail["path"] for event in events_of("snapshot_torn")} == {"model.down.weight"}
    assert len(events_of("snapshot_torn")) == 4

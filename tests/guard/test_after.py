"""``after``: changes of weights that belong to a step, before its snapshot begins."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import STEPS, STRUCK, WEIGHT_FAULT, Run, events_of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast import Snapshots
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.protection import protect


class EditingRun(Run):
    """A run that averages its weights, clips and prunes them after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.edits = 0

    @torch.no_grad()
    def edit(self) -> None:
        """What is done to the weights after a step."""
        self.edits += 1
        self.model.up.weight.clamp_(-0.2, 0.2)
        self.model.down.weight[:, 3] = 0
        self.average.update_parameters(self.model)

    def bare(self, steps: int = STEPS, clip: float | None = None) -> "EditingRun":
        for number in range(steps):
            self.optimizer.zero_grad()
            self.forward_backward((number, self.loader.batch(number)))
            self.optimizer.step()
            self.scheduler.step()
            self.edit()
        return self

    def edited(self, guard: Guard, steps: int = STEPS) -> None:
        """Train under a guard that edits."""
        for number in range(guard.steps_done, steps):
            batch = number, self.loader.batch(number)
            guard.step(self.forward_backward, batch, after=self.edit)

    def snapshots(self, run_dir: Path, **options: Any) -> Snapshots:
        return Snapshots(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            extra=self.average,
            run_dir=run_dir,
            **options,
        )

    def digest(self) -> str:
        return state_digest([super().digest(), self.average.state_dict()])


def test_edits_belong_to_the_step_and_tear_no_snapshot(run_dir: Path) -> None:
    right = EditingRun().bare().digest()
    assert right != state_digest([Run().bare().digest(), EditingRun().bare().average.state_dict()])
    run = EditingRun()
    with Guard(run.model, run.optimizer, snapshots=run.snapshots(run_dir), audit=1.0) as guard:
        run.edited(guard)
        assert run.edits == STEPS
        assert guard.snapshots is not None
        assert guard.snapshots.wait_committed() == STEPS
    assert run.digest() == right
    assert events_of("snapshot_torn") == []


def test_edits_after_the_step_tear_every_snapshot(run_dir: Path) -> None:
    run = EditingRun()
    with Guard(run.model, run.optimizer, snapshots=run.snapshots(run_dir)) as guard:
        for number in range(4):
            guard.step(run.forward_backward, (number, run.loader.batch(number)))
            run.edit()
        assert guard.snapshots is not None
        assert guard.snapshots.wait_committed() is None
    assert events_of("snapshot_torn")


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("every", [1, 3])
def test_edits_are_done_again_with_the_steps_that_a_roll_back_repeats(
    run_dir: Path, every: int
) -> None:
    right, run = EditingRun().bare().digest(), EditingRun().inject(replace(WEIGHT_FAULT, step=14))
    assert STRUCK < 14 < STEPS
    with (
        protect(run.model),
        Guard(
            run.model,
            run.optimizer,
            snapshots=run.snapshots(run_dir, every=every),
            at_rest=0.0,  # whether it comes first depends on the time it takes
        ) as guard,
    ):
        run.edited(guard)
    (event,) = events_of("rollback")
    assert run.edits == STEPS + 14 - event.detail["to_step"]
    assert run.digest() == right

"""Learning rates that a loop writes by hand, when steps are rolled back and done again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import Run, events_of
from split_cases import SplitRun

from holdfast import Snapshots
from holdfast.guard import Guard
from holdfast.step.settings import GroupSettings

STEPS, LOST = 9, 5  # LOST: the step before whose pass a weight becomes NaN


def rate(step: int) -> float:
    return 1e-2 / (1 + step)


def lose_weight(run: Run, snapshots: Snapshots, step: int) -> None:
    """Damage a weight before one of the steps, once the latest snapshot has read it."""
    if step == LOST:
        snapshots.finish()
        run.model.up.weight.data[1, 2] = float("nan")


class Rates(Run):
    """A run without a schedule, whose learning rate is set before each step."""

    def set_rate(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step)

    def bare(self, steps: int = STEPS, clip: float | None = None) -> "Rates":
        for number in range(steps):
            self.set_rate(number)
            self.optimizer.zero_grad()
            self.forward_backward((number, self.loader.batch(number)))
            self.optimizer.step()
        return self


@pytest.mark.parametrize("every", [1, 3])
def test_a_rate_set_before_the_step_is_set_again_when_the_step_is_done_again(
    run_dir: Path, every: int
) -> None:
    right, run = Rates().bare().digest(), Rates()
    snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir, every=every)
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=0.0) as guard:
        for number in range(STEPS):
            lose_weight(run, snapshots, number)
            run.set_rate(number)
            guard.step(run.forward_backward, (number, run.loader.batch(number)))
    (event,) = events_of("rollback")
    assert event.detail["to_step"] == LOST - LOST % every
    assert run.digest() == right
    assert run.digest() != Rates().bare(STEPS - 1).digest()


def test_it_is_set_again_where_the_loop_applies_its_optimizer(run_dir: Path) -> None:
    def train(run: SplitRun, guard: Guard | None, snapshots: Any = None) -> str:
        for number in range(STEPS):
            if guard is not None:
                lose_weight(run, snapshots, number)
            for group in run.optimizer.param_groups:
                group["lr"] = rate(number)
            for part, inputs in enumerate(run.loader.batch(number).chunk(3)):
                batch = (number, part, inputs)
                if guard is None:
                    run.part(batch)
                else:
                    guard.micro_step(run.part, batch, last=part == 2)
            apply(run)
            if guard is not None:
                guard.after_optimizer_step()
        return run.digest()

    def apply(run: SplitRun) -> None:
        run.optimizer.step()
        run.optimizer.zero_grad()

    right, run = train(SplitRun(), None), SplitRun()
    snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir, every=2)
    options: dict[str, Any] = {"apply_again": lambda: apply(run), "at_rest": 0.0}
    with Guard(run.model, run.optimizer, snapshots=snapshots, **options) as guard:
        assert train(run, guard, snapshots) == right
    (event,) = events_of("rollback")
    assert event.detail["to_step"] == LOST - 1


def test_only_what_the_loop_changed_is_repeated() -> None:
    """What the optimizer writes into its groups itself follows from the state rolled back to."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1), momentum=0.9)
    (group,) = optimizer.param_groups
    group["distance"] = 1.0
    settings = GroupSettings(optimizer)
    assert settings.edits() == [{}]
    group["distance"] = 2.0  # by the optimizer
    settings.settle()
    group["lr"].fill_(0.2)
    group["momentum"] = 0.8
    edits = settings.edits()
    assert sorted(edits[0]) == ["lr", "momentum"]
    group["lr"].fill_(0.3)
    group["momentum"], group["distance"] = 0.7, 1.0
    held = group["lr"]
    settings.repeat(edits)
    assert group["lr"] is held
    assert (float(held), group["momentum"], group["distance"]) == (float(torch.tensor(0.2)), 0.8, 1)

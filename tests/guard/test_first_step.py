"""The first step of a run is repeated, which shows whether the program's steps can be repeated."""

import warnings
from pathlib import Path

import pytest
import torch
from guard_cases import STEPS, Run, events_of, interruption, kinds, snapshots_of
from torch import nn

from holdfast.errors import UncorrectableFault
from holdfast.guard import Guard
from holdfast.inject import Fault

# Too small for any detector, and outside of the products.
LOW_FLIP = Fault(0, 0, "bitflip", site="module", op="norm", bit=2)


def test_it_is_repeated_once_and_not_after_a_restart(run_dir: Path) -> None:
    first, second = Run(), Run()
    first.damage = interruption(lambda number: number == 7)
    with pytest.raises(KeyboardInterrupt):
        first.guarded(snapshots=snapshots_of(first, run_dir))
    second.guarded(snapshots=snapshots_of(second, run_dir))
    assert first.computed == [0, *range(8)]
    assert second.computed == list(range(second.computed[0], STEPS))
    assert second.computed[0] > 0
    assert second.digest() == Run().bare().digest()
    assert kinds() == ["restored"]


def test_without_snapshots_nothing_shows_that_a_run_begins() -> None:
    run = Run()
    run.guarded(4)
    assert run.computed == list(range(4))


def test_a_small_fault_in_the_first_step_is_repaired(run_dir: Path) -> None:
    right = Run().bare().digest()
    assert Run().inject(LOW_FLIP).bare().digest() != right
    run = Run().inject(LOW_FLIP)
    run.guarded(snapshots=snapshots_of(run, run_dir))
    assert run.digest() == right
    (event,) = events_of("rerun")
    assert (event.detector, event.detail["verdict"], event.step) == ("first step", "transient", 0)


@pytest.mark.parametrize("split", [False, True])
def test_a_step_that_does_not_repeat_is_said_once_with_the_remedy(
    run_dir: Path, split: bool
) -> None:
    run, own = Run(), torch.Generator().manual_seed(1)

    def noisy(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        return run.forward_backward((number, inputs + torch.randn(6, 8, generator=own)))

    snapshots = snapshots_of(run, run_dir)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
            for batch in guard.batches(run.loader, steps=5):
                if split:
                    guard.micro_step(noisy, batch, last=True)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    guard.after_optimizer_step()
                else:
                    guard.step(noisy, batch)
    assert run.computed == [0, 0, 0, *range(5)]
    (event,) = events_of("step_not_repeatable")
    assert "check_determinism" in event.detail["remedy"]
    (warning,) = [str(each.message) for each in said if "other bits" in str(each.message)]
    assert "check_determinism" in warning
    assert not events_of("rerun")


def test_a_registered_generator_repeats(run_dir: Path) -> None:
    run, own = Run(), torch.Generator().manual_seed(1)

    def noisy(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        return run.forward_backward((number, inputs + torch.randn(6, 8, generator=own)))

    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots, generators=[own]) as guard:
        for batch in guard.batches(run.loader, steps=3):
            guard.step(noisy, batch)
    assert run.computed == [0, 0, 1, 2]
    assert kinds() == []


def test_a_nan_in_the_last_of_runs_that_do_not_repeat_is_not_applied(run_dir: Path) -> None:
    run, own, begun = Run(), torch.Generator().manual_seed(1), []

    def noisy(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        loss = run.forward_backward((number, inputs + torch.randn(6, 8, generator=own)))
        begun.append(number)
        if len(begun) == 4:
            run.model.up.weight.grad[0, 0] = torch.nan
        return loss

    with Guard(run.model, run.optimizer, snapshots=snapshots_of(run, run_dir)) as guard:
        guard.step(noisy, next(run.loader))
        guard.snapshots.finish()  # type: ignore[union-attr]
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())


def test_an_audited_first_step_that_does_not_repeat_is_not_applied(run_dir: Path) -> None:
    run, own = Run(), torch.Generator().manual_seed(1)

    def noisy(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        return run.forward_backward((number, inputs + torch.randn(6, 8, generator=own)))

    snapshots = snapshots_of(run, run_dir)
    with (
        pytest.raises(UncorrectableFault, match="gave no confirmed result"),
        Guard(run.model, run.optimizer, snapshots=snapshots, audit=1.0) as guard,
    ):
        guard.step(noisy, next(run.loader))


class Counting(nn.Module):
    """Scales its output from its sixth pass on, by a number and a buffer made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        with torch.inference_mode():
            self.register_buffer("factor", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x * (0.5 if self.passes > 5 else 1.0) * float(self.factor)


def test_a_counter_of_a_module_counts_the_repeated_pass_once(run_dir: Path) -> None:
    digests = []
    for bare in (True, False):
        run = Run()
        run.model.norm = nn.Sequential(run.model.norm, Counting())
        if bare:
            run.bare()
        else:
            run.guarded(snapshots=snapshots_of(run, run_dir))
        digests.append((run.digest(), run.model.norm[1].passes))
    assert digests[0] == digests[1]
    assert kinds() == []

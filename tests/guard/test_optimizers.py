"""Several optimizers and schedules as one; what cannot be guarded is refused before it begins."""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import STEPS, STRUCK, WEIGHT_FAULT, Run, events_of
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import holdfast
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.optimizers import Optimizers, Schedulers
from holdfast.protection import protect


class SeveralRun(Run):
    """Muon for the matrices, AdamW and SGD for the rest, and a schedule for two of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        matrices = [self.model.up.weight, self.model.down.weight]
        norms = [*self.model.norm.parameters(), *self.model.batch_norm.parameters()]
        biases = [self.model.up.bias, self.model.down.bias]
        self.each = (
            torch.optim.Muon(matrices, lr=1e-2),
            torch.optim.AdamW([{"params": norms[:2]}, {"params": norms[2:], "lr": 1e-3}], lr=1e-2),
            torch.optim.SGD(biases, lr=1e-2, momentum=0.9),
        )
        self.schedules = (
            torch.optim.lr_scheduler.StepLR(self.each[0], 3),
            torch.optim.lr_scheduler.LinearLR(self.each[1]),
        )
        self.optimizer = Optimizers(*self.each)  # type: ignore[assignment]
        self.scheduler = Schedulers(*self.schedules)  # type: ignore[assignment]

    def bare(self, steps: int = STEPS, clip: float | None = None) -> "SeveralRun":
        for batch in islice(self.loader, steps):
            for each in self.each:
                each.zero_grad()
            self.forward_backward(batch)
            for each in (*self.each, *self.schedules):
                each.step()
        return self

    def digest(self) -> str:
        parts = [self.model, *self.each, *self.schedules]
        return state_digest([part.state_dict() for part in parts])


def snapshots_of(run: SeveralRun, run_dir: Path) -> holdfast.Snapshots:
    return holdfast.Snapshots(
        run.model, run.optimizer, scheduler=run.scheduler, loader=run.loader, run_dir=run_dir
    )


def test_several_optimizers_and_schedules_are_those_of_the_bare_loop(run_dir: Path) -> None:
    right = SeveralRun().bare().digest()
    assert right != SeveralRun().bare(STEPS - 1).digest()
    run = SeveralRun()
    run.guarded(audit=0.5, snapshots=snapshots_of(run, run_dir))
    assert run.digest() == right


@pytest.mark.processes
@pytest.mark.representative
def test_they_are_rolled_back_and_restored(run_dir: Path) -> None:
    right = SeveralRun().bare().digest()
    first = SeveralRun().inject(WEIGHT_FAULT)
    with protect(first.model):
        first.guarded(STRUCK + 2, snapshots=snapshots_of(first, run_dir / "a"))
        assert events_of("rollback")
        assert first.digest() == SeveralRun().bare(STRUCK + 2).digest()
    second = SeveralRun()
    snapshots = snapshots_of(second, run_dir)
    guard = Guard(second.model, second.optimizer, snapshots=snapshots)
    guard.__enter__()
    for batch in guard.batches(second.loader, steps=7):
        guard.step(second.forward_backward, batch)
    snapshots.wait_committed()
    guard.__exit__(KeyboardInterrupt, None, None)
    third = SeveralRun()
    assert third.digest() != right
    third.guarded(snapshots=snapshots_of(third, run_dir))
    assert third.computed == list(range(7, STEPS))
    assert third.digest() == right


def test_the_states_of_several_optimizers_are_theirs_whoever_holds_them() -> None:
    one, other = SeveralRun().bare(4), SeveralRun()
    assert one.digest() != other.digest()
    state = one.optimizer.state_dict()
    held = [p for group in one.optimizer.param_groups for p in group["params"]]
    assert set(state["state"]) == set(range(len(held)))
    assert len(one.optimizer.state) == len(held)
    other.optimizer.load_state_dict(state)
    for ours, theirs in zip(one.each, other.each, strict=True):
        assert state_digest([ours.state_dict()]) == state_digest([theirs.state_dict()])
    with pytest.raises(ValueError, match="has 3 groups, and the optimizers 4"):
        other.optimizer.load_state_dict(state | {"param_groups": state["param_groups"][:-1]})


def test_a_list_of_optimizers_is_taken_as_one() -> None:
    right, run = SeveralRun().bare(4).digest(), SeveralRun()
    guard = Guard(run.model, list(run.each), scheduler=run.scheduler)
    for batch in guard.batches(run.loader, steps=4):
        guard.step(run.forward_backward, batch)
    assert run.digest() == right


def test_optimizers_that_cannot_be_one_are_refused() -> None:
    model = nn.Linear(2, 2)
    one, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    with pytest.raises(ConfigError, match="2 parameters are in two of the optimizers"):
        Optimizers(one, other)
    with pytest.raises(ConfigError, match=re.escape("Optimizers(nothing)")):
        Optimizers()
    with pytest.raises(ConfigError, match="Linear"):
        Optimizers(model)  # type: ignore[arg-type]


def lbfgs(model: nn.Module) -> dict[str, Any]:
    return {"optimizer": torch.optim.LBFGS(model.parameters())}


def plateau(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    }


def among_several(model: nn.Module) -> dict[str, Any]:
    chosen = plateau(model)
    steady = torch.optim.lr_scheduler.StepLR(chosen["optimizer"], 1)
    return chosen | {"scheduler": Schedulers(steady, chosen["scheduler"])}


def listed_schedules(model: nn.Module) -> dict[str, Any]:
    chosen = plateau(model)
    return chosen | {"scheduler": [chosen["scheduler"]]}


def parallel(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": nn.DataParallel(model), "optimizer": optimizer}


def in_backward(model: nn.Module) -> dict[str, Any]:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lbfgs, r"LBFGS\.step needs closure.*AdamW"),
        (plateau, r"ReduceLROnPlateau\.step needs metrics.*after=.*Snapshots\(extra="),
        (among_several, r"ReduceLROnPlateau\.step needs metrics"),
        (listed_schedules, r"1 schedulers in a list: give holdfast\.Schedulers\("),
        (parallel, "DataParallel.*DistributedDataParallel"),
        (in_backward, "within the backward pass"),
    ],
)
def test_what_cannot_be_guarded_is_refused_at_construction(
    made: Callable[[nn.Module], dict[str, Any]], said: str
) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.tolist()
    with pytest.raises(ConfigError, match=said):
        Guard(**({"model": model} | made(model)))
    assert model.weight.tolist() == before


@pytest.mark.parametrize("split", [False, True])
def test_an_optimizer_that_hooks_of_the_backward_pass_apply_is_refused(split: bool) -> None:
    run = Run()
    before = run.digest()
    parameter = run.model.up.weight
    own = torch.optim.SGD([parameter], 0.1)
    parameter.register_post_accumulate_grad_hook(lambda _: own.step())
    with Guard(run.model, run.optimizer) as guard:
        run_one = partial(guard.micro_step, last=True) if split else guard.step
        with pytest.raises(ConfigError, match=r"SGD\.step was called within a pass"):
            run_one(run.forward_backward, (0, run.loader.batch(0)))
    run.model.batch_norm.reset_running_stats()
    assert run.digest() == before
    run.forward_backward((0, run.loader.batch(0)))  # outside of a Guard it is no business of ours
    assert run.digest() != before


def test_an_inner_optimizer_of_other_parameters_may_step_within_a_pass() -> None:
    run = Run()

    def forward_backward(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        noise = torch.zeros_like(batch[1], requires_grad=True)
        inner = torch.optim.SGD([noise], 0.1)
        noise.square().sum().backward()
        inner.step()
        return run.forward_backward((batch[0], batch[1] + noise.detach()))

    guard = Guard(run.model, run.optimizer, scheduler=run.scheduler, audit=1.0)
    for number in range(3):
        guard.step(forward_backward, (number, run.loader.batch(number)))
    assert run.digest() == Run().bare(3).digest()


def test_a_metrics_schedule_is_stepped_after_the_step(run_dir: Path) -> None:
    run = Run()
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0)
    snapshots = holdfast.Snapshots(run.model, run.optimizer, extra=schedule, run_dir=run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for number in range(5):
            metric = float(number)
            guard.step(
                run.forward_backward,
                (number, run.loader.batch(number)),
                after=lambda metric=metric: schedule.step(metric),
            )
    assert math.isclose(run.optimizer.param_groups[0]["lr"], 1e-2 * 0.1**4)

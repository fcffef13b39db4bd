"""Scaled losses: torch's recipe with its skipped steps; faults that look like overflows."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import Run, events_of, kinds
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from holdfast import Snapshots
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.step import scaling
from holdfast.step.watch import PassWatch

STEPS = 14
OVERFLOWS = {n: 1e18 * torch.ones(6, 8).cumsum(1) for n in (0, 5, 6)}  # finite, unless scaled


class ScaledRun(Run):
    """A run in mixed precision, whose scale overflows in some batches."""

    def __init__(self, special: dict[int, torch.Tensor] = OVERFLOWS, **scaler: Any) -> None:
        super().__init__(without=["norm", "batch_norm"], special=special)
        self.scaler = GradScaler("cpu", **({"growth_interval": 3} | scaler))
        self.scales: list[float] = []

    def forward_backward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, inputs = batch
        self.computed.append(number)
        loss = self.model(inputs).square().mean() + 0.1
        self.scaler.scale(loss).backward()
        self.damage(number)
        return loss

    def recipe(self, clip: float | None) -> None:
        """The part of torch's recipe that follows the backward pass."""
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def bare(self, steps: int = STEPS, clip: float | None = None) -> "ScaledRun":
        for number in range(steps):
            self.optimizer.zero_grad()
            self.forward_backward((number, self.loader.batch(number)))
            self.recipe(clip)
            self.scales.append(self.scaler.get_scale())
        return self

    def guarded(self, steps: int = STEPS, clip: float | None = None, **options: Any) -> Guard:
        if "snapshots" not in options:
            options |= {"scheduler": self.scheduler, "scaler": self.scaler}
        with Guard(self.model, self.optimizer, clip_grad_norm=clip, **options) as guard:
            for number in range(guard.steps_done, steps):
                guard.step(self.forward_backward, (number, self.loader.batch(number)))
                self.scales.append(self.scaler.get_scale())
        return guard

    def snapshots(self, run_dir: Path, **options: Any) -> Snapshots:
        return Snapshots(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=self.scaler,
            run_dir=run_dir,
            **options,
        )

    def digest(self) -> str:
        return state_digest([super().digest(), self.scaler.state_dict(), self.scales])


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_steps_are_applied_and_skipped_as_in_torchs_recipe(
    clip: float | None, audit: float, run_dir: Path
) -> None:
    bare, run = ScaledRun().bare(clip=clip), ScaledRun()
    skipped = [n for n in range(1, STEPS) if bare.scales[n] < bare.scales[n - 1]]
    assert skipped == [5, 6]
    assert bare.scales[0] == 2.0**15
    assert max(bare.scales) > 2.0**15  # it grows as well
    held = {"snapshots": run.snapshots(run_dir)} if clip and audit else {}
    guard = run.guarded(clip=clip, audit=audit, **held)
    assert run.digest() == bare.digest()
    assert kinds() == ["rerun"] * 3
    assert {event.detail["verdict"] for event in events_of("rerun")} == {"genuine"}
    assert guard.grad_norm < 10  # without the scale


def test_each_of_several_optimizers_is_skipped_for_its_own_gradients() -> None:
    def train(guarded: bool) -> str:
        run = ScaledRun({})
        parts = list(run.model.up.parameters()), list(run.model.down.parameters())
        each = torch.optim.SGD(parts[0], 0.1), torch.optim.AdamW(parts[1], 0.01)
        run.damage = lambda n: run.model.up.weight.grad.fill_(math.inf) if n == 3 else None
        guard = Guard(run.model, each, scaler=run.scaler, clip_grad_norm=0.5)
        for number in range(6):
            batch = number, run.loader.batch(number)
            if guarded:
                guard.step(run.forward_backward, batch)
                continue
            run.model.zero_grad()
            run.forward_backward(batch)
            for optimizer in each:
                run.scaler.unscale_(optimizer)
            clip_grad_norm_(run.model.parameters(), 0.5)
            for optimizer in each:
                run.scaler.step(optimizer)
            run.scaler.update()
        return state_digest([run.digest(), *(optimizer.state_dict() for optimizer in each)])

    assert train(guarded=True) == train(guarded=False)


def test_micro_steps_are_skipped_alike() -> None:
    def train(guarded: bool) -> tuple[str, list[str]]:
        run = ScaledRun()
        guard = Guard(run.model, run.optimizer, scaler=run.scaler)
        for number in range(STEPS):
            for part, inputs in enumerate(run.loader.batch(number).chunk(2)):
                if guarded:
                    guard.micro_step(run.forward_backward, (number, inputs), last=part == 1)
                else:
                    run.forward_backward((number, inputs))
            run.recipe(0.05)
            run.optimizer.zero_grad()
            run.scales.append(run.scaler.get_scale())
            if guarded:
                guard.after_optimizer_step()
        return run.digest(), kinds()

    (bare, silent), (guarded, said) = train(False), train(True)
    assert guarded == bare
    assert (silent, said) == ([], ["rerun"] * 3)


def struck_once(run: Run, at: int) -> Callable[[int], None]:
    """An INF in a gradient, in the first pass of a batch only."""
    return lambda number: (
        run.model.up.weight.grad[0].fill_(math.inf)
        if number == at and run.computed.count(at) == 1
        else None
    )


def test_an_inf_that_does_not_repeat_is_a_fault_and_repaired() -> None:
    right, bare = ScaledRun().bare().digest(), ScaledRun()
    bare.damage = struck_once(bare, 9)
    assert bare.bare().digest() != right
    assert bare.scales[9] < bare.scales[8]  # to the scaler it is an overflow
    run = ScaledRun()
    run.damage = struck_once(run, 9)
    run.guarded()
    assert run.digest() == right
    assert [event.detail["verdict"] for event in events_of("rerun") if event.step == 9] == [
        "transient"
    ]


@pytest.mark.processes
@pytest.mark.representative
def test_the_scale_is_rolled_back_and_restored(run_dir: Path) -> None:
    right, run = ScaledRun({}).bare().digest(), ScaledRun({})
    draw = iter(range(1, 100))

    def differs_until_rolled_back(number: int) -> None:
        if number == 11 and not events_of("rollback"):
            run.model.up.weight.grad[0, 0] = 1e12 * next(draw)

    run.damage = differs_until_rolled_back
    snapshots = run.snapshots(run_dir, every=3)
    guard = Guard(run.model, run.optimizer, snapshots=snapshots)
    guard.__enter__()
    for number in range(13):
        guard.step(run.forward_backward, (number, run.loader.batch(number)))
        run.scales.append(run.scaler.get_scale())
    snapshots.wait_committed()
    guard.__exit__(KeyboardInterrupt, None, None)
    (event,) = events_of("rollback")
    assert (event.step, event.detail["to_step"]) == (11, 9)
    again = ScaledRun({})
    again.scales = run.scales[:12]
    assert again.scaler.get_scale() != run.scales[11]
    again.guarded(snapshots=again.snapshots(run_dir, every=3))
    assert events_of("restored")[-1].detail["step"] == 12
    assert again.digest() == right


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("overflows", [(), (6, 8)])  # of their own, when they are done again
def test_a_weight_that_overflows_for_ever_is_rolled_back_after_some_skips(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, overflows: tuple[int, ...]
) -> None:
    monkeypatch.setattr(scaling, "MAX_SKIPS", 4)
    special = dict.fromkeys(overflows, OVERFLOWS[5])
    right, run = ScaledRun(special).bare().digest(), ScaledRun(special)
    snapshots = run.snapshots(run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for number in range(STEPS):
            if number == 6:
                snapshots.wait_committed()
                run.model.up.weight.data[0, 0] = math.inf
            guard.step(run.forward_backward, (number, run.loader.batch(number)))
            if number in range(6, 10):  # the scaler skips them, and no snapshot begins
                assert snapshots.step == 6
    (event,) = events_of("rollback")
    assert (event.detail["from_step"], event.detail["to_step"]) == (10, 6)
    run.scales = ScaledRun(special).bare().scales
    assert run.digest() == right


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_loss_scaled_by_an_unknown_scaler_is_refused_before_any_weight_moves(
    split: bool, known: bool
) -> None:
    run = ScaledRun()
    before = run.digest()
    what = "another one than" if known else "the Guard has no"
    with Guard(run.model, run.optimizer, scaler=GradScaler("cpu") if known else None) as guard:
        run_one = partial(guard.micro_step, last=True) if split else guard.step
        match = f"scaled by a GradScaler, .*{what} scaler=.*unscaled"
        with pytest.raises(ConfigError, match=match):
            run_one(run.forward_backward, (1, run.loader.batch(1)))
    assert run.digest() == before
    run.guarded(3)
    assert run.digest() != before


def test_a_scaler_of_a_class_defined_later_is_noticed() -> None:
    run = ScaledRun({})
    guard = Guard(run.model, run.optimizer)

    class Own(GradScaler):
        def scale(self, outputs: Any) -> Any:
            return 65_536.0 * outputs

    run.scaler = Own("cpu")
    before = run.digest()
    with pytest.raises(ConfigError, match="scaled by a Own, and the Guard has no"):
        guard.step(run.forward_backward, (1, run.loader.batch(1)))
    assert run.digest() == before


def test_unwatched_a_scaled_loss_trains_with_gradients_that_nobody_unscales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PassWatch, "watching", lambda watch: nullcontext())
    run = ScaledRun({})
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-2)
    Guard(run.model, run.optimizer).step(run.forward_backward, (1, run.loader.batch(1)))
    assert max(float(p.detach().abs().max()) for p in run.model.parameters()) > 10


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    plain = Run(without=["norm", "batch_norm"]).bare(6).digest()
    for options in ({}, {"scaler": GradScaler("cpu", enabled=False)}):
        run = ScaledRun({}, enabled=False)
        guard = Guard(run.model, run.optimizer, scheduler=run.scheduler, **options)
        for number in range(6):
            guard.step(run.forward_backward, (number, run.loader.batch(number)))
        assert Run.digest(run) == plain
    assert kinds() == []


def test_a_scaler_that_would_not_be_saved_is_refused(run_dir: Path) -> None:
    run = ScaledRun()
    with (
        Snapshots(run.model, run.optimizer, run_dir=run_dir) as snapshots,
        pytest.raises(ConfigError, match=r"GradScaler is not the one .*Snapshots\(scaler="),
    ):
        Guard(run.model, run.optimizer, snapshots=snapshots, scaler=run.scaler)

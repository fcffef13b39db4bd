"""A guard that only the optimizer's hooks call: it saves, restores and refuses, and says so."""

import copy
import io
import logging
import math
from pathlib import Path

import pytest
import torch
from guard_cases import STEPS, Run, events_of, kinds
from torch.utils.data import DataLoader

from holdfast import Snapshots
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard
from holdfast.optimizers import Optimizers


def train(run: Run, guard: Guard, loader: object, steps: int = STEPS) -> None:
    """A loop that knows nothing of its guard but where its batches come from."""
    for batch in guard.batches(loader, steps=steps):
        run.optimizer.zero_grad()
        run.forward_backward(batch)
        run.optimizer.step()
        run.scheduler.step()


def snapshots_of(run: Run, run_dir: Path, **options: object) -> Snapshots:
    return Snapshots(run.model, run.optimizer, scheduler=run.scheduler, run_dir=run_dir, **options)


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("stateful", [True, False])
def test_an_attached_loop_goes_on_from_its_newest_snapshot(run_dir: Path, stateful: bool) -> None:
    right = Run().bare().digest()
    first = Run()
    loader = first.loader if stateful else [(n, first.loader.batch(n)) for n in range(STEPS)]
    held = {"loader": first.loader} if stateful else {}
    snapshots = snapshots_of(first, run_dir, **held)
    guard = Guard.attach(first.model, first.optimizer, snapshots=snapshots)
    guard.__enter__()
    train(first, guard, loader, steps=9)
    assert guard.steps_done == 9
    assert snapshots.wait_committed() == 9
    guard.__exit__(KeyboardInterrupt, None, None)
    second = Run()
    assert second.digest() != right
    held = {"loader": second.loader} if stateful else {}
    with Guard.attach(
        second.model, second.optimizer, snapshots=snapshots_of(second, run_dir, **held)
    ) as guard:
        train(second, guard, second.loader if stateful else loader)
    assert second.computed == list(range(9, STEPS))
    assert second.digest() == right
    assert events_of("snapshot_torn") == []


def test_without_batches_a_snapshot_begins_with_the_next_pass_in_training(run_dir: Path) -> None:
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    with Guard.attach(run.model, run.optimizer, snapshots=snapshots) as guard:
        for number in range(4):
            run.optimizer.zero_grad()
            run.forward_backward((number, run.loader.batch(number)))
            assert snapshots.step == number
            run.optimizer.step()
            run.scheduler.step()
            with torch.no_grad():
                run.model(run.loader.batch(0))
            assert snapshots.step == number
        guard.begin_snapshot()
        assert snapshots.wait_committed() == 4


@pytest.mark.parametrize("several", [False, True])
def test_a_gradient_that_is_not_finite_is_refused_before_it_is_applied(several: bool) -> None:
    def damaged(attached: bool) -> Run:
        run = Run()
        run.damage = lambda n: run.model.up.weight.grad[0].fill_(math.nan) if n == 3 else None
        if several:
            run.optimizer = Optimizers(run.optimizer)  # type: ignore[assignment]
        if not attached:
            return run.bare(6)
        with (
            Guard.attach(run.model, run.optimizer) as guard,
            pytest.raises(UncorrectableFault, match="step 3: a gradient is not finite, and an att"),
        ):
            train(run, guard, run.loader)
        return run

    assert not damaged(attached=False).model.up.weight.isfinite().all()
    run, clean = damaged(attached=True), Run().bare(3)
    assert [p.tolist() for p in run.model.parameters()] == [
        p.tolist() for p in clean.model.parameters()
    ]
    run.optimizer.step()  # its guard has ended
    assert not run.model.up.weight.isfinite().all()


def test_it_says_that_it_repeats_nothing(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.INFO, "holdfast.guard"):
        guard = Guard.attach(run.model, run.optimizer)
        with guard:
            for call in (
                lambda: guard.step(run.forward_backward, None),
                lambda: guard.micro_step(run.forward_backward, None, last=True),
            ):
                with pytest.raises(ConfigError, match="watches a loop that it cannot repeat"):
                    call()
    assert "repeats no step" in caplog.text
    assert kinds() == ["guard_attached"]


def test_overflows_are_left_to_a_scaler(run_dir: Path) -> None:
    def overflowing(attached: bool) -> tuple[str, int]:
        run = Run(without=["norm", "batch_norm"], special={2: 1e18 * torch.ones(6, 8)})
        scaler = torch.amp.GradScaler("cpu")
        guard = Guard.attach(run.model, run.optimizer)
        with guard if attached else Run.inject(run).injector.step(0):
            for number in range(6):
                run.optimizer.zero_grad()
                loss = run.model(run.loader.batch(number)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(run.optimizer)
                scaler.update()
        assert scaler.get_scale() == 2.0**15
        return run.digest(), guard.steps_done

    assert overflowing(attached=True)[0] == overflowing(attached=False)[0]
    assert overflowing(attached=True)[1] == 5  # skipped steps call no hook


def test_an_attached_model_is_copied_and_pickled_without_its_guard() -> None:
    run = Run()
    with Guard.attach(run.model, run.optimizer):
        stored = io.BytesIO()
        torch.save(run.model, stored)
        stored.seek(0)
        copies = [copy.deepcopy(run.model), torch.load(stored, weights_only=False)]
    for each in copies:
        run.model.eval()
        each.eval()
        x = run.loader.batch(0)
        assert torch.equal(each(x), run.model(x))


def test_a_loader_is_read_in_its_order_through_an_attached_guard() -> None:
    run = Run()
    loader = DataLoader([(n, run.loader.batch(n)) for n in range(4)], batch_size=None)
    with Guard.attach(run.model, run.optimizer) as guard:
        train(run, guard, loader, steps=6)
    assert run.computed == [0, 1, 2, 3, 0, 1]

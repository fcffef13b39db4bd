"""A guard that does not own the step: judged before the optimizer, repeated from the first part."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import Run, events_of, kinds, snapshots_of
from split_cases import PARTS, SPLIT_STEPS, SPLIT_STRUCK, SplitRun
from torch.utils.checkpoint import checkpoint

from holdfast import events
from holdfast.errors import ConfigError, UncorrectableFault
from holdfast.guard import Guard
from holdfast.protection import protect


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_a_healthy_run_is_the_bare_loop_bit_for_bit(
    audit: float, to_none: bool, run_dir: Path
) -> None:
    bare, run = SplitRun(to_none=to_none).split(), SplitRun(to_none=to_none)
    held = {"snapshots": snapshots_of(run, run_dir)} if audit and to_none else {}
    with protect(run.model):
        guard = run.guarded_split(audit=audit, apply_again=run.apply, **held)
    assert run.all_digest() == bare.all_digest() != SplitRun(dropout=0.1).split().all_digest()
    assert guard.steps_done == SPLIT_STEPS
    assert guard.replaced == (audit == 1.0)
    assert kinds() == []
    assert len(run.parts) == SPLIT_STEPS * PARTS * (1 + int(audit))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("factor", "audit"), [(1.01, 1.0), (math.inf, 0.0)])
def test_a_fault_in_any_micro_step_is_repaired_bit_for_bit(
    part: int, factor: float, audit: float
) -> None:
    right, strike = SplitRun().split().all_digest(), (SPLIT_STRUCK, part, factor)
    assert SplitRun(strike).split().all_digest() != right
    events.clear()
    run = SplitRun(strike)
    run.guarded_split(audit=audit)
    assert run.strike is None
    assert run.all_digest() == right
    (event,) = events_of("rerun")
    assert (event.step, event.rung, event.detail["verdict"]) == (
        SPLIT_STRUCK,
        "recompute",
        "transient",
    )
    struck = [part for step, part in run.parts if step == SPLIT_STRUCK]
    assert struck == [*range(PARTS)] * 3


def test_without_an_audit_a_small_fault_gets_through() -> None:
    run = SplitRun((SPLIT_STRUCK, 1, 1.01))
    run.guarded_split()
    assert run.strike is None
    assert run.all_digest() != SplitRun().split().all_digest()
    assert kinds() == []


def test_losses_are_of_the_run_that_counts() -> None:
    run = SplitRun((SPLIT_STRUCK, 0, math.inf))
    with Guard(run.model, run.optimizer) as guard:
        parts = run.loader.batch(0).chunk(PARTS)
        told = [guard.micro_step(run.part, (0, n, x), last=n == 2) for n, x in enumerate(parts)]
        assert [*map(float, guard.losses)] == [*map(float, told)]
        assert not guard.replaced
        run.apply()
        guard.after_optimizer_step()
        struck = [(SPLIT_STRUCK, number, inputs) for number, inputs in enumerate(parts)]
        told = [guard.micro_step(run.part, each, last=each[1] == 2) for each in struck]
        assert guard.replaced
        assert not math.isfinite(float(told[0]))
        assert all(math.isfinite(float(loss)) for loss in guard.losses)
        assert float(told[-1]) == float(guard.losses[-1])
        run.apply()
        guard.after_optimizer_step()


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("again", [True, False])
def test_a_damaged_weight_is_rolled_back_and_applied_again(run_dir: Path, again: bool) -> None:
    run = SplitRun()
    options = {"apply_again": run.apply} if again else {}
    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots, **options) as guard:
        for step in range(SPLIT_STRUCK):
            run.split(guard, step + 1)
        snapshots.wait_committed()
        snapshots.begin = lambda step: None  # type: ignore[method-assign]
        run.split(guard, SPLIT_STRUCK + 1)  # not saved, so that it is done again
        del snapshots.begin
        run.model.up.weight.data[1, 1] = math.nan
        if again:
            run.split(guard)
        else:
            with pytest.raises(UncorrectableFault, match="without apply_again"):
                run.split(guard)
            return
    (event,) = events_of("rollback")
    assert event.detail["to_step"] == SPLIT_STRUCK
    assert event.detail["from_step"] == SPLIT_STRUCK + 1
    assert run.digest() == SplitRun().split().digest()


def test_a_micro_step_that_raises_begins_the_step_again() -> None:
    bare, run = SplitRun().split(steps=2), SplitRun()

    def fails(batch: object) -> torch.Tensor:
        run.model.up.weight.grad.fill_(7)
        raise RuntimeError("out of memory")

    with Guard(run.model, run.optimizer) as guard:
        run.split(guard, 1)
        state = torch.get_rng_state()
        guard.micro_step(run.part, (1, 0, run.loader.batch(1)[:2]), last=False)
        with pytest.raises(RuntimeError, match="out of memory"):
            guard.micro_step(fails, None, last=False)
        with pytest.raises(ConfigError, match="gradients are not empty"):
            run.split(guard, 2)
        run.optimizer.zero_grad()
        torch.set_rng_state(state)
        run.model.batch_norm.load_state_dict(
            SplitRun().split(steps=1).model.batch_norm.state_dict()
        )
        torch.set_rng_state(state)
        run.split(guard, 2)
    assert run.digest() == bare.digest()


@pytest.mark.parametrize("held", [False, True])
def test_gradients_that_were_not_verified_are_refused(run_dir: Path, held: bool) -> None:
    run = SplitRun()
    before = run.digest()
    options = {"snapshots": snapshots_of(run, run_dir)} if held else {}
    with Guard(run.model, run.optimizer, **options) as guard:
        run.part((0, 0, run.loader.batch(0)))
        with pytest.raises(ConfigError, match="step 0 with gradients that were not verified"):
            run.optimizer.step()
        assert [p.grad is None for p in run.model.parameters()].count(False) > 0
        run.optimizer.zero_grad()
        guard.micro_step(run.part, (0, 0, run.loader.batch(0)), last=False)
        with pytest.raises(ConfigError, match="not verified"):
            run.optimizer.step()
        with pytest.raises(ConfigError, match="did not run the last micro-step"):
            guard.after_optimizer_step()
        guard.micro_step(run.part, (0, 1, run.loader.batch(0)), last=True)
        with pytest.raises(ConfigError, match=re.escape("call after_optimizer_step()")):
            guard.micro_step(run.part, (1, 0, run.loader.batch(1)), last=True)
        trained = [p.tolist() for p in run.model.parameters()]
        assert trained == [p.tolist() for p in Run().model.parameters()]
        run.apply()
    assert run.digest() != before
    run.part((1, 0, run.loader.batch(1)))
    run.optimizer.step()  # its guard has ended


def test_with_the_hook_off_unverified_gradients_get_through() -> None:
    run = SplitRun()
    with Guard(run.model, run.optimizer, optimizer_hook=False) as guard:
        run.part((0, 0, run.loader.batch(0)))
        run.optimizer.step()
        run.optimizer.zero_grad()
        with pytest.raises(ConfigError, match="not verified"):
            guard.before_optimizer_step()
    assert run.digest() != SplitRun().digest()


def test_left_over_gradients_are_refused_unless_the_pass_empties_them() -> None:
    def emptied_by_itself(audit: float, own: bool) -> str:
        run = SplitRun()

        def part(batch: tuple[int, int, torch.Tensor]) -> torch.Tensor:
            if batch[1] == 0:
                run.optimizer.zero_grad(set_to_none=False)
            return run.part(batch)

        with Guard(run.model, run.optimizer, audit=audit, own_zero_grad=own) as guard:
            for step in range(3):
                for number, inputs in enumerate(run.loader.batch(step).chunk(PARTS)):
                    guard.micro_step(part, (step, number, inputs), last=number == PARTS - 1)
                run.optimizer.step()
                guard.after_optimizer_step()
        return run.digest()

    assert emptied_by_itself(0.0, True) == emptied_by_itself(1.0, True)
    assert kinds() == []
    with pytest.raises(ConfigError, match="gradients are not empty at the first micro-step"):
        emptied_by_itself(0.0, False)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("strike", [None, (SPLIT_STRUCK, 2, 1.01)])
def test_checkpointed_activations_are_recomputed_alike(
    strike: tuple[int, int, float] | None, reentrant: bool
) -> None:
    def checkpointed(run: SplitRun) -> SplitRun:
        inner = run.model.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            needed: torch.Tensor = checkpoint(inner, x, use_reentrant=reentrant)
            return needed

        run.model.forward = forward  # type: ignore[method-assign]
        plain = run.part
        run.part = lambda b: plain((*b[:2], b[2].requires_grad_()))  # type: ignore[method-assign]
        return run

    bare = checkpointed(SplitRun(without=["batch_norm"])).split()
    run = checkpointed(SplitRun(strike, without=["batch_norm"]))
    run.guarded_split(audit=1.0)
    assert run.all_digest() == bare.all_digest()
    assert [event.step for event in events_of("rerun")] == ([SPLIT_STRUCK] if strike else [])


def test_a_step_of_the_guards_own_may_follow_and_forms_do_not_mix_within_one() -> None:
    run = SplitRun()
    with Guard(run.model, run.optimizer) as guard:
        run.split(guard, 2)
        guard.step(run.forward_backward, (2, run.loader.batch(2)))
        assert guard.steps_done == 3
        run.optimizer.zero_grad()
        run.split(guard, 4)
        whole = (4, run.loader.batch(4))
        guard.micro_step(run.part, (4, 0, whole[1]), last=False)
        with pytest.raises(ConfigError, match="begun with micro_step: end it with last=True"):
            guard.step(run.forward_backward, whole)
        guard.micro_step(run.part, (4, 1, whole[1]), last=True)
        with pytest.raises(ConfigError, match="call after_optimizer_step"):
            guard.step(run.forward_backward, whole)


class Unhookable:
    """An optimizer of its own kind, which has no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self._inner = inner.param_groups, inner

    def step(self) -> None:
        """Apply it."""
        torch.optim.SGD(self.param_groups[0]["params"], 0.1).step()


def test_an_optimizer_without_hooks_needs_its_loop_to_ask() -> None:
    run = SplitRun()
    optimizer: Any = Unhookable(run.optimizer)
    with (
        Guard(run.model, optimizer) as guard,
        pytest.raises(ConfigError, match="Unhookable has no register_step_pre_hook"),
    ):
        guard.micro_step(run.part, (0, 0, run.loader.batch(0)), last=True)
    before = run.digest()
    with Guard(run.model, optimizer, optimizer_hook=False) as guard:
        guard.micro_step(run.part, (0, 0, run.loader.batch(0)), last=True)
        guard.before_optimizer_step()
        optimizer.step()
        guard.after_optimizer_step()
    assert run.digest() != before


@pytest.mark.processes
@pytest.mark.representative
def test_a_split_run_goes_on_from_its_newest_snapshot(run_dir: Path) -> None:
    right, first = SplitRun().split().digest(), SplitRun()
    snapshots = snapshots_of(first, run_dir)
    guard = Guard(first.model, first.optimizer, snapshots=snapshots)
    guard.__enter__()
    first.split(guard, 5)
    snapshots.wait_committed()
    guard.__exit__(KeyboardInterrupt, None, None)
    second = SplitRun()
    assert second.digest() != right
    second.guarded_split(snapshots=snapshots_of(second, run_dir))
    assert second.parts[0] == (5, 0)
    assert second.digest() == right

"""The bare loop's bits on healthy hardware, whatever the guard does beside it."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import pytest
import torch
from guard_cases import STEPS, Run, kinds, snapshots_of
from torch import nn

from holdfast.guard import Guard
from holdfast.protection import protect


@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("audit", [0.0, 0.3, 1.0])
def test_a_healthy_run_is_the_bare_loop_bit_for_bit(
    clip: float | None, dropout: float, audit: float, run_dir: Path
) -> None:
    unclipped = Run(dropout=dropout).bare().digest()
    bare, guarded = Run(dropout=dropout).bare(clip=clip), Run(dropout=dropout)
    assert (bare.digest() == unclipped) == (clip != 0.05)
    before = guarded.digest()
    held = {"snapshots": snapshots_of(guarded, run_dir)} if clip and audit == 0.3 else {}
    with protect(guarded.model):
        guard = guarded.guarded(clip=clip, audit=audit, **held)
    assert guarded.digest() == bare.digest() != before
    assert guard.steps_done == STEPS
    assert kinds() == []
    repeated = len(guarded.computed) - STEPS
    assert repeated == (STEPS if audit == 1 else 0) or 0 < audit < 1
    assert 0 <= repeated <= STEPS


def test_gradients_accumulate_over_micro_batches() -> None:
    def accumulate(run: Run) -> Callable[[tuple[int, torch.Tensor]], torch.Tensor]:
        def forward_backward(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
            total = torch.zeros(())
            for part in batch[1].chunk(3):
                loss = run.model(part).square().mean() / 3
                loss.backward()
                total += loss.detach()
            return total

        return forward_backward

    bare = Run()
    for batch in islice(bare.loader, 6):
        bare.optimizer.zero_grad()
        accumulate(bare)(batch)
        bare.optimizer.step()
    run = Run()
    guard = Guard(run.model, run.optimizer, audit=1.0)
    for batch in guard.batches(run.loader, steps=6):
        guard.step(accumulate(run), batch)
    assert run.digest() == bare.digest()
    assert kinds() == []


@pytest.mark.parametrize("protected", [False, True])
def test_a_model_without_matmuls_is_guarded_all_the_same(protected: bool) -> None:
    model = nn.PReLU(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    with protect(model) if protected else nullcontext() as protection:
        Guard(model, optimizer, audit=1.0).step(forward_backward, -torch.ones(2, 3))
        if protection is not None:
            assert "0 of 0 matmul sites covered" in str(protection.report())
    assert model.weight.tolist() != [0.25] * 3


def test_a_schedule_of_a_lambda_is_stored(run_dir: Path) -> None:
    run = Run()
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 0.5**epoch)
    run.guarded(4, snapshots=snapshots_of(run, run_dir))
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 16)

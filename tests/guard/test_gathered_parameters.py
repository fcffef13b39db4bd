"""FSDP2 after an evaluation: its outermost module is left with gathered parameters."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.snapshot.client.snapshots import Snapshots

STEPS = 4


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


class Run:
    """A model divided by FSDP2, evaluated after every step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        loss.backward()
        return loss

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(3, 4))
        assert not any(hasattr(p, "device_mesh") for p in self.model.parameters())

    def bare(self) -> "Run":
        for step in range(STEPS):
            self.evaluate()
            self.optimizer.zero_grad()
            self.forward_backward(batch_of(step))
            self.optimizer.step()
        return self

    def guarded(self, **options: float) -> "Run":
        with Guard(self.model, self.optimizer, **options) as guard:
            for step in range(STEPS):
                self.evaluate()
                guard.step(self.forward_backward, batch_of(step))
        return self

    def split(self, **options: float) -> "Run":
        with Guard(self.model, self.optimizer, **options) as guard:
            for step in range(STEPS):
                self.evaluate()
                guard.micro_step(self.forward_backward, batch_of(step), last=True)
                self.optimizer.step()
                self.optimizer.zero_grad()
                guard.after_optimizer_step()
        return self

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_gradients_of_the_step_before_are_not_added(audit: float) -> None:
    right = Run().bare().digest()
    assert Run().guarded(audit=audit).digest() == right
    assert Run().split(audit=audit).digest() == right
    assert [event.kind for event in events.recent()] == []


def test_left_over_gradients_are_refused() -> None:
    run = Run()
    run.forward_backward(batch_of(0))
    run.evaluate()
    with Guard(run.model, run.optimizer) as guard, pytest.raises(ConfigError, match="not empty"):
        guard.micro_step(run.forward_backward, batch_of(1), last=True)


def test_a_guard_with_snapshots_is_made_and_restored_after_an_evaluation(run_dir: Path) -> None:
    for steps in (2, STEPS):
        run = Run()
        run.evaluate()
        snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir, linger_s=20.0)
        with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
            for step in range(guard.steps_done, steps):
                run.evaluate()
                guard.step(run.forward_backward, batch_of(step))
            snapshots.wait_committed()
            snapshots.close(finished=steps == STEPS)
    assert run.digest() == Run().bare().digest()
    assert "restored" in [event.kind for event in events.recent()]

"""A loop by Hugging Face Accelerate, with the lines that docs/integrations.md adds."""

import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, Snapshots, events, protect
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError

pytestmark = pytest.mark.processes

STEPS, PARTS, CLIP = 8, 3, 0.5


class Loop:
    """Its author's objects; ``struck`` are factors of one activation, by micro-step."""

    def __init__(self, struck: dict[int, float] | None = None) -> None:
        torch.manual_seed(3)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)
        )
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        draw = torch.Generator().manual_seed(1)
        rows = TensorDataset(
            torch.randn(48, 8, generator=draw), torch.randint(0, 4, (48,), generator=draw)
        )
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.net, optimizer, loader, schedule
        )
        self.struck, self.passes = dict(struck or {}), 0
        self.net[1].register_forward_hook(self._strike)

    def _strike(self, module: nn.Module, _: object, out: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        factor = self.struck.pop(self.passes - 1, 1.0)
        return torch.cat([out[:1] * factor, out[1:]])

    def forward_backward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """One micro-step."""
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.accelerator.backward(loss)
        return loss

    def finish_step(self) -> None:
        """What comes after the pass."""
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def bare(self) -> str:
        """Train two epochs."""
        with protect(self.net):
            for _ in range(2):
                for batch in self.loader:
                    with self.accelerator.accumulate(self.model):
                        self.forward_backward(batch)
                        self.finish_step()
        return self.digest()

    def guarded(self, run_dir: Path, *, ends_at: int | None = None, audit: float = 0.0) -> str:
        """The same under a Guard."""
        snapshots = Snapshots(
            self.net, self.optimizer.optimizer, scheduler=self.schedule.scheduler, run_dir=run_dir
        )
        guard = Guard(
            self.model,
            self.optimizer.optimizer,
            snapshots=snapshots,
            apply_again=self.finish_step,
            audit=audit,
        )
        with protect(self.net), guard:
            for batch in guard.batches(self.loader, steps=STEPS):
                with self.accelerator.accumulate(self.model):
                    last = self.accelerator.sync_gradients
                    guard.micro_step(self.forward_backward, batch, last=last)
                    self.finish_step()
                if last:
                    guard.after_optimizer_step()
                    if guard.steps_done == ends_at:
                        snapshots.wait_committed()
                        raise KeyboardInterrupt
        return self.digest()

    def digest(self) -> str:
        """Of all that is trained."""
        parts = [self.net, self.optimizer, self.schedule]
        return state_digest([[each.state_dict() for each in parts], torch.get_rng_state()])


@pytest.mark.representative
def test_a_guarded_loop_has_the_bits_of_the_bare_one(run_dir: Path) -> None:
    assert Loop().guarded(run_dir) == Loop().bare()
    assert events.recent() == []


@pytest.mark.parametrize(("micro_step", "factor", "audit"), [(6, math.inf, 0.0), (7, 1.01, 1.0)])
def test_a_fault_in_any_micro_step_is_repaired(
    micro_step: int, factor: float, audit: float, run_dir: Path
) -> None:
    bare = Loop().bare()
    assert Loop({micro_step: factor}).bare() != bare
    # The first step of a run is done twice; with an audit every step.
    shifted = micro_step + PARTS * (micro_step // PARTS if audit else 1)
    events.clear()
    run = Loop({shifted: factor})
    assert run.guarded(run_dir, audit=audit) == bare
    assert run.struck == {}
    assert [event.step for event in events.recent() if event.kind == "rerun"] == [2]


def test_a_restart_continues_within_an_epoch(run_dir: Path) -> None:
    ends_at = 6
    with pytest.raises(KeyboardInterrupt):
        Loop().guarded(run_dir, ends_at=ends_at)
    again = Loop()
    torch.manual_seed(99)
    assert again.guarded(run_dir) == Loop().bare()
    assert again.passes == (STEPS - ends_at) * PARTS


def test_a_forgotten_micro_step_is_refused(run_dir: Path) -> None:
    run = Loop()
    with (
        Guard(run.model, run.optimizer.optimizer),
        pytest.raises(ConfigError, match="were not verified"),
    ):
        run.bare()

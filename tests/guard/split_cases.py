"""A loop that applies its optimizer itself, with several micro-steps, bare or guarded."""

from typing import Any

import torch
from guard_cases import Run
from torch import nn
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.rng import rng_state

PARTS, SPLIT_STEPS, SPLIT_STRUCK = 3, 12, 9
CLIP = 0.05

# Multiplies one output of a layer in one micro-step, the first time that it is run.
Strike = tuple[int, int, float]


class SplitRun(Run):
    """A run whose batches are divided into micro-steps; ``computed`` lists (step, part)."""

    def __init__(self, strike: Strike | None = None, *, to_none: bool = True, **net: Any) -> None:
        super().__init__(**net)
        self.strike, self.to_none = strike, to_none
        self.model.norm.register_forward_hook(self._struck)
        self.parts: list[tuple[int, int]] = []

    def _struck(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        if self.strike is None or self.parts[-1] != self.strike[:2]:
            return None
        factor, self.strike = self.strike[2], None
        struck = out.clone()
        struck[0, 3] *= factor
        return struck

    def part(self, batch: tuple[int, int, torch.Tensor]) -> torch.Tensor:
        """Forward and backward of one micro-step."""
        step, number, inputs = batch
        self.parts.append((step, number))
        loss = self.model(inputs).square().mean() / PARTS
        loss.backward()
        self.damage(step)
        return loss

    def apply(self) -> None:
        """What a framework does with the gradients."""
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=self.to_none)

    def split(self, guard: Guard | None = None, steps: int = SPLIT_STEPS) -> "SplitRun":
        """Train from the guard's step on; the losses are kept in ``losses``."""
        self.losses: list[float] = []
        for step in range(guard.steps_done if guard else 0, steps):
            events.set_step(step)
            losses = []
            for number, inputs in enumerate(self.loader.batch(step).chunk(PARTS)):
                batch, last = (step, number, inputs), number == PARTS - 1
                if guard is None:
                    losses.append(self.part(batch).detach())
                else:
                    guard.micro_step(self.part, batch, last=last)
            self.apply()
            if guard is not None:
                guard.after_optimizer_step()
                losses = guard.losses
            self.losses.append(float(sum(losses)))
        return self

    def guarded_split(self, steps: int = SPLIT_STEPS, **options: Any) -> Guard:
        """Train under a guard of the given options."""
        with Guard(self.model, self.optimizer, **options) as guard:
            self.split(guard, steps)
        return guard

    def all_digest(self) -> str:
        """Of model, optimizer, schedule, random state and losses."""
        return state_digest([self.digest(), rng_state()["torch"], self.losses])

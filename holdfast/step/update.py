"""How a verified step is applied by the Guard, in the order of torch's recipes."""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch.amp import GradScaler

from holdfast.optimizers import Optimizers, each_of
from holdfast.replay.norms import clip_gradients, total_norm

After = Callable[[], object]


class Scheduler(Protocol):
    """A learning-rate schedule, of which the Guard needs one method."""

    def step(self) -> None:
        """Advance the schedule by one step."""


class Update:
    """Clips the gradients, applies the optimizer and advances the schedule.

    Args:
        optimizer: One optimizer, or several.
        scheduler: Advanced after the optimizer, also after a step that the scaler skipped.
        parameters: Parameters whose gradients are clipped together.
        clip_grad_norm: Largest norm; None does not clip.
        scaler: Scaler by which the losses were scaled: it unscales the gradients, applies each
            optimizer unless its gradients are not finite, and adapts its scale.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Optimizers,
        scheduler: Scheduler | None,
        parameters: Iterable[torch.nn.Parameter],
        *,
        clip_grad_norm: float | None,
        scaler: GradScaler | None,
    ) -> None:
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.clip_grad_norm = clip_grad_norm
        self._parameters = list(parameters)

    def apply(self, norm: torch.Tensor, after: After | None) -> None:
        """Apply the gradients in place, whose total norm is given; then call ``after``."""
        if self.scaler is None:
            self._clip(norm)
            self.optimizer.step()
        else:
            self._apply_scaled(self.scaler)
        if self.scheduler is not None:
            self.scheduler.step()
        if after is not None:
            with torch.no_grad():
                after()

    def _apply_scaled(self, scaler: GradScaler) -> None:
        optimizers = each_of(self.optimizer)
        if self.clip_grad_norm is not None:
            for each in optimizers:
                scaler.unscale_(each)
            self._clip(total_norm(p.grad for p in self._parameters if p.grad is not None))
        for each in optimizers:
            scaler.step(each)
        scaler.update()

    def _clip(self, norm: torch.Tensor) -> None:
        if self.clip_grad_norm is not None:
            clip_gradients(self._parameters, self.clip_grad_norm, norm)

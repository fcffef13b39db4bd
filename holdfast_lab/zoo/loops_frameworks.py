"""Loops by the objects of Lightning Fabric and Hugging Face Accelerate.

Neither is installed with the laboratory. What a loop sees of them is written here: wrappers of
model and optimizer, a backward pass through an object, accumulation by a context, and steps of the
optimizer that are left out while gradients accumulate.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, Snapshots, protect
from holdfast_lab.zoo.loop import Form, Loop, draw, draw_tokens

Rows = tuple[torch.Tensor, torch.Tensor]


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 4)
    )


def _loader(seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    rows = TensorDataset(draw(30, 8, seed=seed), draw_tokens(30, below=4, seed=seed))
    return DataLoader(rows, batch_size=3, shuffle=True)


class WrappedOptimizer:
    """An optimizer in a wrapper that can leave a step out.

    It is no ``torch.optim.Optimizer`` itself; the attribute ``optimizer`` is the one inside.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.applies = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:
        """Apply the optimizer, unless gradients accumulate."""
        if self.applies:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the gradients, unless they accumulate."""
        if self.applies:
            self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of the optimizer inside."""
        self.optimizer.load_state_dict(state)


class _WrappedModel(nn.Module):
    """A model in a wrapper that computes in bf16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the model's output in fp32."""
        with torch.autocast("cpu", torch.bfloat16):
            output: torch.Tensor = self.module(*inputs)
        return output.float()


class _Fabric:
    """What a loop sees of Fabric."""

    def setup(self, module: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, WrappedOptimizer]:
        return _WrappedModel(module), WrappedOptimizer(optimizer)

    def no_backward_sync(self, module: nn.Module, *, enabled: bool) -> Any:
        return nullcontext(module)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_gradients(self, module: nn.Module, optimizer: Any, *, max_norm: float) -> None:
        clip_grad_norm_(module.parameters(), max_norm)


class FabricLoop(Loop):
    """A loop by Fabric, with accumulation."""

    name = "fabric"
    like = "Lightning Fabric (its structure): wrappers, bf16, `fabric.backward`, accumulation"
    form = Form.MICRO_STEP
    repeated = "all micro-steps of the step"
    remember = "`guard.batches` counts batches and steps apart, also where a step takes several"

    epochs, accumulation = 2, 2

    def __init__(self) -> None:
        torch.manual_seed(83)
        self.fabric = _Fabric()
        module = _network()
        inner = AdamW(module.parameters(), lr=5e-3)
        self.model, self.optimizer = self.fabric.setup(module, inner)
        self.optimizers = (inner,)
        self.loader = _loader(83)
        self.losses: list[float] = []

    def forward_backward(self, batch: Rows) -> torch.Tensor:
        """Run one micro-step."""
        inputs, labels = batch
        loss = functional.cross_entropy(self.model(inputs), labels) / self.accumulation
        self.fabric.backward(loss)
        return loss

    def bare(self) -> None:
        """Train as the examples of Fabric do."""
        for _ in range(self.epochs):
            for number, batch in enumerate(self.loader, 1):
                accumulating = number % self.accumulation != 0
                with self.fabric.no_backward_sync(self.model, enabled=accumulating):
                    self.losses.append(self.forward_backward(batch).item())
                if not accumulating:
                    self.finish_step()

    def finish_step(self) -> None:
        """Clip and apply the gradients."""
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def guarded(self) -> None:
        """Train with the micro-steps in the Guard's hands."""
        self.protection = protect(self.model)
        optimizer: Any = self.optimizer
        self.snapshots = Snapshots(self.model, optimizer)
        steps = self.epochs * len(self.loader) // self.accumulation
        with Guard(
            self.model, optimizer, snapshots=self.snapshots, apply_again=self.finish_step
        ) as guard:
            for number, batch in enumerate(guard.batches(self.loader, steps=steps), 1):
                accumulating = number % self.accumulation != 0
                with self.fabric.no_backward_sync(self.model, enabled=accumulating):
                    guard.micro_step(self.forward_backward, batch, last=not accumulating)
                if not accumulating:
                    self.finish_step()
                    guard.after_optimizer_step()


class _Accelerator:
    """What a loop sees of Accelerate on one process, with accumulation."""

    def __init__(self, gradient_accumulation_steps: int) -> None:
        self.parts, self.number, self.sync_gradients = gradient_accumulation_steps, 0, True

    def prepare(self, optimizer: Optimizer) -> WrappedOptimizer:
        self.optimizer = WrappedOptimizer(optimizer)
        return self.optimizer

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        self.number += 1
        self.sync_gradients = self.number % self.parts == 0
        self.optimizer.applies = self.sync_gradients
        yield

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.parts).backward()


class AccelerateLoop(Loop):
    """A loop by Accelerate, which leaves the optimizer's steps out while gradients accumulate."""

    name = "accelerate"
    like = "Accelerate (its structure): `accumulate`, steps left out by the wrapped optimizer"
    form = Form.MICRO_STEP
    repeated = "all micro-steps of the step"
    remember = "`last=accelerator.sync_gradients`"

    epochs, accumulation = 4, 3

    def __init__(self) -> None:
        torch.manual_seed(89)
        self.accelerator = _Accelerator(self.accumulation)
        self.model = _network()
        inner = AdamW(self.model.parameters(), lr=5e-3)
        self.optimizer = self.accelerator.prepare(inner)
        self.optimizers = (inner,)
        self.loader = _loader(89)
        self.steps = self.epochs * len(self.loader) // self.accumulation
        self.scheduler = OneCycleLR(inner, max_lr=1e-2, total_steps=self.steps + 1)

    def parts(self) -> tuple[Any, ...]:
        """Return the schedule."""
        return (self.scheduler,)

    def forward_backward(self, batch: Rows) -> torch.Tensor:
        """Run one micro-step."""
        inputs, labels = batch
        loss = functional.cross_entropy(self.model(inputs), labels)
        self.accelerator.backward(loss)
        return loss

    def bare(self) -> None:
        """Train as the examples of Accelerate do."""
        for _ in range(self.epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.forward_backward(batch)
                    if self.accelerator.sync_gradients:
                        clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    if self.accelerator.sync_gradients:
                        self.scheduler.step()
                    self.optimizer.zero_grad()

    def finish_step(self) -> None:
        """Clip and apply the gradients, and advance the schedule."""
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def guarded(self) -> None:
        """Train with the micro-steps in the Guard's hands."""
        self.protection = protect(self.model)
        optimizer: Any = self.optimizer
        self.snapshots = Snapshots(self.model, optimizer, scheduler=self.scheduler)
        with Guard(
            self.model, optimizer, snapshots=self.snapshots, apply_again=self.finish_step
        ) as guard:
            for batch in guard.batches(self.loader, steps=self.steps):
                with self.accelerator.accumulate(self.model):
                    last = self.accelerator.sync_gradients
                    guard.micro_step(self.forward_backward, batch, last=last)
                    if last:
                        self.finish_step()
                        guard.after_optimizer_step()

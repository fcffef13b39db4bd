"""A small model in training, bare or under a Guard, whose calls a dispatch mode may see."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.guard import Guard
from holdfast.inject.injector import state_at_rest
from holdfast.replay.made_batches import DigestedCollate
from holdfast_lab.step_faults.calls import PASS, Numbered
from holdfast_lab.step_faults.operators import OPTIMIZER

Batch = dict[str, torch.Tensor]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        name: Its name.
        model: The model.
        optimizer: Of ``torch.optim``, with one group, whose module has a function of its own name
            that computes the updates, as those of all classes there do.
        batches: The batches, which come in turn.
        loss: Computes the loss of the model and a batch.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]

    def state(self, losses: list[float]) -> State:
        """Return copies of the tensors of model and optimizer, and the losses of the steps."""
        held = state_at_rest(self.model, self.optimizer)
        state = {name: each.detach().clone() for name, each in held.items() if each.numel()}
        return state | {"losses": torch.tensor(losses, dtype=torch.float64)}


class Training:
    """The steps of a subject.

    Args:
        subject: What is trained.
        options: Settings of the Guard; None trains without one.
        around: Makes a context for each pass, repeated ones too.
    """

    def __init__(
        self,
        subject: Subject,
        options: dict[str, Any] | None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.subject, self._around = subject, around
        self.guard: Guard | None = None
        if options is not None:
            self.guard = Guard(subject.model, subject.optimizer, **options)
        self._mode: Numbered | None = None

    def batch(self, number: int) -> Batch:
        """Return a copy of the batch of a step."""
        batches = self.subject.batches
        batch = {name: each.clone() for name, each in batches[number % len(batches)].items()}
        self._made = DigestedCollate(lambda made: made)(batch)
        return batch

    def step(self, number: int, batch: Batch | None = None) -> float:
        """Do a step with its batch, or with what has become of it; return the loss."""
        batch = self.batch(number) if batch is None else batch
        if self.guard is not None:
            return float(self.guard.step(self._pass, self._made))
        self.subject.optimizer.zero_grad()
        loss = self._pass(batch)
        self.subject.optimizer.step()
        return float(loss.detach())

    def _pass(self, batch: Batch) -> torch.Tensor:
        with self._within(PASS), self._around():
            loss = self.subject.loss(self.subject.model, batch)
            loss.backward()
        return loss

    def _within(self, part: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        mode = self._mode if self._mode and self._mode.looks_at(part) else None
        return mode.within(part, *args, **kwargs) if mode else nullcontext()

    @contextmanager
    def seen_by(self, mode: Numbered | None) -> Iterator[None]:
        """Let a mode, if any, see the calls of passes and updates while the context is open."""
        module = sys.modules[inspect.unwrap(type(self.subject.optimizer).step).__module__]
        name = module.__name__.rpartition(".")[2]
        update: Callable[..., object] = getattr(module, name)
        trained = {id(each) for each in self.subject.model.parameters()}

        def seen(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> object:
            again = any(id(each) not in trained for each in parameters)
            with self._within(OPTIMIZER, len(parameters), again=again):
                return update(parameters, *args, **kwargs)

        self._mode = mode
        setattr(module, name, seen)
        try:
            yield
        finally:
            self._mode = None
            setattr(module, name, update)

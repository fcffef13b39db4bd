"""Fine-tuning of a model on the docstring task, where each step is a function of its number."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from holdfast_lab.study.attnchecker.docstrings import Task, docstring_task
from holdfast_lab.study.attnchecker.models import subject
from holdfast_lab.study.attnchecker.subjects import Batch, Size

LARGEST_NORM = 1.0  # of the gradients, as transformers' Trainer clips them
LEARNING_RATE = 1e-4


def task_for(size: Size, pairs: int, seed: int) -> Task:
    """Make the docstring task with the sequence length of a size."""
    return docstring_task(pairs, length=size.length, vocabulary=size.vocabulary, seed=seed)


class Trainer:
    """A model, its optimizer and its batches.

    The vocabulary of ``size`` is replaced by the task's. Dropout is the same in every run of a
    step. The seed determines weights, the order of the examples and dropout.
    """

    def __init__(
        self,
        name: str,
        size: Size,
        task: Task,
        *,
        dropout: float = 0.0,
        learning_rate: float = LEARNING_RATE,
        seed: int = 0,
    ) -> None:
        size = replace(size, vocabulary=len(task.vocabulary))
        self.subject = subject(name, size, dropout=dropout, seed=seed)
        self.model = self.subject.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self._task, self._batch, self._seed = task, size.batch, seed

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield the first ``count`` batches of training."""
        return islice(self._task.train.batches(self._batch, self._seed), count)

    def loss(self, batch: Batch, step: int = 0) -> torch.Tensor:
        """Compute the loss of a batch; the step seeds dropout."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 1_000_003 + step)
            return self.subject.loss(batch)

    def update(self, loss: torch.Tensor) -> None:
        """Run the backward pass, clip the gradients and apply the optimizer's step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()

    def train(self, steps: int) -> list[float]:
        """Run the first steps and return their losses."""
        losses = []
        for step, batch in enumerate(self.batches(steps)):
            loss = self.loss(batch, step)
            self.update(loss)
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, object]:
        """Copy the weights and the optimizer's state."""
        return deepcopy(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the weights and the optimizer from a saved state, which can be used again."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))

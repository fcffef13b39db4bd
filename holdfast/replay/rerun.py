"""Repeat a micro-step from its saved start and compare gradients by digest.

Two runs of a deterministic step from the same parameters, batch and random state give the same
bits. If a repetition differs, one of the two was wrong, and a further one says which.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from holdfast.digest.tensors import tensor_digest, tensors_digest
from holdfast.replay.gradients import Start

MAX_ATTEMPTS = 4  # the first run and at most three repetitions

ForwardBackward = Callable[[Any], torch.Tensor]


class Unconfirmed(Exception):
    """The step at hand could not be computed so that it can be trusted."""


@dataclass(frozen=True)
class Attempt:
    """One run of the micro-step: digests of its loss, its gradients and the model's buffers."""

    loss: torch.Tensor
    loss_digest: str
    digest: str
    faulty: bool = False  # a fault was found in it and not repaired: never acceptable


@dataclass(frozen=True)
class Verdict:
    """What the repetitions say.

    ``kind`` is ``genuine`` (the first run was right), ``transient`` (it was not, the last run is
    backed by another) or ``persistent`` (no result could be confirmed). The gradients in place are
    those of the last attempt.
    """

    kind: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def loss(self) -> torch.Tensor:
        """The loss of the last attempt."""
        return self.attempts[-1].loss

    @property
    def disagreed(self) -> bool:
        """Whether any attempt was faulty or differed from another: one of them was wrong."""
        faulty = any(attempt.faulty for attempt in self.attempts)
        return faulty or len({attempt.digest for attempt in self.attempts}) > 1

    @property
    def loss_differed(self) -> bool:
        """Whether this rank's own loss changed: then a fault was in this rank's forward pass."""
        return len({attempt.loss_digest for attempt in self.attempts}) > 1


class MicroStep:
    """A forward and backward pass that can be run again from where it started.

    Args:
        model: its gradients and buffers are compared, its buffers restored.
        forward_backward: computes the loss of a batch, calls ``backward()``, returns the loss;
            deterministic, and without side effects besides gradients, buffers and random state.
        batch: handed to it unchanged.
        start: what it begins with, if not with what is there now.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: ForwardBackward,
        batch: Any,
        start: Start | None = None,
    ) -> None:
        self._model = model
        self._forward_backward = forward_backward
        self.batch = batch
        self.start = start or Start.capture(model)
        self._started = start is not None

    def elsewhere(
        self, batch: Any, start: Start, forward_backward: ForwardBackward | None = None
    ) -> "MicroStep":
        """The same of another batch, from another start."""
        return MicroStep(self._model, forward_backward or self._forward_backward, batch, start)

    def run(self) -> torch.Tensor:
        """Run from the saved start: gradients are emptied first; returns the loss."""
        if self._started:
            self.start.restore(self._model)
        self._started = True
        self._model.zero_grad(set_to_none=True)
        loss = self._forward_backward(self.batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"{list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"forward_backward returned {what}: it must return a one-element loss")
        return loss.detach()

    def attempt(self, loss: torch.Tensor, *, faulty: bool = False) -> Attempt:
        """The digests of what is now in the gradients and buffers, reached with this loss."""
        gradients = [parameter.grad for parameter in self._model.parameters()]
        digest = tensors_digest([loss, *gradients, *self._model.buffers()])
        return Attempt(loss, tensor_digest(loss), digest, faulty)


def rerun(
    first: Attempt,
    repeat: Callable[[], Attempt],
    *,
    agree: Callable[[bool], bool] = lambda wanted: wanted,
    max_attempts: int = MAX_ATTEMPTS,
) -> Verdict:
    """Repeat a micro-step until its latest result is backed by an earlier one.

    Args:
        first: the result in doubt.
        repeat: runs the step again and returns the new attempt.
        agree: makes one decision of all ranks' wishes to go on; the ranks of a data-parallel run
            repeat together, because the pass holds collectives.
        max_attempts: bound on all runs, the first included.

    Returns:
        The verdict; the last attempt's gradients are in place.

    Guarantees: a transient fault in one attempt, of any size and in any operation, is found and
    its result is not used. Not covered: a device that errs the same way every time (it agrees
    with itself), and non-deterministic programs (never confirmed: ``persistent``).
    """
    attempts = [first]
    while len(attempts) < max_attempts:
        attempts.append(repeat())
        if not agree(not _confirmed(attempts)):
            genuine = not first.faulty and first.digest == attempts[-1].digest
            return Verdict("genuine" if genuine else "transient", attempts)
    return Verdict("persistent", attempts)


def _confirmed(attempts: list[Attempt]) -> bool:
    last = attempts[-1]
    backed = any(last.digest == earlier.digest for earlier in attempts[:-1] if not earlier.faulty)
    return backed and not last.faulty

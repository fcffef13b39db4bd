"""Repetition of a micro-step from its saved start, with results compared by digest.

Two runs of a deterministic step from the same parameters, batch and random state give the same
bits. If a repetition differs, one of the two runs was wrong, and a further one decides which.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from holdfast.digest.tensors import state_digest, tensor_digest, tensors_digest
from holdfast.replay.batches import keep
from holdfast.replay.gradients import Start
from holdfast.replay.parameters import parameters_of, reshard

CHECK = "holdfast.replay.check_determinism(model, forward_backward, batch)"
MAX_ATTEMPTS = 4  # the first run and at most three repetitions

ForwardBackward = Callable[[Any], torch.Tensor]


class Unconfirmed(Exception):
    """The result of a step is not to be used.

    Args:
        reason: Why.
        digest: That of a result that was confirmed and may still be wrong; empty if none was.
    """

    def __init__(self, reason: str, digest: str = "") -> None:
        super().__init__(reason)
        self.digest = digest


@dataclass(frozen=True)
class Attempt:
    """One run of a micro-step.

    Attributes:
        loss: Loss that it returned.
        loss_digest: Digest of the loss.
        digest: Digest of the loss, the gradients and the model's buffers.
        faulty: True if a fault was found in the run and not repaired; the run is never accepted.
        premise: What runs of one step have in common: digests of the batch, and of which gradients
            are None. Runs that differ in it from the first one do not overrule it.
        note: Why the run is faulty, if it is for another reason than an event.
    """

    loss: torch.Tensor
    loss_digest: str
    digest: str
    faulty: bool = False
    premise: str = ""
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of repeating a micro-step. The gradients in place are those of the last attempt.

    Attributes:
        kind: ``"genuine"`` if the first run was right, ``"transient"`` if it was wrong and the last
            run is confirmed by another one, ``"persistent"`` if no result was confirmed.
        attempts: All runs in order.
    """

    kind: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def loss(self) -> torch.Tensor:
        """Loss of the last attempt."""
        return self.attempts[-1].loss

    @property
    def disagreed(self) -> bool:
        """True if any attempt was faulty or differed from another, so that one was wrong."""
        faulty = any(attempt.faulty for attempt in self.attempts)
        return faulty or len({attempt.digest for attempt in self.attempts}) > 1

    @property
    def doubt(self) -> str:
        """Why no result was confirmed, in a sentence for the user."""
        notes = {attempt.note: None for attempt in self.attempts if attempt.note}
        said = f"{len(self.attempts)} runs gave no confirmed result"
        if any(attempt.premise != self.attempts[0].premise for attempt in self.attempts):
            said += (
                ": the later ones got another batch or left other gradients empty than the first "
                "one, so that forward_backward may have changed its batch"
            )
        said = "; ".join([said, *notes])
        return f"{said}; on healthy hardware {CHECK} finds what makes two runs differ"

    @property
    def loss_differed(self) -> bool:
        """True if this rank's loss changed, which means a fault in this rank's forward pass."""
        return len({attempt.loss_digest for attempt in self.attempts}) > 1


def one_loss(loss: object) -> torch.Tensor:
    """Return a loss that a user's function returned.

    Raises:
        TypeError: It is not a tensor of one element.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"{list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(
            f"forward_backward returned {what}: it must return a one-element loss; a rank that "
            "computes none, such as the first stage of a pipeline, returns torch.zeros(())"
        )
    return loss


class MicroStep:
    """A forward and backward pass that can be repeated from its start.

    Args:
        model: The model whose gradients and buffers are compared and whose buffers are restored.
        forward_backward: Computes the loss of a batch, calls ``backward()`` and returns the loss.
            It must be deterministic and must change nothing but gradients, buffers and random
            state.
        batch: Argument of ``forward_backward``, or a ``KeptBatch`` of it.
        start: Random state and buffers to begin with; by default the present ones.

    Raises:
        ConfigError: The batch is or contains an iterator.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: ForwardBackward,
        batch: object,
        start: Start | None = None,
    ) -> None:
        self._model = model
        self._forward_backward = forward_backward
        self._kept = keep(batch)
        self.start = start or Start.capture(model)
        self._started = start is not None
        self._runs, self._unseen = 0, cast(list[str], [])

    @property
    def was_run(self) -> bool:
        """True once a run has begun, or the micro-step was made of one."""
        return self._started

    @property
    def batch(self) -> Any:
        """The batch as it was before the first run, as far as it can be put back."""
        return self._kept.again()

    def replaced(
        self, batch: object, start: Start, forward_backward: ForwardBackward | None = None
    ) -> "MicroStep":
        """Return a micro-step of the same model with another batch and another start."""
        return MicroStep(self._model, forward_backward or self._forward_backward, batch, start)

    def run(self) -> torch.Tensor:
        """Empty the gradients, run from the saved start and return the loss.

        If the run raises, random state and buffers are as they were before it.

        Raises:
            TypeError: ``forward_backward`` does not return a one-element tensor.
            UncorrectableFault: The step is done again after a roll-back, and its batch was changed
                in place since it was done first; or the batch has changed in memory.
        """
        if not self._runs:
            self._kept.check_unchanged()
        self._kept.check_made()
        if self._started:
            self._unseen += self.start.restore(self._model)
        self._started = True
        self._runs += 1
        with self.undone_if_it_raises():
            self.empty_gradients()
            loss = self.checked(self._forward_backward(self.batch)).detach()
        self._kept.say_if_changed()
        return loss

    def empty_gradients(self) -> None:
        """Empty the gradients before a run."""
        reshard(self._model)
        self._model.zero_grad(set_to_none=True)

    def checked(self, loss: object) -> torch.Tensor:
        """Return what ``forward_backward`` returned, if it is a loss."""
        return one_loss(loss)

    @contextmanager
    def undone_if_it_raises(self) -> Iterator[None]:
        """Restore random state and buffers if the context ends with an exception."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first exception says more
                self.start.restore(self._model)
            raise

    def attempt(self, loss: torch.Tensor, *, faulty: bool = False) -> Attempt:
        """Describe the run that just ended with this loss, from the gradients now in place."""
        gradients = [parameter.grad for parameter in parameters_of(self._model)]
        # Copies, because memory that NumPy has seen cannot be resized by a later pass.
        buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        digest = tensors_digest([loss, *gradients, *buffers])
        note = self._noted()
        found = faulty or bool(note)
        return Attempt(loss, tensor_digest(loss), digest, found, self._premise(gradients), note)

    def _premise(self, gradients: list[torch.Tensor | None]) -> str:
        """Return what a run has to have in common with the first one to overrule it."""
        # What the first run got is not known if it changed it: nothing overrules it then.
        unknown = self._runs <= 1 and self._kept.changed_in_place()
        batch = "changed" if unknown else self._kept.digest()
        return state_digest([batch, [gradient is None for gradient in gradients]])

    def _noted(self) -> str:
        if not self._unseen:
            return ""
        names = ", ".join(dict.fromkeys(self._unseen))
        return f"buffers changed unseen by autograd, by a fault in memory or through .data: {names}"


def rerun(
    first: Attempt,
    repeat: Callable[[], Attempt],
    *,
    agree: Callable[[bool], bool] = lambda wanted: wanted,
    max_attempts: int = MAX_ATTEMPTS,
) -> Verdict:
    """Repeat a micro-step until its latest result is confirmed.

    A result without a fault of its own is confirmed by an earlier one that it equals bit for bit,
    or if every run before it had a fault: what was in doubt was explained, and the result stands as
    that of any other step does.

    Args:
        first: The run whose result is in doubt.
        repeat: Runs the step again and returns the new attempt.
        agree: Combines all ranks' wishes to continue into one decision. The ranks of a
            data-parallel run repeat together, because the pass contains collectives.
        max_attempts: Bound on the number of runs, the first one included.

    Returns:
        The verdict; the last attempt's gradients are in place.

    Guarantees: a transient fault in one attempt, of any size and in any operation, is found and
    its result is not used. Not covered: a device that errs in the same way every time, as it
    agrees with itself, and non-deterministic programs, in which only a run with a fault of its own
    can be replaced.
    """
    attempts = [first]
    while len(attempts) < max_attempts:
        attempts.append(repeat())
        if not agree(not _confirmed(attempts)):
            genuine = not first.faulty and first.digest == attempts[-1].digest
            return Verdict("genuine" if genuine else "transient", attempts)
    return Verdict("persistent", attempts)


def _confirmed(attempts: list[Attempt]) -> bool:
    first, last = attempts[0], attempts[-1]
    if not first.faulty and last.digest != first.digest and last.premise != first.premise:
        return False  # two runs without a batch agree with each other
    if not last.faulty and all(earlier.faulty for earlier in attempts[:-1]):
        return True
    backed = any(last.digest == earlier.digest for earlier in attempts[:-1] if not earlier.faulty)
    return backed and not last.faulty

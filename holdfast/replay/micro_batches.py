"""A step of several micro-batches, run one by one by a framework, repeated from the first one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.replay.batches import KeptBatch, keep
from holdfast.replay.gradients import Start, local_of
from holdfast.replay.parameters import parameters_of
from holdfast.replay.passes import device_of, portable_rng, received_rng
from holdfast.replay.reduction import Reductions
from holdfast.replay.rerun import ForwardBackward, MicroStep, one_loss
from holdfast.rng import rng_state, set_rng_state

# A micro-batch as it is repeated, here or on another rank: the argument of the function that runs
# it, the random state before it (of this rank's device only), and the flags of ``Reductions``.
MicroBatch = tuple[object, Mapping[str, Any], list[bool]]


class KeptMicroBatches(KeptBatch):
    """The micro-batches of a step, each kept before it ran first."""

    def __init__(self) -> None:
        super().__init__(None)
        self._each: list[tuple[KeptBatch, Mapping[str, Any], list[bool]]] = []

    def add(self, batch: object, rng: Mapping[str, Any], reduces: list[bool]) -> KeptBatch:
        """Keep the next micro-batch, and return it."""
        self._each.append((keep(batch), rng, reduces))
        return self._each[-1][0]

    def again(self) -> list[MicroBatch]:
        """Return all of them with their containers as they were."""
        return [(kept.again(), rng, reduces) for kept, rng, reduces in self._each]

    def digest(self) -> str:
        """Return a digest of all of them."""
        return state_digest([kept.digest() for kept, _, _ in self._each])

    def changed_in_place(self) -> bool:
        """Return True if any has changed since it ran first."""
        return any(kept.changed_in_place() for kept, _, _ in self._each)

    def check_made(self) -> None:
        """Compare their tensors with the digests that were made with them."""
        for kept, _, _ in self._each:
            kept.check_made()


class Accumulation:
    """The micro-batches of one step, in the order in which they run.

    Args:
        model: The model whose gradients they accumulate.
        own_zero_grad: True if the functions empty the gradients themselves.

    Raises:
        ConfigError: Gradients of an earlier step are left over.
    """

    def __init__(self, model: nn.Module, *, own_zero_grad: bool) -> None:
        self._model, self._own_zero_grad = model, own_zero_grad
        if not own_zero_grad:
            check_empty(model)
        self._was_none = [p.grad is None for p in parameters_of(model)]
        self._reductions = Reductions(model)
        self._functions: list[ForwardBackward] = []
        self._micro_batches = KeptMicroBatches()
        self._losses: list[torch.Tensor] = []
        self._start: Start | None = Start.capture(model)

    def run(self, function: ForwardBackward, batch: object) -> torch.Tensor:
        """Run the next micro-batch and return its loss.

        Raises:
            TypeError: The function does not return a one-element tensor.
        """
        rng = portable_rng(rng_state(), device_of(self._model))
        kept = self._micro_batches.add(batch, rng, self._reductions.flags())
        self._functions.append(function)
        kept.check_made()
        loss = one_loss(function(kept.again())).detach()
        kept.say_if_changed()
        self._losses.append(loss)
        return loss

    def ended(self) -> tuple[MicroStep, torch.Tensor]:
        """Return all of it as one pass that was run once, and the vector of its losses.

        The copies of buffers are given up with it, because a step may be kept for long.
        """
        assert self._start is not None
        losses, start = vector_of(self._losses), self._start
        self._losses, self._start = [], None
        return self.anew(start), losses

    def anew(self, start: Start | None = None) -> MicroStep:
        """Return all of it as one pass, which begins with the present random state and buffers."""
        return _Replay(self._model, self._functions, self._micro_batches, start, self._empty)

    def _empty(self) -> None:
        """Empty the gradients as they were: 0 + -0.0 is not -0.0, and graphs keep addresses."""
        for parameter, was_none in zip(parameters_of(self._model), self._was_none, strict=True):
            if was_none:
                parameter.grad = None
            elif parameter.grad is not None and not self._own_zero_grad:
                parameter.grad.zero_()


class _Replay(MicroStep):
    """All micro-batches of a step; the loss is the vector of their losses."""

    def __init__(
        self,
        model: nn.Module,
        functions: Sequence[ForwardBackward],
        micro_batches: object,
        start: Start | None,
        empty: Any = None,
    ) -> None:
        super().__init__(model, self._replayed, micro_batches, start)
        self._functions, self._empty = functions, empty
        self._runs = int(start is not None and empty is not None)  # it ran as micro-steps

    def _replayed(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        own = self._empty is not None  # another rank's reduce as this rank's model is set to
        reductions, losses = Reductions(self._model), []
        for function, (batch, rng, reduces) in zip(self._functions, micro_batches, strict=True):
            set_rng_state(received_rng(dict(rng), device_of(self._model)))
            with reductions.set_to(reduces if own else reductions.flags()):
                losses.append(one_loss(function(batch)).detach())
        return vector_of(losses)

    def empty_gradients(self) -> None:
        if self._empty is None:
            super().empty_gradients()
        else:
            self._empty()

    def checked(self, loss: object) -> torch.Tensor:
        assert isinstance(loss, torch.Tensor)
        return loss

    def replaced(
        self, batch: Any, start: Start, forward_backward: ForwardBackward | None = None
    ) -> MicroStep:
        if forward_backward is not None:
            return super().replaced([each for each, _, _ in batch], start, forward_backward)
        return _Replay(self._model, self._functions, batch, start)


def vector_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return losses of one element each as one vector."""
    return torch.stack([loss.reshape(()) for loss in losses])


def check_empty(model: nn.Module) -> None:
    """Check that no gradient of an earlier step is left over.

    Raises:
        ConfigError: One is.
    """
    left = [p.grad for p in parameters_of(model) if p.grad is not None]
    if _any_nonzero(left):
        raise ConfigError(
            f"gradients are not empty at the first micro-step of a step ({len(left)} "
            "parameters have one): call zero_grad() after the optimizer's step"
        )


def _any_nonzero(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether any gradient has a value that is not 0, with one wait for the device."""
    counts = [_values(local_of(gradient)).count_nonzero() for gradient in gradients]
    return bool(counts) and bool(torch.stack([c.to(counts[0].device) for c in counts]).any())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient

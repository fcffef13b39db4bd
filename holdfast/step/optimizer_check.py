"""The check of the optimizer's step: a share of its updates is computed again."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast import config, events
from holdfast.errors import ConfigError, HoldfastError
from holdfast.events import Event, EventKind
from holdfast.optimizers import Optimizers, innermost_of
from holdfast.replay.accused import WRONG_TO_EVICT
from holdfast.replay.updates import Sample, is_repeatable, why_not
from holdfast.snapshot.client.at_rest import Rotation
from holdfast.step.hooks import weak_hook

SHARE = 1 / 64  # of the elements, in each step that is not audited
FIRST = 3  # small parameters checked in the first step: do updates come out the same at all?


@dataclass
class _Watched:
    """One optimizer, and the updates of its present step that are computed again."""

    optimizer: torch.optim.Optimizer
    why_not: str
    handles: list[RemovableHandle] = field(default_factory=list)
    rotation: Rotation = field(default_factory=Rotation)
    samples: list[Sample] = field(default_factory=list)
    repeatable: float = 0.0  # share of the elements with a gradient
    checked: int = 0  # updates whose recomputation gave the same bits

    def choose(self, share: float) -> None:
        """Copy the parameters whose turn it is, with all that their update reads."""
        every = [(g, p) for g in self.optimizer.param_groups for p in g["params"]]
        turns = [(g, p) for g, p in every if is_repeatable(self.optimizer, p)]
        sizes = [p.numel() for _, p in turns]
        self.repeatable = sum(sizes) / max(
            1, sum(p.numel() for _, p in every if p.grad is not None)
        )
        taken = {*self.rotation.take(sizes, share)}
        if not self.checked:
            taken |= {*sorted(range(len(sizes)), key=sizes.__getitem__)[:FIRST]}
        self.samples = [Sample(self.optimizer, *turns[index]) for index in sorted(taken)]


class OptimizerCheck:
    """Computes a share of each optimizer's updates again, and compares all bits that they left.

    Whole parameters take turns. They are copied by a hook before ``optimizer.step``, when gradients
    are unscaled and clipped, and updated again by a hook after it, by the same implementation. If
    the results differ, a further one decides, and a wrong update is replaced.

    Args:
        model: The model, which names parameters in events.
        optimizer: One optimizer, or several.
        share: Share of the elements, 0 to 1, that is updated again in each step; by default
            ``guard.optimizer_check`` of the config file, else 1/64.

    Attributes:
        whole: True if the present step is audited, in which everything is updated again.
        lost: The update that could not be repaired, until training has rolled back.

    Guarantees and what is not covered: ``docs/fault_model.md``. An optimizer of which no update
    came out the same, or whose check fails, is not checked any more (``check_failed``).

    Raises:
        ConfigError: The share is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        share: float | None = None,
    ) -> None:
        self.share = config.value("guard.optimizer_check", share, SHARE)
        if not 0 <= self.share <= 1:
            raise ConfigError(f"optimizer_check = {share!r} must be a share of the updates, 0 to 1")
        self.whole, self._model, self._wrong = False, model, 0
        self.lost: Event | None = None
        self._watched = {each: _Watched(each, why_not(each)) for each in innermost_of(optimizer)}

    def watch(self) -> None:
        """Hang the hooks on the optimizers, unless this was done or nothing is to be checked."""
        for optimizer, watched in self._watched.items():
            if self.share and not watched.why_not and not watched.handles:
                watched.handles = [
                    optimizer.register_step_pre_hook(weak_hook(self._before)),
                    optimizer.register_step_post_hook(weak_hook(self._after)),
                ]

    def close(self) -> None:
        """Take the hooks off."""
        for watched in self._watched.values():
            while watched.handles:
                watched.handles.pop().remove()

    def coverage(self) -> list[dict[str, object]]:
        """Return for each optimizer how much of its updates is checked, as plain values."""
        return [
            {"optimizer": type(optimizer).__name__, "reason": each.why_not, "checked": each.checked}
            | {"share": 0.0 if each.why_not else self.share, "repeatable": each.repeatable}
            for optimizer, each in self._watched.items()
        ]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Copy what is checked: now, or once a closure has computed the gradients."""
        watched, hooks = self._watched[optimizer], vars(optimizer)
        if torch.compiler.is_compiling():
            watched.why_not = "its step is compiled, and gives other bits than torch's functions"
            return None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            watched.why_not = "its step is captured in a CUDA graph, which runs no hooks"
            return None
        # Others' hooks may change gradients and results: these come last before, first after.
        hooks["_optimizer_step_post_hooks"].move_to_end(watched.handles[1].id, last=False)
        *_, last = hooks["_optimizer_step_pre_hooks"]
        share = (1.0 if self.whole else self.share) if last == watched.handles[0].id else 0.0
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self._choose(watched, share)

        def computed() -> Any:
            loss = closure()
            self._choose(watched, share)
            return loss

        return (optimizer, computed), {}

    def _choose(self, watched: _Watched, share: float) -> None:
        watched.samples = []
        if share and not watched.why_not:
            with self._said_if_it_fails(watched):
                watched.choose(share)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        watched = self._watched[optimizer]
        if watched.why_not:
            return
        vars(optimizer)["_optimizer_step_pre_hooks"].move_to_end(watched.handles[0].id)
        differ: list[tuple[Sample, list[str]]] = []
        with self._said_if_it_fails(watched):
            while watched.samples:  # which frees the copies one by one
                sample = watched.samples.pop()
                if names := sample.differing():
                    differ.append((sample, names))
                watched.checked += not names
        failed = bool(watched.why_not)
        with self._said_if_it_fails(watched):  # what was found before it failed is settled too
            if differ and not watched.checked and not failed:
                raise HoldfastError("no update came out the same")
            for sample, names in differ if watched.checked else ():
                self._settle(type(optimizer).__name__, sample, names)

    def _settle(self, optimizer: str, sample: Sample, names: list[str]) -> None:
        started_s, parameter = time.perf_counter(), sample.parameter
        wrong, right = sample.settle()
        self._wrong += 1
        named = (name for name, each in self._model.named_parameters() if each is parameter)
        known: dict[str, Any] = {
            "op": f"{optimizer}.step/{next(named, 'unknown')}",
            "device": str(parameter.device),
            "detector": "recomputation",
            "detail": {"differs": names, "wrong": "update" if wrong else "recomputation"},
        }
        rung, duration_s = "recompute" if right else "", time.perf_counter() - started_s
        event = events.record(EventKind.OPTIMIZER_FAULT, rung=rung, duration_s=duration_s, **known)
        self.lost = self.lost if right else event
        if self._wrong == WRONG_TO_EVICT:
            events.record(EventKind.EVICT, **known)

    @contextmanager
    def _said_if_it_fails(self, watched: _Watched) -> Iterator[None]:
        """Check an optimizer no more, and say so, if its check fails: it costs no training."""
        try:
            yield
        except Exception as error:
            watched.why_not, watched.samples = f"its check failed: {error!r}", []
            op, detail = f"{type(watched.optimizer).__name__}.step", {"error": repr(error)}
            events.record(EventKind.CHECK_FAILED, op=op, detector="recomputation", detail=detail)
            with suppress(Warning):  # where warnings are errors
                warnings.warn(f"{op} is not checked any more: {error!r}", stacklevel=2)

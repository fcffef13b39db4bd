"""What must not happen within a pass: a scaled loss that nobody unscales, or an optimizer's step.

Both are noticed where they happen, in ``GradScaler.scale`` and ``Optimizer.step``, so that a pass
without them costs nothing.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.errors import ConfigError

_scaled = threading.local()  # ``by``: the scaler that scaled a loss of this thread latest
_running: list[frozenset[int]] = []  # parameters of each pass that is running in this process
_installing = threading.Lock()
_installed = False


class PassWatch:
    """Refuses passes that scale their loss with an unknown scaler, or apply the optimizer.

    Args:
        parameters: Parameters that only a verified step may change.
        scaler: The scaler that the Guard knows; None if losses are not to be scaled.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], scaler: GradScaler | None) -> None:
        _install()
        self._parameters = frozenset(map(id, parameters))
        self._scaler = scaler

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one pass.

        Raises:
            ConfigError: The pass did what must not happen; the optimizer has not been applied.
        """
        _install()  # for classes of scalers that were defined meanwhile
        _scaled.by = None
        _running.append(self._parameters)
        try:
            yield
        finally:
            _running.remove(self._parameters)
        by, _scaled.by = _scaled.by, None
        if by not in (None, self._scaler):
            known = "another one than" if self._scaler is not None else "and the Guard has no"
            raise ConfigError(
                f"the loss was scaled by a {type(by).__name__}, {known} scaler=: its "
                "gradients would be applied without being unscaled; give it as Guard(scaler=...)"
            )


def _install() -> None:
    """Watch every class of scalers, and once in a process the steps of optimizers."""
    global _installed
    with _installing:
        if not _installed:
            register_optimizer_step_pre_hook(_refuse_within_a_pass)
            _installed = True
        for kind in _with_subclasses(GradScaler):
            scale = vars(kind).get("scale")
            if scale is not None and not hasattr(scale, "_holdfast_notes"):
                setattr(kind, "scale", _noting(scale))  # noqa: B010


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _noting(scale: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method ``scale`` that notes the scaler, unless it is switched off."""

    @functools.wraps(scale)
    def noted(scaler: GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            _scaled.by = scaler
        return scale(scaler, outputs)

    vars(noted)["_holdfast_notes"] = True
    return noted


def _refuse_within_a_pass(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for guarded in _running:
        if any(id(p) in guarded for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"{type(optimizer).__name__}.step was called within a pass, before its gradients "
                "were verified: let forward_backward return after backward(), and do not apply "
                "optimizers in hooks of the backward pass"
            )

"""What a trial of a campaign may change: the state of the model, and the time it may take."""

import copy
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import ConfigError
from holdfast.replay.buffers import Buffers


class RunState:
    """Copies of what a run may change, from which it is put back.

    Parameters are copied only if asked for: a write makes protection encode them anew.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, parameters: bool) -> None:
        self._model, self._optimizer, self._buffers = model, optimizer, Buffers(model)
        kept = model.parameters() if parameters else ()
        self._parameters = [(live, live.detach().clone()) for live in kept]
        self.optimizer = {} if optimizer is None else _copied(optimizer.state)
        self.groups = [] if optimizer is None else [_copied(g) for g in optimizer.param_groups]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back parameters, buffers and the optimizer; gradients are None afterwards.

        Numbers and strings that are attributes of modules, such as counters, are put back too.
        """
        if left := self._buffers.restore(self._model):
            raise ConfigError(
                f"the run writes {', '.join(left)} through .data: copy_ can be undone"
            )
        for live, kept in self._parameters:
            live.copy_(kept)
        self._model.zero_grad()
        if self._optimizer is not None:  # load_state_dict would cast to the parameters' dtype
            self._optimizer.state.clear()
            self._optimizer.state.update(_copied(self.optimizer))
            for group, values in zip(self._optimizer.param_groups, self.groups, strict=True):
                group.update(_copied(values))


def _copied(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copy the values of an optimizer's state or group, but not the parameters themselves."""
    return {key: copy.deepcopy(value) for key, value in values.items() if key != "params"}


class Hang(BaseException):
    """The run took too long; not an Exception, which the run itself could catch."""


@contextmanager
def deadline(timeout_s: float) -> Iterator[None]:
    """Raise Hang in the main thread when the time is over; elsewhere nothing is watched."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise Hang

    handler = signal.signal(signal.SIGALRM, over)
    started_s, (left_s, _) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # an alarm of the program itself, which goes on
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - started_s), 1e-3))

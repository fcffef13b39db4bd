"""Is a micro-step deterministic here? Whoever relies on repeating it should know.

Two clean runs of a step from the same parameters, buffers, batch and random state are compared, and
if they differ, operator by operator: the first one whose results differ though its operands did not
is where the program, or the machine, is not deterministic.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdfast.digest.tensors import state_digest
from holdfast.replay.rerun import Attempt, ForwardBackward, MicroStep

OUTSIDE = "(outside)"
# Their results are whatever was in memory.
_UNINITIALISED = ("empty", "new_empty", "resize_", "_efficientzerotensor")


@dataclass(frozen=True)
class Operation:
    """One operator that a run called.

    Attributes:
        name: of the operator, ``aten.mm.default``.
        where: the module whose ``forward`` called it, or the node of the backward pass.
        call: which call of this name there it was, from 1.
        operands, results: digests of its tensors and numbers.
    """

    name: str
    where: str
    call: int
    operands: str
    results: str

    def __str__(self) -> str:
        return f"{self.name} #{self.call} in {self.where}"


@dataclass(frozen=True)
class Determinism:
    """What the runs of a step said.

    Attributes:
        deterministic: all came to the same loss, gradients and buffers, bit for bit.
        runs: how many there were.
        operations: how many operators the first run called; 0 where none was looked at.
        first: the first operator whose results differed though its operands did not; None if there
            was none, or none was found.
        reason: one line for people.
    """

    deterministic: bool
    runs: int
    operations: int
    first: Operation | None
    reason: str


def check_determinism(
    model: nn.Module, forward_backward: ForwardBackward, batch: Any, *, runs: int = 2
) -> Determinism:
    """Run a micro-step several times and compare; gradients are those of the last run afterwards.

    Buffers and random state are as after one run. Where the runs differ, it is run twice more with
    every operator's tensors digested, which takes several times as long.

    Args:
        model: its gradients and buffers are compared.
        forward_backward: as of ``MicroStep``: computes the loss of a batch, calls ``backward()``.
        batch: handed to it.
        runs: at least 2; more find rarer races.

    Returns:
        The verdict. Not covered: what differs only on another machine, or in other processes.

    Raises:
        ValueError: fewer than 2 runs. TypeError: as ``MicroStep.run``.
    """
    if runs < 2:
        raise ValueError(f"runs={runs}: at least 2 are needed to compare")
    step = MicroStep(model, forward_backward, batch)
    attempts = [step.attempt(step.run()) for _ in range(runs)]
    if len({attempt.digest for attempt in attempts}) == 1:
        return Determinism(True, runs, 0, None, f"{runs} runs came to the same bits")
    traces = [_traced(model, step) for _ in range(2)]
    first = _first_difference(*traces)
    return Determinism(False, runs, len(traces[0]), first, _explained(attempts, traces, first))


def _explained(
    attempts: Sequence[Attempt], traces: Sequence[Sequence[Operation]], first: Operation | None
) -> str:
    losses = len({attempt.loss_digest for attempt in attempts})
    differ = "losses and gradients" if losses > 1 else "gradients or buffers"
    said = f"{differ} of {len(attempts)} runs differ"
    if first is not None:
        return f"{said}: {first} is not deterministic"
    if [op.name for op in traces[0]] != [op.name for op in traces[1]]:
        return f"{said}: the runs do not call the same operators"
    return f"{said}, but not while every operator was looked at: a race, or what threads share"


def _traced(model: nn.Module, step: MicroStep) -> list[Operation]:
    recorder = _Recorder()
    with _named(model, recorder), recorder:
        step.run()
    return recorder.found


def _first_difference(one: Sequence[Operation], other: Sequence[Operation]) -> Operation | None:
    for a, b in zip(one, other, strict=False):
        if (a.name, a.where) != (b.name, b.where):
            return None
        if a.operands == b.operands and a.results != b.results:
            return a
    return None


class _Recorder(TorchDispatchMode):
    """Notes every operator with digests of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.modules: list[str] = []
        self._calls: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Before the call: operators that work in place change their operands.
        operands = _digest((args, kwargs))
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not any(word in name for word in _UNINITIALISED):
            where = self._where()
            call = self._calls[name, where] = self._calls.get((name, where), 0) + 1
            self.found.append(Operation(name, where, call, operands, _digest(result)))
        return result

    def _where(self) -> str:
        node: Any = torch._C._current_autograd_node()  # None outside of a backward pass
        if node is not None:
            return f"backward of {node.name()}"
        return self.modules[-1] if self.modules else OUTSIDE


def _digest(values: Any) -> str:
    return state_digest(tree_leaves(values))


@contextmanager
def _named(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Let the recorder know which module is in its ``forward``."""
    handles = []

    def entered(name: str) -> Callable[..., None]:
        return lambda *_: recorder.modules.append(name)

    def left(*_: Any) -> None:
        recorder.modules.pop()

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entered(name or "(model)")))
            handles.append(module.register_forward_hook(left, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()

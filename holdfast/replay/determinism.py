"""A check that a micro-step is deterministic, which every audit by repetition relies on.

Several runs of a step from the same parameters, buffers, batch and random state are compared. If
they differ, two further runs are compared operator by operator. The first operator whose results
differ although its operands do not is where the program, or the machine, is not deterministic.
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
# Operators whose results are whatever was in memory.
_UNINITIALISED = ("empty", "new_empty", "resize_", "_efficientzerotensor")


@dataclass(frozen=True)
class Operation:
    """One call of an operator in a run.

    Attributes:
        name: Name of the operator, for example ``aten.mm.default``.
        where: Module whose ``forward`` called it, or node of the backward pass.
        call: Number of this call among those of the same name in the same place, from 1.
        operands: Digest of the tensors and numbers that it got.
        results: Digest of the tensors and numbers that it returned.
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
    """The result of ``check_determinism``.

    Attributes:
        deterministic: True if all runs gave the same loss, gradients and buffers, bit for bit.
        runs: Number of runs.
        operations: Number of operators of the first traced run; 0 if no run was traced.
        first: First operator whose results differed although its operands did not; None if there
            was none.
        reason: Explanation in one sentence.
    """

    deterministic: bool
    runs: int
    operations: int
    first: Operation | None
    reason: str


def check_determinism(
    model: nn.Module, forward_backward: ForwardBackward, batch: object, *, runs: int = 2
) -> Determinism:
    """Run a micro-step several times and compare the results bit for bit.

    Afterwards the gradients are those of the last run; buffers and random state are as after one
    run. If the runs differ, the step is run twice more with a digest of every operator's tensors,
    which takes several times as long.

    Args:
        model: The model whose gradients and buffers are compared.
        forward_backward: Computes the loss of a batch, calls ``backward()`` and returns the loss.
        batch: Argument of ``forward_backward``.
        runs: Number of runs, at least 2; more runs find rarer races.

    Returns:
        The result. Not covered: differences between machines or between processes.

    Raises:
        ValueError: Fewer than 2 runs.
        TypeError: ``forward_backward`` does not return a one-element tensor.
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
    """Records every operator with digests of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []
        self.modules: list[str] = []
        self._calls: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
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


def _digest(values: object) -> str:
    return state_digest(tree_leaves(values))


@contextmanager
def _named(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Let the recorder know which module's ``forward`` is running."""
    handles = []

    def entered(name: str) -> Callable[..., None]:
        return lambda *_: recorder.modules.append(name)

    def left(*_: object) -> None:
        recorder.modules.pop()

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(entered(name or "(model)")))
            handles.append(module.register_forward_hook(left, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()

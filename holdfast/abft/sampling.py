"""Verification of a share of a model's passes, chosen by each protection for itself.

A *pass* is one outermost call of a module of the model, with the backward pass from its outputs.
Within a ``Guard`` the step's number decides, so that all passes of a step and its repetitions are
treated alike; elsewhere passes are numbered for each module that is called from outside, those in
training mode apart from the others. Nothing depends on optimizers, as a step may have several.

The decision holds for the thread that runs the pass, also for its products between this pass and
the next. Products of other threads and models are not affected. A backward pass takes the decision
of the forward pass whose output it starts from, and a recomputed forward (activation checkpointing)
that of the original.

A model that is compiled as a whole runs without its hooks. It is verified in full until an
optimizer steps; then rounds of the optimizers are numbered in place of passes.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from holdfast import events
from holdfast.abft.frequency import Executions, due, recomputing_for
from holdfast.abft.policy import is_collecting


@dataclass(eq=False)
class _Pass:
    """A pass and the decision about it, which ends with the protection."""

    sampler: "Sampler"
    chosen: bool

    @property
    def due(self) -> bool:
        return self.chosen and self.sampler.active


@dataclass
class _Decisions(threading.local):
    """The passes whose decisions are in force on this thread."""

    running: list[_Pass] = field(default_factory=list)  # of nested models, innermost last
    latest: list[_Pass] = field(default_factory=list)  # that ran last, or whose backward runs
    in_force: bool = False

    def wanted(self) -> bool:
        """Return whether a running pass is verified, or else one of the latest."""
        return any(each.due for each in self.running or self.latest)

    def apply(self, core: ModuleType) -> None:
        """Make the core verify this thread's products, or not."""
        wanted = self.wanted()
        if wanted != self.in_force:
            core.change_thread_depth(1 if wanted else -1)
            self.in_force = wanted


@dataclass
class Passes:
    """How many passes of the model were seen, and how many of them were verified."""

    seen: int = 0
    verified: int = 0

    def count(self, verified: bool) -> None:
        """Count one pass."""
        self.seen += 1
        self.verified += verified


_thread = _Decisions()


class Sampler:
    """Decides which passes of one model are verified, and has the core verify them.

    Args:
        core: The native core, as ``interception()`` returns it.
        frequency: Share of passes to verify, from 0 to 1.
        verify_all: Turns the verification of every thread's products on or off.
    """

    def __init__(
        self, core: ModuleType, frequency: float, verify_all: Callable[[bool], None]
    ) -> None:
        self.passes, self.active = Passes(), True
        self._core, self._frequency, self._verify_all = core, frequency, verify_all
        self._entered = threading.local()
        self._executions: dict[tuple[int, bool], Executions] = {}
        self._seen_by_hooks = 0
        self._seen_before: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._round, self._all = 0, due(0, frequency)
        verify_all(self._all)

    def hook(self, module: nn.Module, number: int) -> list[torch.utils.hooks.RemovableHandle]:
        """Register the hooks that tell when a module runs."""
        return [
            module.register_forward_pre_hook(_Hook(self, number, enters=True)),
            module.register_forward_hook(_Hook(self, number, enters=False), always_call=True),
        ]

    def enter(self, module: nn.Module, number: int) -> None:
        """Begin a pass if no other module of the model runs on this thread."""
        stack = self._stack()
        if stack and stack[0][0] == number:  # an interrupt skipped the end of an earlier pass
            stack.clear()
        begun = None if stack else self._begin(number, module.training)
        stack.append((number, begun))

    def leave(self, number: int, output: object) -> None:
        """End the pass that began with this module, if any."""
        stack = self._stack()
        # An exception may have skipped the end of modules inside this one, or its beginning.
        found = next((i for i in reversed(range(len(stack))) if stack[i][0] == number), None)
        if found is None:
            return
        begun = stack[found][1]
        del stack[found:]
        if begun is not None:
            self._end(begun, output)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer changed parameters of the model, for passes that no hook saw."""
        seen, rounds = self._seen_before.get(optimizer, (0, 0))
        hidden = seen == self._seen_by_hooks
        rounds += hidden
        self._seen_before[optimizer] = self._seen_by_hooks, rounds
        if rounds > self._round:  # the first optimizer of this round
            self.passes.count(self._all)
            self._round = rounds
            self._decide_for_all(due(rounds, self._frequency))
            _thread.latest = [each for each in _thread.latest if each.sampler is not self]
            _thread.apply(self._core)

    def close(self) -> None:
        """End the decisions; another thread whose latest pass was due stops at its next pass."""
        self.active = False
        _thread.apply(self._core)

    def _stack(self) -> list[tuple[int, _Pass | None]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[tuple[int, _Pass | None]] = self._entered.stack
        return stack

    def _begin(self, number: int, training: bool) -> _Pass | None:
        executions = self._executions.setdefault((number, training), Executions())
        recomputed = recomputing_for() is not None
        count = executions.recomputed() if recomputed else executions.number()
        if count is None:  # a part of a pass, recomputed in its backward
            return None
        if training and is_collecting() and events.current_step() >= 0:
            count = events.current_step()
        begun = _Pass(self, due(count, self._frequency))
        _thread.running = [each for each in _thread.running if each.sampler is not self]
        if not _thread.running:
            _thread.latest = []
        _thread.running.append(begun)
        _thread.latest.append(begun)
        _thread.apply(self._core)
        if not recomputed:
            self._seen_by_hooks += 1
            self.passes.count(_thread.wanted())
            self._decide_for_all(False)
        return begun

    def _end(self, begun: _Pass, output: object) -> None:
        if begun in _thread.running:
            _thread.running.remove(begun)
        if not _thread.running and torch.is_grad_enabled():
            tensors = (t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor))
            for node in {t.grad_fn for t in tensors if t.grad_fn is not None}:
                node.register_prehook(partial(self._backward_begins, _thread.latest))
        _thread.apply(self._core)

    def _backward_begins(self, passes: list[_Pass], gradients: object) -> None:
        _thread.latest = passes
        _thread.apply(self._core)

    def _decide_for_all(self, wanted: bool) -> None:
        if wanted != self._all:
            self._all = wanted
            self._verify_all(wanted)


class _Hook:
    """Module hook that tells a sampler that the module begins or ends."""

    def __init__(self, sampler: Sampler | None, number: int, *, enters: bool) -> None:
        self._sampler, self._number, self._enters = sampler, number, enters

    def __call__(self, module: nn.Module, args: object, output: object = None) -> None:
        if self._sampler is None or torch.compiler.is_compiling():
            return
        if self._enters:
            self._sampler.enter(module, self._number)
        else:
            self._sampler.leave(self._number, output)

    def __reduce__(self) -> tuple[object, ...]:
        # The hook of a copied or unpickled module, which is not protected, does nothing.
        return partial(_Hook, None, enters=self._enters), (self._number,)

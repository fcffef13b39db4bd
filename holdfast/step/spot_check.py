"""Spot checks: a rotating share of a model's modules is computed again in each step."""

import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import RemovableHandle

from holdfast import config, events
from holdfast.abft.gemm import compiled
from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind
from holdfast.protection import as_called
from holdfast.replay.module_calls import Call, NotRepeatableError

SHARE = 1 / 64  # of the modules, in each step
LISTED = 64  # steps after which the modules are listed anew
TRIED = 3  # turns for which a graph was compiled anew: Dynamo does so for each set of hooks

_LEFT_OUT = (nn.Linear, nn.modules.conv._ConvNd, nn.Identity, nn.Sequential, nn.ModuleList)
_UNVERIFIED = (nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)  # have matrices, too
# Those whose kernels add in no fixed order on CUDA (torch.use_deterministic_algorithms).
_UNSTEADY: tuple[type[nn.Module], ...] = (
    *(nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._MaxUnpoolNd, nn.AvgPool3d),
    *(nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.Upsample, nn.EmbeddingBag, nn.RNNBase),
    *(nn.NLLLoss, nn.CrossEntropyLoss, nn.CTCLoss),
    *(nn.modules.padding._ReflectionPadNd, nn.modules.padding._ReplicationPadNd),
)


@dataclass(eq=False)
class _Unit:
    """A module that is computed again, and what is known of it."""

    name: str
    module: nn.Module
    why_not: str = ""
    forward_only: bool = False
    had_turn: bool = False
    ran: bool = False  # by itself, in a turn
    clones: bool = False  # it changes its inputs in place
    call: Call | None = None
    equal: Counter[str] = field(default_factory=Counter)  # comparisons, by direction
    unequal: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def left_out_if_it_fails(self) -> Iterator[None]:
        """Leave the module out from now on if its check cannot be made: it costs no training."""
        try:
            yield
        except Exception as error:
            known = isinstance(error, NotRepeatableError)
            self.why_not, self.call = str(error) if known else f"its check failed: {error!r}", None
            if not known or self.unequal:
                detail = {"op": self.name, "detail": {"error": self.why_not}}
                events.record(EventKind.CHECK_FAILED, detector="recomputation", **detail)
                with suppress(Warning):  # where warnings are errors
                    warnings.warn(
                        f"{self.name} is not checked any more: {self.why_not}", stacklevel=2
                    )


class SpotCheck:
    """Computes a share of a model's modules again in each step, and compares all bits.

    Modules without modules of their own take turns: a call's results, and the gradients that leave
    it in backward, are compared with those of a copy of the module. Those that multiply by matrices
    are left out, as ``protect`` verifies products, and classes that are not of ``torch.nn``; with a
    share of 1 only linear layers and convolutions are. Guarantees and what is not covered:
    ``docs/fault_model.md``.

    Args:
        model: The model.
        share: Share of the modules, 0 to 1; by default ``guard.spot`` of the config file, or 1/64.
        seed: Chooses their order, which is another one on each rank.

    Raises:
        ConfigError: The share is out of range.
    """

    def __init__(self, model: nn.Module, share: float | None = None, *, seed: int = 0) -> None:
        self.share = config.value("guard.spot", share, SHARE)
        if not 0 <= self.share <= 1:
            raise ConfigError(f"spot = {share!r} must be a share of the modules, 0 to 1")
        self._model, self._seed = model, seed
        self._units, self._turns = dict[int, _Unit](), list[_Unit]()
        self._listed, self._unlisted = -1, dict[str, str]()
        self._waiting, self._found = list[tuple[_Unit, Call]](), list[Event]()
        self._compiled = 0  # turns for which a graph was compiled anew

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compute the modules whose turn it is again in a pass of this thread."""
        units = self.due(events.current_step()) if self.share else []
        handles = [handle for unit in units for handle in self._hook(unit)]
        graphs = compiled.graphs_compiled()
        try:
            yield
            self._compare_backward()
        except BaseException:
            self._found.clear()
            raise
        finally:
            self._waiting.clear()
            for unit in units:
                unit.call = None
            hidden = any(not unit.ran for unit in units)
            self._compiled += hidden and compiled.graphs_compiled() > graphs
            for handle in handles:
                handle.remove()

    def check(self) -> list[Event]:
        """Return what was found wrong since the last check."""
        found, self._found = self._found, []
        return found

    def coverage(self) -> dict[str, Any]:
        """Return which modules take turns and which are left out, as plain values."""
        self._list_modules()
        units = list(self._units.values())
        left_out = dict(self._unlisted)
        idle = (unit.name for unit in units if unit.had_turn and not unit.equal)
        left_out |= dict.fromkeys(idle, "it did not run by itself in its turn")
        if self._compiled >= TRIED:
            reason = f"it may be compiled: for {TRIED} turns a graph was compiled anew"
            left_out |= {unit.name: reason for unit in units if not unit.ran}
        left_out |= {unit.name: "only forward is repeated" for unit in units if unit.forward_only}
        left_out |= {unit.name: unit.why_not for unit in units if unit.why_not}
        taken, checked = sum(not u.why_not for u in units), sum(u.equal.total() for u in units)
        return {"share": self.share, "modules": taken, "checked": checked, "left_out": left_out}

    def due(self, step: int) -> list[_Unit]:
        """Return the modules whose turn it is in a step."""
        if step // LISTED != self._listed:
            self._listed = step // LISTED
            self._list_modules()
        above, below = (len(self._turns) * self.share).as_integer_ratio()
        taken = range(step * above // below, (step + 1) * above // below)
        chosen = [self._turns[number % len(self._turns)] for number in taken]
        some = self._compiled < TRIED
        return [unit for unit in chosen if not unit.why_not and (some or unit.ran)]

    def _list_modules(self) -> None:
        self._unlisted.clear()
        found = {id(module): _Unit(name, module) for name, module in self._leaves(self._model, "")}
        self._units = {key: self._units.get(key, unit) for key, unit in found.items()}
        self._turns = list(self._units.values())
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        random.Random(f"{self._seed}/spot/{rank}").shuffle(self._turns)

    def _leaves(self, module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        is_compiled = "_orig_mod" in module._modules or module._compiled_call_impl is not None
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            self._unlisted[name or type(module).__name__] = "it is compiled"
        elif module._modules:
            for part, child in module.named_children():
                wrapped = part == "module" and not name
                yield from self._leaves(child, "" if wrapped else f"{name}.{part}".lstrip("."))
        elif self.share < 1 and not _is_torchs(module):
            # It may write into its inputs, or count its calls, where torch cannot see it.
            self._unlisted[name or type(module).__name__] = "its class is not of torch.nn"
        elif not self._is_left_out(module):
            yield name or type(module).__name__, module

    def _is_left_out(self, module: nn.Module) -> bool:
        """Return whether a module has nothing to check, or its products are verified otherwise."""
        if isinstance(module, _LEFT_OUT) or type(module).__module__.startswith("holdfast."):
            return True
        matrices = any(each.ndim > 1 for each in module.parameters())
        return matrices and self.share < 1 and not isinstance(module, _UNVERIFIED)

    def _hook(self, unit: _Unit) -> Iterator[RemovableHandle]:
        module, begins, unit.had_turn = unit.module, _Hook(self._begins, unit), True
        unit.clones |= getattr(module, "inplace", False) is True
        if isinstance(module, _UNSTEADY) and any(e.is_cuda for e in self._model.parameters()):
            unit.why_not = "its backward pass is not deterministic on CUDA"
        if any(hasattr(parameter, "placements") for parameter in module.parameters()):
            unit.why_not = "its parameters are shards, and whole only while it runs"
        yield module.register_forward_pre_hook(begins, with_kwargs=True)
        yield module.register_forward_hook(_Hook(self._returned, unit), prepend=True)
        yield module.register_forward_hook(_Hook(self._ended, unit))

    def _begins(self, unit: _Unit, args: Any, kwargs: Any) -> None:
        unit.call, unit.ran = None, True
        if self._is_of_pass() and not unit.why_not:
            self._compare_backward()
            clones = unit.clones or not _is_torchs(unit.module)
            unit.call = Call(unit.module, (args, kwargs), clones=clones)

    def _returned(self, unit: _Unit, _: object, output: object) -> None:
        if unit.call is not None:
            unit.call.returned(output)

    def _ended(self, unit: _Unit, *_: object) -> None:
        call, unit.call = unit.call, None
        changed = call.changed() if call is not None else ""
        unit.clones |= changed == "inputs"  # from the next call on
        if call is None or changed:
            return
        with as_called(unit.module):
            digests = call.forward_digests()
        self._judge(unit, "forward", digests)
        if digests[0] == digests[1]:
            unit.forward_only |= not call.watch_backward()
            self._waiting += [(unit, call)] if call.is_watched else []

    def _is_of_pass(self) -> bool:
        """Return whether a module runs in forward, as itself."""
        modes: Any = _get_current_dispatch_mode(), torch._C._functorch.peek_interpreter_stack()
        if modes != (None, None) or torch.is_inference_mode_enabled():
            return False
        if nn.modules.module._global_forward_hooks:  # they come first, and may change the result
            return False
        recomputes = torch._C._current_graph_task_id() != -1  # in activation checkpointing
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return not recomputes and not captures

    def _compare_backward(self) -> None:
        """Compare the backward passes that have ended."""
        ended = [each for each in self._waiting if each[1].has_passed()]
        self._waiting = [each for each in self._waiting if not each[1].has_passed()]
        for unit, call in ended:
            with unit.left_out_if_it_fails():
                if not unit.why_not:
                    self._judge(unit, "backward", call.backward_digests())

    def _judge(self, unit: _Unit, direction: str, digests: Sequence[object]) -> None:
        if digests[0] == digests[1]:
            unit.equal[direction] += 1
            return
        unit.unequal[direction] += 1
        if not unit.equal[direction] and unit.unequal[direction] > 1:
            raise NotRepeatableError(f"its {direction} never gave the same bits when repeated")
        wrong = "module" if digests[1] == digests[2] else "unknown"
        wrong = "recomputation" if digests[0] == digests[2] else wrong
        weights = chain(unit.module.parameters(), self._model.parameters())
        device = str(next((each.device for each in weights), "cpu"))
        detail = {"pass": direction, "wrong": wrong, "class": type(unit.module).__name__}
        known: dict[str, Any] = {"op": unit.name, "device": device, "detail": detail}
        event = events.record(EventKind.MODULE_FAULT, detector="recomputation", **known)
        self._found += [event] if wrong != "recomputation" else []


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


class _Hook:
    """Hook of a module that is not part of what torch.compile makes, nor of a copied module."""

    def __init__(self, act: Callable[..., None] | None = None, unit: _Unit | None = None) -> None:
        self._act, self._unit, self._thread = act, unit, threading.get_ident()

    def __call__(self, _: nn.Module, *args: Any) -> None:
        if self._unit is None or self._act is None or torch.compiler.is_compiling():
            return
        if threading.get_ident() == self._thread:  # another thread may call the module, too
            with self._unit.left_out_if_it_fails():
                self._act(self._unit, *args)

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, ()

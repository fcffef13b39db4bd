"""Observation or replacement of the gradients of one pass on this rank, before any reduction."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.digest.tensors import state_digest, tensor_digest
from holdfast.replay.buffers import Buffers, put_values, unwrapped
from holdfast.replay.buffers import Values as BufferValues
from holdfast.replay.parameters import is_fsdp, parameters_of
from holdfast.rng import rng_state, set_rng_state

Values = Mapping[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Start:
    """The random state and the buffers with which a pass begins.

    ``buffers`` are those of this process, or the values of another rank's.
    """

    rng: Mapping[str, Any]
    buffers: Buffers | BufferValues

    @classmethod
    def capture(cls, model: nn.Module) -> "Start":
        """Save the present random state and the model's buffers."""
        return cls(rng_state(), Buffers(model))

    def restore(self, model: nn.Module) -> list[str]:
        """Restore the random state and the model's buffers; return as ``Buffers.restore``."""
        set_rng_state(self.rng)
        if isinstance(self.buffers, Buffers):
            return self.buffers.restore(model)
        put_values(model, self.buffers)
        return []

    def values(self) -> BufferValues:
        """Return the values of the buffers, which can be sent to another rank."""
        return self.buffers.values() if isinstance(self.buffers, Buffers) else self.buffers


@dataclass
class LocalGradients:
    """The gradients of one pass on this rank, in the order in which they were computed.

    Attributes:
        starts: Start of each forward pass of the model, which begins an accumulation group.
        digests: Digests of the gradients, by accumulation group and parameter.
        values: Gradients of each parameter in each backward pass; empty unless they are kept.
    """

    starts: list[Start] = field(default_factory=list)
    digests: defaultdict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    values: defaultdict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def of_group(self, group: int) -> str:
        """Return one digest of all gradients of an accumulation group."""
        return state_digest(dict(sorted(self.digests[group].items())))


@contextmanager
def local_gradients(
    model: nn.Module, *, keep: bool = False, right: Values | None = None
) -> Iterator[LocalGradients]:
    """Observe each gradient that reaches a parameter, before it is accumulated or reduced.

    Covers plain modules, DDP, FSDP2 (whose gradients are those of the gathered parameters) and
    DTensors, of which this rank's part is observed.

    Args:
        model: The model as it is called in the pass.
        keep: True to keep the gradients themselves beside their digests.
        right: ``LocalGradients.values`` of another pass. They replace the gradients of this pass,
            so that the other pass's gradients are reduced and applied.
    """
    found = LocalGradients()
    with ExitStack() as stack:
        hooks = _Hooks(stack, found, keep, right)
        inner = unwrapped(model)
        hooks.add(inner, "")
        for name, module in inner.named_modules():
            if is_fsdp(module):
                # The gathered parameters exist only during the module's forward pass.
                entered = partial(hooks.enter, name)
                stack.callback(module.register_forward_pre_hook(entered).remove)
        started = inner.register_forward_pre_hook(
            lambda *_: found.starts.append(Start.capture(inner))
        )
        stack.callback(started.remove)
        yield found


class _Hooks:
    """Registers one gradient hook for each parameter."""

    def __init__(
        self, stack: ExitStack, found: LocalGradients, keep: bool, right: Values | None
    ) -> None:
        self._stack, self._found = stack, found
        self._keep, self._right = keep, right
        self._hooked: dict[int, nn.Parameter] = {}
        self._passes: defaultdict[str, int] = defaultdict(int)

    def enter(self, name: str, module: nn.Module, _: object) -> None:
        """Add the gathered parameters of an FSDP2 module at the start of its forward pass."""
        self.add(module, f"{name}." if name else "")

    def add(self, module: nn.Module, prefix: str) -> None:
        """Add the parameters of a module that have no hook yet."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked[id(parameter)] = parameter
                seen = partial(self._seen, prefix + name)
                self._stack.callback(parameter.register_hook(seen).remove)

    @torch.no_grad()
    def _seen(self, name: str, grad: torch.Tensor) -> torch.Tensor | None:
        number = self._passes[name]
        self._passes[name] += 1
        group = self._found.digests[max(0, len(self._found.starts) - 1)]
        group[name] = group.get(name, "") + tensor_digest(grad)
        if self._keep:
            self._found.values[name].append(local_of(grad).clone())
        return None if self._right is None else _replaced(grad, self._right[name][number])


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; a plain tensor as it is."""
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local.detach()


def _replaced(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.is_sparse:
        return value.clone()
    fresh = grad.detach().clone()
    local_of(fresh).copy_(value)
    return fresh


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Keep DDP from reducing gradients and from broadcasting buffers while the context is open.

    FSDP2 continues to reduce, because it would keep unreduced gradients for its next reduction.
    All ranks therefore have to run such a pass together and discard what it leaves in ``grad``.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                before = module.require_forward_param_sync
                stack.callback(setattr, module, "require_forward_param_sync", before)
                stack.enter_context(module.no_sync())
                module.require_forward_param_sync = False
        yield


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and random state when the context ends."""
    parameters = parameters_of(model)
    grads = [parameter.grad for parameter in parameters]
    start = Start.capture(model)
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        start.restore(model)
        for parameter, grad in zip(parameters_of(model), grads, strict=True):
            parameter.grad = grad

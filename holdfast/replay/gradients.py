"""What a pass adds to each gradient on this rank alone, before any reduction: seen, or replaced."""

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
from holdfast.replay.rng import RngState

Values = Mapping[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Start:
    """Random state and buffers that a pass begins with."""

    rng: RngState
    buffers: list[torch.Tensor]

    @classmethod
    def capture(cls, model: nn.Module) -> "Start":
        """As they are now."""
        return cls(RngState.capture(), [buffer.detach().clone() for buffer in model.buffers()])

    def restore(self, model: nn.Module) -> None:
        """Put them back, as often as wanted."""
        self.rng.restore()
        put_buffers(model, self.buffers)


@dataclass
class LocalGradients:
    """The gradients of one pass on this rank, in the order in which they came.

    Attributes:
        starts: one for each forward pass of the model: the accumulation groups.
        digests: of each group, by parameter.
        values: by parameter, its gradient in each backward pass; empty unless they are kept.
    """

    starts: list[Start] = field(default_factory=list)
    digests: defaultdict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    values: defaultdict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def of_group(self, group: int) -> str:
        """One digest for the gradients of a group."""
        return state_digest(dict(sorted(self.digests[group].items())))


def put_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    """Copy values into a model's buffers."""
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), values, strict=True):
            buffer.copy_(value)


@contextmanager
def local_gradients(
    model: nn.Module, *, keep: bool = False, right: Values | None = None
) -> Iterator[LocalGradients]:
    """See each gradient that reaches a parameter, before it is added up or reduced.

    Works alike for plain modules, DDP and FSDP2 (whose gradients are those of the gathered
    parameters), and for DTensors, of which it sees this rank's part.

    Args:
        model: as it is called in the pass.
        keep: whether the gradients themselves are wanted, not only their digests.
        right: values of an earlier pass, ``LocalGradients.values``, to be put in the place of this
            one's: what is reduced then is what that pass computed.
    """
    found = LocalGradients()
    with ExitStack() as stack:
        hooks = _Hooks(stack, found, keep, right)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        hooks.add(inner, "")
        for name, module in inner.named_modules():
            if _is_fsdp(module):
                # Only in its forward pass a module has the gathered parameters.
                entered = partial(hooks.enter, name)
                stack.callback(module.register_forward_pre_hook(entered).remove)
        started = inner.register_forward_pre_hook(
            lambda *_: found.starts.append(Start.capture(inner))
        )
        stack.callback(started.remove)
        yield found


class _Hooks:
    """Hooks on parameters, each hooked once."""

    def __init__(
        self, stack: ExitStack, found: LocalGradients, keep: bool, right: Values | None
    ) -> None:
        self._stack, self._found = stack, found
        self._keep, self._right = keep, right
        self._hooked: dict[int, nn.Parameter] = {}
        self._passes: defaultdict[str, int] = defaultdict(int)

    def enter(self, name: str, module: nn.Module, _: Any) -> None:
        self.add(module, f"{name}." if name else "")

    def add(self, module: nn.Module, prefix: str) -> None:
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
    """This rank's part of a tensor."""
    local: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local.detach()


def _replaced(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    fresh = grad.detach().clone()
    local_of(fresh).copy_(value)
    return fresh


def _is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Passes that leave gradients of DDP where they are, and take no buffers from rank 0.

    FSDP2 would keep unreduced gradients for its next reduction, so it goes on reducing them: all
    ranks must make such a pass together, and forget what it leaves in ``grad``.
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
    """Keep gradients, buffers and random state as they are through passes made meanwhile."""
    grads = [parameter.grad for parameter in model.parameters()]
    start = Start.capture(model)
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        start.restore(model)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad

"""Which wrappers reduce gradients in a backward pass, read and set as frameworks do.

Gradient accumulation reduces in the last micro-batch only: DDP's ``no_sync`` and FSDP2's
``set_requires_gradient_sync`` set flags, which a repetition of the step has to set alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.replay.parameters import is_fsdp

_FSDP2 = ("reduce_grads", "all_reduce_grads")


class Reductions:
    """The flags of a model's wrappers: DDP, and each group of parameters of FSDP2."""

    def __init__(self, model: nn.Module) -> None:
        self._flags: list[tuple[object, str]] = []
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self._flags.append((module, "require_backward_grad_sync"))
            elif is_fsdp(module):
                state: Any = module
                groups = state._get_fsdp_state()._fsdp_param_groups
                self._flags += [(group, name) for group in groups for name in _FSDP2]

    def flags(self) -> list[bool]:
        """Return the present flags."""
        return [getattr(*flag) for flag in self._flags]

    @contextmanager
    def set_to(self, flags: list[bool]) -> Iterator[None]:
        """Set the flags that ``flags`` returned, until the context ends."""
        before = self.flags()
        try:
            self._set(flags)
            yield
        finally:
            self._set(before)

    def _set(self, flags: list[bool]) -> None:
        for (owner, name), value in zip(self._flags, flags, strict=True):
            setattr(owner, name, value)

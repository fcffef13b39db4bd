"""Learning rates and other settings that a loop writes into its optimizer between two steps.

A roll-back loads the settings of the snapshot. A schedule repeats itself from there, but what the
loop wrote by hand for a step, before the step began, belongs to that step and is written again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.optimizers import Optimizers

Edits = Sequence[Mapping[str, Any]]  # the new values, by name, of each parameter group


class GroupSettings:
    """Follows the settings in the parameter groups of an optimizer.

    Args:
        optimizer: One optimizer, or several.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | Optimizers) -> None:
        self._optimizer = optimizer
        self.settle()

    def settle(self) -> None:
        """Take the present settings for those that the latest step has left."""
        self._left = [{k: _mark(v) for k, v in group.items()} for group in self._groups()]

    def edits(self) -> Edits:
        """Return what was changed since ``settle``."""
        return [
            {name: _copy(value) for name, value in group.items() if _differs(value, left.get(name))}
            for group, left in zip(self._groups(), self._left, strict=False)
        ]

    def repeat(self, edits: Edits) -> None:
        """Change the settings as the loop did."""
        for group, changed in zip(self._optimizer.param_groups, edits, strict=False):
            for name, value in changed.items():
                held = group.get(name)
                if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
                    with torch.no_grad():
                        held.copy_(value)
                else:
                    group[name] = _copy(value)

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def _mark(value: Any) -> Any:
    """Return what tells later on whether a value was changed, without waiting for a device."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def _differs(value: Any, mark: Any) -> bool:
    now = _mark(value)
    return type(now) is not type(mark) or bool(now != mark)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value

"""The update of one parameter by an optimizer, computed again from the state before it."""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from holdfast.digest.tensors import state_digest
from holdfast.replay.rerun import MAX_ATTEMPTS

Values = dict[str, Any]  # what an update leaves: the parameter, and its state by name

_PLAIN = (torch.Tensor, nn.Parameter)
_MIXING = {"Muon", "Adafactor"}  # combine elements: updates of a DTensor need other ranks


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Return why updates by an optimizer cannot be computed again; an empty string if they can."""
    name, step = type(optimizer).__name__, getattr(type(optimizer), "step", why_not)
    known = inspect.unwrap(step).__module__.startswith("torch.optim.") and name != "LBFGS"
    return "" if known else f"{name}.step is not one of torch.optim that updates each parameter"


def is_repeatable(optimizer: torch.optim.Optimizer, parameter: Any) -> bool:
    """Return whether the update of a parameter can be computed again on this rank alone.

    A DTensor's can if the optimizer treats elements one by one and the gradient is divided alike.
    """
    if parameter.grad is None or parameter.grad.is_sparse:
        return False
    if type(parameter) in _PLAIN:
        return bool(parameter.numel())
    places = getattr(parameter, "placements", ())
    if not places or places != getattr(parameter.grad, "placements", ()):
        return False
    if any(place.is_partial() for place in places) or not parameter.to_local().numel():
        return False
    return not _MIXING & {kind.__name__ for kind in type(optimizer).__mro__}


class Sample:
    """A parameter with its gradient and its state as they are before an optimizer's step.

    Args:
        optimizer: An optimizer for which ``why_not`` is empty.
        group: The group of the parameter.
        parameter: A parameter that ``is_repeatable``. Of a DTensor this rank's shard counts.

    Not covered: what a device gets wrong twice alike, and what was wrong before the step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
    ) -> None:
        assert parameter.grad is not None
        self.parameter, self._optimizer, self._group = parameter, optimizer, dict(group)
        if group.get("foreach", False) is None and not group.get("fused"):
            # For the parameter alone torch might choose otherwise than for its group.
            with_gradient = [each for each in group["params"] if each.grad is not None]
            differentiable = bool(group.get("differentiable", False))
            chosen = _default_to_fused_or_foreach(with_gradient, differentiable, use_fused=False)
            self._group["foreach"] = chosen[1]
        self._value, self._gradient = parameter.detach().clone(), parameter.grad.detach().clone()
        self._state = _copied(optimizer.state.get(parameter, {}))
        self._seen: list[str] = []  # digests of the update and of its recomputations

    def now(self) -> Values:
        """Return what the optimizer has left."""
        return {
            "parameter": self.parameter.detach(),
            **self._optimizer.state.get(self.parameter, {}),
        }

    def again(self) -> Values:
        """Compute the update again, by the same implementation, on copies."""
        parameter = nn.Parameter(self._value.clone())
        parameter.grad = self._gradient.clone()
        optimizer: Any = object.__new__(type(self._optimizer))
        vars(optimizer).update(vars(self._optimizer))
        optimizer.param_groups = [{**self._group, "params": [parameter]}]
        optimizer.state = defaultdict(dict, {parameter: _copied(self._state)})
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer)  # without its hooks
        return {"parameter": parameter.detach(), **optimizer.state[parameter]}

    def differing(self) -> list[str]:
        """Compute the update again; return the names of the values that are not the same bits."""
        now, again = self.now(), self._again_or_once_more()
        self._seen = [state_digest(now), state_digest(again)]
        names = sorted({*now, *again}) if self._seen[0] != self._seen[1] else []
        return [n for n in names if state_digest(now.get(n)) != state_digest(again.get(n))]

    def settle(self) -> tuple[bool, bool]:
        """Compute an update that was ``differing`` again until two results are equal.

        Returns:
            Whether the update was wrong, and whether the right one is in place now.
        """
        while len(self._seen) < MAX_ATTEMPTS:
            values = self._again_or_once_more()
            self._seen.append(state_digest(values))
            if self._seen[-1] == self._seen[0]:
                return False, True
            if self._seen[-1] in self._seen[:-1]:
                self._put(values)
                return True, state_digest(self.now()) == self._seen[-1]
        return True, False

    def _again_or_once_more(self) -> Values:
        """Compute the update again, once more if that raises: a fault may have been the cause."""
        try:
            return self.again()
        except Exception:
            return self.again()

    @torch.no_grad()
    def _put(self, values: Values) -> None:
        held = self.now()
        for name, value in values.items():
            if isinstance(held.get(name), torch.Tensor):
                held[name].copy_(value)
            else:
                self._optimizer.state[self.parameter][name] = value


def _copied(state: Mapping[str, Any]) -> Values:
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state.items()}

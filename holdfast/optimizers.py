"""Several optimizers, or several learning-rate schedules, that step together as one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import ConfigError

Groups = list[dict[str, Any]]


class Optimizers:
    """Several optimizers that step together, in the place of one.

    ``Guard`` and ``Snapshots`` take it as they take an optimizer. Its ``param_groups``, ``state``
    and ``state_dict`` are those of all its optimizers, in the order in which they were given.

    Args:
        *optimizers: At least one; no parameter may be in two of them.

    Not covered: optimizers that step at different times, such as the two of a GAN that take turns,
    by ``Guard.step``, which applies all of them. With ``Guard.micro_step`` the loop applies one.

    Raises:
        ConfigError: There is no optimizer, an argument is not one, or two share a parameter.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        wrong = [type(each).__name__ for each in optimizers if not hasattr(each, "param_groups")]
        if wrong or not optimizers:
            given = ", ".join(wrong) or "nothing"
            raise ConfigError(f"Optimizers({given}): give torch optimizers, one after the other")
        self.optimizers = optimizers
        held = [id(p) for group in self.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            raise ConfigError(
                f"{len(held) - len(set(held))} parameters are in two of the optimizers, which "
                "would both update them: give each parameter to one optimizer"
            )

    @property
    def param_groups(self) -> Groups:
        """The parameter groups of all optimizers."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of each parameter, in all optimizers."""
        return {key: value for each in self.optimizers for key, value in each.state.items()}

    def step(self) -> None:
        """Apply all optimizers, in order."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Empty the gradients of all parameters."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one optimizer with all parameters would."""
        state: dict[int, Any] = {}
        groups: Groups = []
        for each in self.optimizers:
            one, first = each.state_dict(), _parameters_in(groups)
            state |= {first + number: value for number, value in one["state"].items()}
            groups += _renumbered(one["param_groups"], first)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` of the same optimizers returned.

        Raises:
            ValueError: The state has another number of groups; nothing was loaded.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} groups, and the optimizers {len(self.param_groups)}"
            )
        taken = 0
        for each in self.optimizers:
            first = _parameters_in(groups[:taken])
            own = groups[taken : taken + len(each.param_groups)]
            taken += len(own)
            last = first + _parameters_in(own)
            state = {n - first: v for n, v in state_dict["state"].items() if first <= n < last}
            each.load_state_dict({"state": state, "param_groups": _renumbered(own, -first)})


def _parameters_in(groups: Groups) -> int:
    return sum(len(group["params"]) for group in groups)


def _renumbered(groups: Groups, offset: int) -> Groups:
    return [{**group, "params": [offset + n for n in group["params"]]} for group in groups]


AnyOptimizer = torch.optim.Optimizer | Optimizers | Sequence[torch.optim.Optimizer]


def as_one(optimizer: AnyOptimizer) -> torch.optim.Optimizer | Optimizers:
    """Return an optimizer as it is, and a list of them as one."""
    return Optimizers(*optimizer) if isinstance(optimizer, Sequence) else optimizer


def each_of(optimizer: torch.optim.Optimizer | Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that step together, usually one."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else (optimizer,)


def innermost_of(
    optimizer: torch.optim.Optimizer | Optimizers,
) -> tuple[torch.optim.Optimizer, ...]:
    """Return the same without the wrappers that frameworks put around an optimizer."""
    return tuple(_unwrapped(each) for each in each_of(optimizer))


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner: Any = getattr(optimizer, "optimizer", None)  # Accelerate and Fabric wrap one
    return _unwrapped(inner) if hasattr(inner, "param_groups") else optimizer


class Schedulers:
    """Several learning-rate schedules that step together, in the place of one.

    ``Guard`` and ``Snapshots`` take it as they take a schedule.

    Args:
        *schedulers: Schedules, each of an optimizer of its own or of the same one.
    """

    def __init__(self, *schedulers: Any) -> None:
        self.schedulers = schedulers

    def step(self) -> None:
        """Advance all schedules by one step, in order."""
        for each in self.schedulers:
            each.step()

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the states of all schedules."""
        return {"schedulers": [each.state_dict() for each in self.schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Iterable[Any]]) -> None:
        """Load states that ``state_dict`` returned."""
        for each, state in zip(self.schedulers, state_dict["schedulers"], strict=True):
            each.load_state_dict(state)

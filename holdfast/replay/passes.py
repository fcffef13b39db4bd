"""A pass as shadows compare it, and what another rank needs to make the same one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.digest.tensors import state_digest
from holdfast.replay.gradients import LocalGradients
from holdfast.replay.majority import Digests
from holdfast.replay.rng import RngState

GroupStep = Callable[[Any, int], torch.Tensor]


@dataclass
class Pass:
    """What a pass on this rank came to."""

    loss: torch.Tensor
    local: LocalGradients
    buffers: list[torch.Tensor]
    faulty: bool

    def digests(self, groups: int) -> Digests:
        """Of loss, local gradients and buffers, and of each accumulation group's gradients."""
        parts = tuple(self.local.of_group(group) for group in range(groups))
        last = len(self.local.starts)
        every = [self.local.of_group(group) for group in range(max(1, last))]
        return state_digest([self.loss.detach(), every, self.buffers]), *parts


class GroupPass:
    """``forward_backward`` of one accumulation group."""

    def __init__(self, group_step: GroupStep, group: int) -> None:
        self._group_step, self._group = group_step, group

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._group_step(batch, self._group)


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def travelling(rng: RngState, device: torch.device) -> dict[str, Any]:
    """A random state with that of the model's own device only: the other rank has another one."""
    state = dict(rng.state)
    if device.type == "cuda" and "cuda" in state:
        state["cuda"] = state["cuda"][device.index or 0]
    return state


def arrived(state: dict[str, Any], device: torch.device) -> RngState:
    """A random state that another rank gave, for this rank's device."""
    if device.type == "cuda" and "cuda" in state:
        here = list(torch.cuda.get_rng_state_all())
        here[device.index or 0] = state["cuda"]
        state = {**state, "cuda": here}
    return RngState(state)

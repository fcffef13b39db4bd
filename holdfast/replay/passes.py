"""The result of a pass as shadow replicas compare it, and random states sent between ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.digest.tensors import state_digest
from holdfast.replay.buffers import Values
from holdfast.replay.gradients import LocalGradients
from holdfast.replay.majority import Digests

GroupStep = Callable[[Any, int], torch.Tensor]


@dataclass
class Pass:
    """The result of a pass on this rank."""

    loss: torch.Tensor
    local: LocalGradients
    buffers: Values
    faulty: bool

    def digests(self, groups: int) -> Digests:
        """Return a digest of loss, gradients and buffers, then one of each accumulation group."""
        parts = tuple(self.local.of_group(group) for group in range(groups))
        last = len(self.local.starts)
        every = [self.local.of_group(group) for group in range(max(1, last))]
        return state_digest([self.loss.detach(), every, self.buffers]), *parts


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter; the CPU if it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def portable_rng(rng: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a random state that another rank can use: of all GPUs, only this device's."""
    state = dict(rng)
    if device.type == "cuda" and "cuda" in state:
        state["cuda"] = state["cuda"][device.index or 0]
    return state


def received_rng(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return another rank's ``portable_rng`` as a random state of this rank's device."""
    if device.type == "cuda" and "cuda" in state:
        here = list(torch.cuda.get_rng_state_all())
        here[device.index or 0] = state["cuda"]
        state = {**state, "cuda": here}
    return state

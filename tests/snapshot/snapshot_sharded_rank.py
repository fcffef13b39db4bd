"""What one rank trains where ranks hold different states: FSDP2, HSDP."""

from functools import partial
from typing import Any

import torch
from dtensor_trainer import local_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench import nodes_rank
from holdfast.digest.tensors import state_digest


class Sharded:
    """A model divided among the ranks, with sizes that differ and grow in the first step."""

    def __init__(self, layout: str, width: int, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, width + 1),
            nn.BatchNorm1d(width + 1),
            nn.Dropout(),
            nn.Linear(width + 1, 3),
        )
        fully_shard(self.model, mesh=_mesh(layout))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        torch.manual_seed(rank + 1)

    def forward_backward(self) -> None:
        """As ``Replica``."""
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().sum().backward()

    def update(self) -> None:
        """As ``Replica``."""
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        """Of all that this rank must get back bit for bit."""
        parts: list[Any] = [self.model, self.optimizer, self.scheduler]
        states = local_state([part.state_dict() for part in parts])
        return state_digest([states, torch.get_rng_state()])


def _mesh(layout: str) -> DeviceMesh | None:
    if layout == "fsdp":
        return None
    # Folded: both replicas of a shard are on one node, which divides the work on it.
    ranks = [[0, 1], [2, 3]] if layout == "hsdp" else [[0, 2], [1, 3]]
    return DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"))


def run(layout: str, *place: Any) -> None:
    """As ``nodes_rank.run``, with a model divided so."""
    nodes_rank.run(*place, make=partial(Sharded, layout))

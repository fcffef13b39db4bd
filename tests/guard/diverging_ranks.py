"""Ranks under a Guard, one of which applies another gradient than the others."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from bench import nodes_rank
from bench.nodes_rank import Work, say
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import UncorrectableFault
from holdfast.guard import Guard
from holdfast.snapshot.client.snapshots import Snapshots

STEPS, STRUCK = 14, 4


def train(struck: str, reacts: bool, work: Work, rank: int, out: Path, make: Any) -> None:
    """Train; rank 1 changes a gradient after the reduction in some steps."""
    replica = make(work.width, rank)
    steps = {"never": [], "once": [STRUCK], "always": range(STRUCK, 99), "at last": [STEPS - 1]}
    optimizer, faults = replica.optimizer, list(steps[struck])

    def damage(*_: object) -> None:
        step = events.current_step()
        if rank == 1 and step in faults:
            replica.model[0].weight.grad[0, 0] += 1.0
            if struck == "once":
                faults.remove(step)

    optimizer.register_step_pre_hook(damage)
    ddp: DistributedDataParallel = replica.ddp

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = ddp(batch).square().mean() + 0.1
        loss.backward()
        return loss

    error = ""
    snapshots = Snapshots(replica.model, optimizer, scheduler=replica.scheduler, parities=1)
    blind = mock.patch("holdfast.replay.divergence.Replicas.differ", return_value=False)
    try:
        with (
            nullcontext() if reacts else blind,
            Guard(ddp, optimizer, snapshots=snapshots) as guard,
        ):
            for step in range(STEPS):
                snapshots.wait_committed()
                generator = torch.Generator().manual_seed(10 * step + rank)
                guard.step(forward_backward, torch.randn(4, 8, generator=generator))
    except UncorrectableFault as caught:
        error = str(caught)
    found = [event.as_dict() for event in events.recent()]
    state = state_digest([list(replica.model.parameters()), optimizer.state_dict()])
    say(out, state=state, events=found, error=error, pid=os.getpid())


def run(struck: str, reacts: bool, *place: Any) -> None:
    """Be one rank."""

    def chosen(work: Work, rank: int, out: Path, make: Any = nodes_rank.Replica) -> None:
        train(struck, reacts, work, rank, out, make)

    with mock.patch.object(nodes_rank, "train", chosen):
        nodes_rank.run(*place)

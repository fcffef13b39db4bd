"""What ranks do whose models, losses or gradients differ: pipeline stages, and a lone overflow."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from bench import nodes_rank
from bench.nodes_rank import Work, say
from holdfast import config, events
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.replay import Shadow
from holdfast.snapshot.client.snapshots import Snapshots

STEPS, OVERFLOW = 5, 2


class Stage:
    """A model of this rank's own, of which nothing is reduced."""

    def __init__(self) -> None:
        torch.manual_seed(dist.get_rank())
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = GradScaler("cpu", enabled=True)

    def forward_backward(self, batch: int) -> torch.Tensor:
        loss = self.model(torch.ones(2, 4)).square().mean()
        infinite = dist.get_rank() == 1 and batch == OVERFLOW and self.scaler.is_enabled()
        self.scaler.scale(loss * torch.inf if infinite else loss).backward()
        return loss


def overflow(said: Path, run_dir: Path) -> None:
    """Overflow on rank 1 alone, in each repetition too; say which snapshots were begun."""
    stage = Stage()
    snapshots = Snapshots(
        stage.model, stage.optimizer, scaler=stage.scaler, run_dir=run_dir, parities=0
    )
    begun: list[Any] = []
    with Guard(stage.model, stage.optimizer, snapshots=snapshots) as guard:
        for step in range(STEPS):
            guard.step(stage.forward_backward, step)
            begun.append(snapshots.step)
    say(said, begun=begun, scale=stage.scaler.get_scale())


def shadowed(said: Path) -> None:
    """Ask for a shadow without a mesh; say why it is refused, and that nothing moved."""
    stage, error = Stage(), ""
    stage.scaler = GradScaler("cpu", enabled=False)
    before = stage.model.weight.detach().clone()
    try:
        with Guard(stage.model, stage.optimizer, shadow=Shadow(1.0)) as guard:
            guard.step(stage.forward_backward, 0)
    except ConfigError as refused:
        error = str(refused)
    say(said, error=error, moved=not torch.equal(before, stage.model.weight.detach()))


def without_a_loss(said: Path) -> None:
    """Return a loss on the last rank only."""
    stage, error = Stage(), ""
    stage.scaler = GradScaler("cpu", enabled=False)

    def forward_backward(batch: int) -> torch.Tensor | None:
        loss = stage.forward_backward(batch)
        return loss if dist.get_rank() else None

    try:
        Guard(stage.model, stage.optimizer).step(forward_backward, 0)  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as refused:
        error = f"{type(refused).__name__}: {refused}"
    say(said, error=error)


def on_nodes(work: Work, rank: int, out: Path, make: Any = None) -> None:
    """Let nodes with a stage each protect each other, first without a mesh."""
    del work, make
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    for number, given in enumerate((None, mesh)):
        stage, error = Stage(), ""
        stage.scaler = GradScaler("cpu", enabled=False)
        folder = Path(os.environ[config.RUN_DIR_VARIABLE]) / str(number)
        snapshots = Snapshots(stage.model, stage.optimizer, run_dir=folder, parities=1, mesh=given)
        before = stage.model.weight.detach().clone()
        try:
            with Guard(stage.model, stage.optimizer, snapshots=snapshots) as guard:
                for step in range(STEPS):
                    guard.step(stage.forward_backward, step)
        except ConfigError as refused:
            error = str(refused)
            snapshots.close(finished=True)
        moved = not torch.equal(before, stage.model.weight.detach())
        say(out, error=error, moved=moved, kinds=[event.kind for event in events.recent()])
        events.clear()


def run_on_nodes(*place: Any) -> None:
    """Be one rank."""
    with mock.patch.object(nodes_rank, "train", on_nodes):
        nodes_rank.run(*place)

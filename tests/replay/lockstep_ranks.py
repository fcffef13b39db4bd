"""What two ranks do in lock-step; rank 1 is the suspect."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.nodes_rank import say
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError
from holdfast.replay import drift, lockstep, parameter_sync

STEPS, STRUCK_STEP = 4, 2
PASSES = ("", "forward", "backward")
SUSPECT = 1


class Altered(torch.autograd.Function):
    """Alters the values that go through it, in the pass that is asked for."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, passes: str, alter: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.passes, ctx.alter = passes, alter
        return alter(x) if passes == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (ctx.alter(grads[0]) if ctx.passes == "backward" else grads[0]), None, None


def flipped(x: torch.Tensor) -> torch.Tensor:
    """With the top mantissa bit of the largest value flipped, which no ReLU takes away."""
    x = x.clone()
    x.view(torch.int32).view(-1)[x.argmax()] ^= 1 << 22
    return x


class Layer(nn.Linear):
    """Computes wrong values while ``struck`` says in which pass."""

    struck = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.struck == "backward":
            x = Altered.apply(x, "backward", flipped)  # type: ignore[no-untyped-call]
        y = super().forward(x)
        if self.struck == "forward":
            y = Altered.apply(y, "forward", flipped)  # type: ignore[no-untyped-call]
        return y


class Model(nn.Module):
    """Three layers, one of which may be struck, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Layer(6, 8), Layer(8, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.middle(self.first(x).relu()).relu()))


def train(said: Path, instrument: str, passes: str) -> None:
    """Steps in which rank 1 computes one value wrong, with an instrument attached."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    reference, partner = rank != SUSPECT, 1 - rank
    contexts: dict[str, Any] = {
        "lockstep": lambda: lockstep(model, partner, reference=reference),
        "parameter_sync": lambda: parameter_sync(model, optimizer, partner, reference=reference),
        "drift": lambda: drift(model, optimizer, partner, reference=reference),
        "": nullcontext,
    }
    with contexts[instrument]() as found:
        for step in range(STEPS):
            struck = rank == SUSPECT and step == STRUCK_STEP
            model.middle.struck = passes if struck else ""
            x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    rows = [vars(row) | {"frequency": row.frequency} for row in getattr(found, "mismatches", [])]
    figures = "noise", "worst_noise", "drift"
    updates = {name: getattr(found, name, None) for name in figures}
    say(said, state=state_digest(model.state_dict()), rows=rows, **updates)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks


def train_each(said: Path, cases: list[tuple[str, str]]) -> None:
    """Train once with each instrument, in each kind of pass that is struck."""
    for instrument, passes in cases:
        train(said, instrument, passes)


def refuse(said: Path) -> None:
    """What cannot be a pair."""
    model, rank = Model(), dist.get_rank()
    for partner, reference in ((rank, True), (7, True), (1 - rank, True), (1 - rank, False)):
        try:
            with lockstep(model, partner, reference=reference):
                say(said, error=None)
        except ConfigError as error:
            say(said, error=str(error))
    with lockstep(model, 1 - rank, reference=rank == 0) as found:
        say(said, error=None, rows=len(found.mismatches))

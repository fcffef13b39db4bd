"""A small training run, bare or guarded, and what happens to it."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.inject import Fault, Injector
from holdfast.snapshot.client.snapshots import Snapshots

STEPS = 20
STRUCK = 12  # after the spike detector's warm-up
WEIGHT_FAULT = Fault(STRUCK, 0, "bitflip", site="operand", op="up/addmm/forward", bit=30)


class Net(nn.Module):
    """Two linear layers with all that a repetition has to put back: buffers and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Up, normalised, some dropped, down."""
        hidden = self.drop(self.batch_norm(self.up(x)))
        return self.down(self.norm(hidden))


class Batches:
    """An endless loader that can be resumed; batch ``n`` is the same whenever it is asked for."""

    def __init__(self, special: dict[int, torch.Tensor] | None = None) -> None:
        self.position = 0
        self.special = special or {}

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[int, torch.Tensor]:
        self.position += 1
        return self.position - 1, self.batch(self.position - 1)

    def batch(self, number: int) -> torch.Tensor:
        """The batch of a number."""
        generator = torch.Generator().manual_seed(number)
        return self.special.get(number, torch.randn(6, 8, generator=generator))

    def state_dict(self) -> dict[str, int]:
        """How far it is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from there."""
        self.position = state["position"]


class Run:
    """A small training run; ``computed`` lists the batches that passes were made of."""

    def __init__(
        self,
        *,
        dropout: float = 0.5,
        special: dict[int, torch.Tensor] | None = None,
        without: Iterable[str] = (),
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = Net(dropout)
        for name in without:
            setattr(self.model, name, nn.Identity())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.loader = Batches(special)
        self.computed: list[int] = []
        self.injector = Injector(self.model, [], rank=0)
        self.damage: Callable[[int], None] = lambda step: None

    def inject(self, *faults: Fault) -> "Run":
        """This run, struck by faults."""
        self.injector = Injector(self.model, faults, rank=0)
        return self

    def forward_backward(self, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        """One pass: the loss, gradients accumulated."""
        number, inputs = batch
        self.computed.append(number)
        with self.injector.step(events.current_step()):
            loss = self.model(inputs).square().mean() + 0.1
            loss.backward()
        self.damage(number)
        return loss

    def bare(self, steps: int = STEPS, clip: float | None = None) -> "Run":
        """Train in a plain loop."""
        for number, batch in enumerate(islice(self.loader, steps)):
            events.set_step(number)
            self.optimizer.zero_grad()
            self.forward_backward(batch)
            if clip is not None:
                clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.scheduler.step()
        return self

    def guarded(self, steps: int = STEPS, clip: float | None = None, **options: Any) -> Guard:
        """Train under a guard."""
        if "snapshots" not in options:
            options["scheduler"] = self.scheduler
        # Whether a check at rest comes before another detector depends on the time it takes.
        options.setdefault("at_rest", 0.0)
        guard = Guard(self.model, self.optimizer, clip_grad_norm=clip, **options)
        with guard:
            for batch in guard.batches(self.loader, steps=steps):
                guard.step(self.forward_backward, batch)
        return guard

    def digest(self) -> str:
        """Of model, optimizer and schedule."""
        parts = [self.model, self.optimizer, self.scheduler]
        return state_digest([part.state_dict() for part in parts])


def snapshots_of(run: Run, run_dir: Path, **options: Any) -> Snapshots:
    """Snapshots of all that a run has."""
    return Snapshots(
        run.model,
        run.optimizer,
        scheduler=run.scheduler,
        run_dir=run_dir,
        **{"loader": run.loader} | options,
    )


def kinds() -> list[str]:
    """The kinds of the events, in order."""
    return [event.kind for event in events.recent()]


def events_of(kind: str) -> list[events.Event]:
    """The events of one kind."""
    return [event for event in events.recent() if event.kind == kind]


def always_wrong(run: Run, at: int) -> Callable[[int], None]:
    """Damages every pass of a batch, differently each time."""
    draw = random.Random(7)

    def damage(number: int) -> None:
        if number == at:
            run.model.up.weight.grad[0, 0] = draw.random() * 1e6

    return damage


def interruption(due: Callable[[int], bool]) -> Callable[[int], None]:
    """Interrupts the pass of the batches that are due."""

    def damage(number: int) -> None:
        if due(number):
            raise KeyboardInterrupt

    return damage

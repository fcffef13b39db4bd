"""A run whose state is changed in memory after it was digested."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from guard_cases import Run, snapshots_of

from holdfast.digest.tensors import tensor_bytes
from holdfast.guard import Guard

Chosen = Callable[[Run], torch.Tensor]


def weight(run: Run) -> torch.Tensor:
    """A weight that the optimizer writes in every step."""
    return run.model.up.weight


def moment(run: Run) -> torch.Tensor:
    """A moment of the optimizer; there is none before the first step."""
    return run.optimizer.state[run.model.down.weight]["exp_avg_sq"]


def table(run: Run) -> torch.Tensor:
    """A buffer that no pass writes."""
    return run.model.table


class Constant(Run):
    """A run whose model multiplies by a buffer that no pass writes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.settle: Callable[[], None] = lambda: None
        self.model.register_buffer("table", torch.linspace(0.5, 1.5, 4))
        self.model.down.register_forward_hook(lambda module, args, out: out * self.model.table)


def flip(tensor: torch.Tensor, bit: int, element: int | slice = 3) -> None:
    """Flip a bit without PyTorch's knowledge."""
    words = np.frombuffer(tensor_bytes(tensor), np.uint32)
    words[element] ^= np.uint32(1 << bit)


def guarded(run: Constant, run_dir: Path, every: int = 1, **options: Any) -> Guard:
    """Train under a Guard with snapshots, for which ``run.settle`` waits."""
    snapshots = snapshots_of(run, run_dir, every=every)
    run.settle = snapshots.finish
    return run.guarded(snapshots=snapshots, **options)


def strike_at(run: Constant, step: int, chosen: Chosen, bit: int = 24, **options: Any) -> None:
    """Flip a bit once, before a pass of a step."""
    plain, left = run.forward_backward, [step]

    def struck(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] in left:
            left.remove(batch[0])
            run.settle()
            flip(chosen(run).detach(), bit, **options)
        return plain(batch)

    run.forward_backward = struck  # type: ignore[method-assign]

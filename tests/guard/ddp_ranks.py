"""What ranks do whose gradients DDP sums: a small guarded training, which may die and go on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from guard_cases import Batches, Net
from torch.nn.parallel import DistributedDataParallel

from bench.nodes_rank import say
from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.snapshot.client.snapshots import Snapshots

STEPS = 8


class OwnBatches(Batches):
    """Other batches on each rank, as sums of equal gradients do not depend on their order."""

    def __next__(self) -> tuple[int, torch.Tensor]:
        number, _ = super().__next__()
        return number, self.batch(10 * number + dist.get_rank())

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return self


def train(said: Path, run_dir: Path, die_at: int | None = None) -> None:
    """Train to the end and say the state's digest, or die once a step is committed."""
    torch.manual_seed(0)
    model = Net(dropout=0.5)
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    loader, passes = OwnBatches(), 0
    snapshots = Snapshots(model, optimizer, loader=loader, run_dir=run_dir, parities=0)

    def forward_backward(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        nonlocal passes
        passes += 1
        loss = wrapper(batch[1]).square().mean()
        loss.backward()
        return loss

    with Guard(wrapper, optimizer, snapshots=snapshots, audit=1.0) as guard:
        first = guard.steps_done
        for batch in guard.batches(loader, steps=STEPS):
            if guard.steps_done == die_at:
                snapshots.wait_committed()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            guard.step(forward_backward, batch)
    digest = state_digest([model.state_dict(), optimizer.state_dict()])
    kinds = [event.kind for event in events.recent()]
    say(said, first=first, digest=digest, passes=passes, kinds=kinds)

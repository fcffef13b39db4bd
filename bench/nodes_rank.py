"""One rank of a small data-parallel run on several nodes, for others to start and kill."""

import faulthandler
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import config, events
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client.snapshots import Snapshots

HANG_S = 120.0


@dataclass(frozen=True)
class Work:
    """What every rank of a run does: its size, how far it goes, and what is kept of it."""

    directory: Path
    steps: int
    parities: int = 1
    width: int = 16
    pace_s: float = 0.0
    persist_dir: Path | None = None
    persist_every: int = 1000
    group_nodes: int | None = None


class Replica:
    """A data-parallel model whose steps depend on the rank's own data and random numbers."""

    def __init__(self, width: int, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, width),
            nn.BatchNorm1d(width),
            nn.Linear(width, width),
            nn.Dropout(),
            nn.Linear(width, 3),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ddp = DistributedDataParallel(self.model, forward_sync_buffers=False)
        torch.manual_seed(rank + 1)
        rng = torch.get_rng_state()
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for _ in range(2):  # until DDP has settled its buckets
            self.forward_backward()
        self.model.load_state_dict(buffers, strict=False)
        torch.set_rng_state(rng)

    def forward_backward(self) -> None:
        """Gradients of this rank's next batch, averaged over all ranks."""
        self.optimizer.zero_grad()
        self.ddp(torch.randn(4, 8)).square().sum().backward()

    def update(self) -> None:
        """Apply them."""
        self.optimizer.step()
        self.scheduler.step()

    def weights(self) -> str:
        """Of the whole tensors of model and optimizer, whatever the number of ranks."""
        state = dict(sorted(self.optimizer.state_dict()["state"].items()))
        return state_digest(whole([dict(self.model.named_parameters()), state]))

    def digest(self) -> str:
        """Of all that must be restored bit for bit."""
        parts: list[Any] = [self.model, self.optimizer, self.scheduler]
        return state_digest([[part.state_dict() for part in parts], torch.get_rng_state()])


Make = Callable[[int, int], Any]  # of width and rank; what ``Replica`` has


def whole(value: Any) -> Any:
    """A state with whole tensors in the place of divided ones; a collective."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def say(path: Path, **words: object) -> None:
    """One line of what a rank saw."""
    with path.open("a") as file:
        file.write(json.dumps(words) + "\n")


def train(work: Work, rank: int, out: Path, make: Make = Replica) -> None:
    """Restore, then train to the end, with a snapshot after every step."""
    replica = make(work.width, rank)
    before = replica.digest()
    snapshots = Snapshots(
        replica.model,
        replica.optimizer,
        scheduler=replica.scheduler,
        parities=work.parities,
        group_nodes=work.group_nodes,
        persist_dir=work.persist_dir,
        persist_every=work.persist_every,
    )
    with snapshots:
        step = snapshots.restore()
        seen = [[event.kind, event.detail] for event in events.recent()]
        say(out, restored=step, digest=replica.digest(), before=before, events=seen)
        if step is None:
            step = 0
            snapshots.begin(0)
            snapshots.wait_committed()
            say(out, step=0, digest=replica.digest())
        while step < work.steps:
            time.sleep(work.pace_s)
            replica.forward_backward()
            snapshots.finish()
            replica.update()
            step += 1
            # Said before it can be committed.
            say(out, step=step, digest=replica.digest())
            snapshots.begin(step)
            say(out, committed=snapshots.committed_step)
        snapshots.wait_committed()
        kinds = [event.kind for event in events.recent()]
        say(out, done=step, digest=replica.digest(), status=snapshots.status(), kinds=kinds)


def run(work: Work, attempt: int, place: dict[str, str], log: Path, make: Make = Replica) -> None:
    """Be one rank, with ``place`` as torchrun would tell it; what is printed goes to ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(place)
    faulthandler.enable()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{work.directory}/rendezvous-{attempt}",
        rank=config.rank(),
        world_size=config.world_size(),
        timeout=timedelta(seconds=config.timeout_s()),
    )
    try:
        said = work.directory / f"rank-{config.rank()}-{attempt}.jsonl"
        train(work, config.rank(), said, make)
    finally:
        gc.collect()
        distributed.destroy_process_group()

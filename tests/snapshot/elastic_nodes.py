"""A rank of a run whose nodes come and go, and the loaders that go on with other ranks."""

import gc
import os
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from dtensor_trainer import change
from elastic_loaders import loader_of
from replica_trainer import Replica

from bench.nodes_rank import Work, say
from holdfast import config, events
from holdfast.snapshot.client.snapshots import Snapshots


def live(layout: str, work: Work, attempt: int, place: dict[str, str], log: Path) -> None:
    """Be one rank that restores a divided model, trains a few steps, and ends."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    os.environ.update(place)
    torch.set_num_threads(1)
    rank, ranks = config.rank(), config.world_size()
    store = dist.FileStore(str(work.directory / f"store-{attempt}"), ranks)
    limit = timedelta(seconds=config.timeout_s())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        said = work.directory / f"rank-{rank}-{attempt}.jsonl"
        parities = work.parities if ranks > config.local_world_size() else None
        change(said, config.run_dir(None), layout, work.steps, work.persist_dir, parities)
    finally:
        gc.collect()
        dist.destroy_process_group()


def read(said: Path, run_dir: Path, kinds: list[str], rows: int, batch: int, steps: int) -> None:
    """With each kind of loader: restore, read so many batches, and say their rows."""
    for kind in kinds:
        loader = loader_of(kind, rows, batch, (dist.get_rank(), dist.get_world_size()))
        run, seen = Replica(), []
        known = len(events.recent())
        snapshots = Snapshots(run.net, run.optimizer, loader=loader, run_dir=run_dir / kind)
        start = snapshots.restore() or 0
        for step, found in enumerate(islice(loader, steps), start + 1):
            seen += found.tolist()
            run.step()
            snapshots.begin(step)
            assert snapshots.wait_committed() == step
        told = [e.detail["position"] for e in events.recent()[known:] if "position" in e.detail]
        say(said, kind=kind, start=start, rows=seen, position=told)
        snapshots.close(finished=False)

"""A rank of a run whose nodes come and go."""

import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from dtensor_trainer import change

from bench.nodes_rank import Work
from holdfast import config


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
        change(said, config.run_dir(None), layout, work.steps)
    finally:
        gc.collect()
        dist.destroy_process_group()

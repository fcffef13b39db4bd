"""Processes of one gloo job, which say what they do in files and can be killed."""

import gc
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshot_waits import PATIENCE_S

from bench.nodes import Cluster
from bench.nodes_rank import Work
from holdfast import config

STARTING_S = 3 * PATIENCE_S


def _rank(
    job: Any, arguments: tuple[Any, ...], work: Work, attempt: int, place: dict[str, str], log: Path
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 2)
    os.environ.update(place | {config.TIMEOUT_VARIABLE: str(PATIENCE_S)})
    del os.environ[config.RUN_DIR_VARIABLE]
    torch.set_num_threads(1)
    rank, ranks = config.rank(), config.world_size()
    store = dist.FileStore(str(work.directory / "store"), ranks)
    timeout = timedelta(seconds=STARTING_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        job(work.directory / f"rank-{rank}-{attempt}.jsonl", *arguments)
    finally:
        gc.collect()
        dist.destroy_process_group()


class Ranks(Cluster):
    """The ranks of a job on one node; each calls ``job`` with the file in which it says things."""

    def __init__(self, folder: Path, ranks: int, job: Any, *arguments: Any) -> None:
        super().__init__(Work(folder, steps=0), 1, ranks)
        self.start(partial(_rank, job, arguments))

    def heard(self) -> list[list[dict[str, Any]]]:
        """Return what each rank has said so far."""
        return [self.said(rank) for rank in range(self.world)]

    def finished(self) -> list[list[dict[str, Any]]]:
        """Wait until all have ended well, and leave none, however they ended; what each said."""
        try:
            self.finish()
        finally:
            self.kill_trainers()
        return self.heard()

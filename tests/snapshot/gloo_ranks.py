"""Processes of one gloo job, which say what they do in files and can be killed."""

import gc
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from snapshot_waits import PATIENCE_S

STARTING_S = 3 * PATIENCE_S


def say(said: Path, **words: Any) -> None:
    with said.open("a") as file:
        file.write(json.dumps(words) + "\n")


def heard(said: Path) -> list[dict[str, Any]]:
    """What a rank has said so far; a line that is being written is not there yet."""
    lines = said.read_text().splitlines(keepends=True) if said.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _rank(rank: int, ranks: int, store: str, job: Any, arguments: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(GLOO_SOCKET_IFNAME="lo", HOLDFAST_TIMEOUT_S=str(PATIENCE_S))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=STARTING_S)
    file = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=ranks, timeout=timeout)
    try:
        job(*arguments)
    finally:
        gc.collect()
        dist.destroy_process_group()


class Ranks:
    """Processes of one gloo job, each saying what it does in a file of its own."""

    def __init__(self, folder: Path, ranks: int, job: Any, *arguments: Any) -> None:
        folder.mkdir()
        context = get_context("forkserver")
        self.said = [folder / f"rank-{rank}.jsonl" for rank in range(ranks)]
        self.processes: list[ForkServerProcess] = []
        for rank, said in enumerate(self.said):
            place = (rank, ranks, str(folder / "store"), job, (said, *arguments))
            self.processes.append(context.Process(target=_rank, args=place))
            self.processes[-1].start()

    def until(self, condition: Callable[[list[dict[str, Any]]], object], what: str) -> None:
        """Wait until every rank has said something."""
        deadline = time.monotonic() + STARTING_S
        while not all(condition(heard(said)) for said in self.said):
            assert time.monotonic() < deadline, f"{what}: not within {STARTING_S} s"
            dead = [p.exitcode for p in self.processes if p.exitcode not in (None, 0)]
            assert not dead, f"{what}: ranks ended with {dead}"
            time.sleep(0.02)

    def finished(self) -> list[list[dict[str, Any]]]:
        """Wait until all have ended well; what each said."""
        for process in self.processes:
            process.join(STARTING_S)
        codes = [process.exitcode for process in self.processes]
        assert codes == [0] * len(codes), codes
        return [heard(said) for said in self.said]

    def kill(self) -> None:
        """SIGKILL every rank."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(PATIENCE_S)

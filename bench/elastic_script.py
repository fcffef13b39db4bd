"""A run under ``holdfast run`` that notes which samples each rank sees in each step."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from holdfast import Guard, Snapshots

GLOBAL_BATCH = 12


def main(folder: Path, steps: int, pace_s: float) -> None:
    dist.init_process_group("gloo")
    train(folder, steps, pace_s)
    gc.collect()  # or gloo's threads can hang this process
    dist.destroy_process_group()


def train(folder: Path, steps: int, pace_s: float) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lives: list[int | None] = [None] * ranks
    dist.all_gather_object(lives, os.getpid())  # of rank 0, which all ranks note
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = list(range(GLOBAL_BATCH * steps))
    sampler: DistributedSampler[int] = DistributedSampler(data, ranks, rank, seed=1)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // ranks, sampler=sampler)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        draw = torch.randn(8, generator=torch.Generator().manual_seed(7))
        loss = model(batch.float()[:, None] / len(data) * draw).square().mean()
        loss.backward()
        return loss

    with Guard(model, optimizer, snapshots=Snapshots(net, optimizer)) as guard:
        for batch in guard.batches(loader, steps=steps):
            guard.step(forward_backward, batch)
            with (folder / f"seen-{rank}.jsonl").open("a") as file:
                line = {
                    "step": guard.steps_done,
                    "ranks": ranks,
                    "at": time.time(),
                    "life": lives[0],
                }
                line["samples"] = batch.tolist()
                file.write(json.dumps(line) + "\n")
            time.sleep(pace_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

"""Train a small model under DDP. Kill it and start it again: it goes on where it was."""

import gc
import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast import Guard, Snapshots, protect


def main(run_dir: str, steps: int = 12) -> float:
    dist.init_process_group("gloo")
    loss = train(run_dir, steps)
    gc.collect()  # gloo's threads can hang a process whose wrapper is freed after the group
    dist.destroy_process_group()
    return loss


def train(run_dir: str, steps: int) -> float:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    model: nn.Module = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    snapshots = Snapshots(net, optimizer, run_dir=run_dir)
    loss = torch.zeros(())
    with (
        protect(model),
        Guard(model, optimizer, snapshots=snapshots, clip_grad_norm=1.0, audit=0.05) as guard,
    ):
        for step in range(guard.steps_done, steps):
            draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
            loss = guard.step(forward_backward, torch.randn(16, 8, generator=draw))
    return float(loss)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchrun --nproc-per-node 2 -m examples.ddp RUN_DIR")
    print(f"loss {main(sys.argv[1]):.4f}")

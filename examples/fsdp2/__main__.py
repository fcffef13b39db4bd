"""Train a small model under FSDP2. Kill it and start it again: it goes on where it was."""

import sys

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast import Guard, Snapshots, protect


def main(run_dir: str, steps: int = 12) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model: nn.Module = net
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
    dist.destroy_process_group()
    return float(loss)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchrun --nproc-per-node 2 -m examples.fsdp2 RUN_DIR")
    print(f"loss {main(sys.argv[1]):.4f}")

"""Train a small model by Accelerate. Kill it and start it again: it goes on where it was."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Guard, Snapshots, protect


def main(run_dir: str, steps: int = 24) -> float:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    rows = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2),
        DataLoader(rows, batch_size=16, shuffle=True),
    )

    def forward_backward(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        accelerator.backward(loss)
        return loss

    def finish_step() -> None:
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    inner = optimizer.optimizer
    snapshots = Snapshots(model, inner, run_dir=run_dir)
    loss = torch.zeros(())
    with (
        protect(model),
        Guard(model, inner, snapshots=snapshots, apply_again=finish_step, audit=0.05) as guard,
    ):
        for batch in guard.batches(loader, steps=steps):
            with accelerator.accumulate(model):
                loss = guard.micro_step(forward_backward, batch, last=accelerator.sync_gradients)
                finish_step()
            if accelerator.sync_gradients:
                guard.after_optimizer_step()
    return float(loss)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.accelerate RUN_DIR")
    print(f"loss {main(sys.argv[1]):.4f}")

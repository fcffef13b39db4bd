"""The GPT-2 of ``bench.integrations_transformers`` in a loop by Accelerate, without an adapter.

The guarded loop has the lines of ``docs/integrations_accelerate.md``.
"""

from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from bench.integrations_transformers import Rows, gpt2
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.snapshot.client.snapshots import Snapshots

PARTS = 2  # batches of a step


def train(steps: int, run_dir: Path | None) -> str:
    """Train, with a Guard if there is a run directory; return the digest of the result."""
    net = gpt2()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-3),
        DataLoader(Rows(), batch_size=4, shuffle=True),
    )

    def forward_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        accelerator.backward(loss)
        return loss

    def finish_step() -> None:
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    guard = None
    if run_dir is not None:
        snapshots = Snapshots(net, optimizer.optimizer, run_dir=run_dir)
        guard = Guard(model, optimizer.optimizer, snapshots=snapshots, apply_again=finish_step)
    with protect(net), guard or nullcontext():
        batches = guard.batches(loader, steps=steps) if guard else islice(loader, PARTS * steps)
        for batch in batches:
            with accelerator.accumulate(model):
                if guard is None:
                    forward_backward(batch)
                else:
                    guard.micro_step(forward_backward, batch, last=accelerator.sync_gradients)
                finish_step()
            if guard is not None and accelerator.sync_gradients:
                guard.after_optimizer_step()
    return state_digest([net.state_dict(), optimizer.optimizer.state_dict()])

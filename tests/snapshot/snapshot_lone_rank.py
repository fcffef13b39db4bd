"""A rank that trains a replica alone, until it is killed: only its snapshots need the network."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

from bench.nodes_rank import say
from holdfast import config
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client.snapshots import Snapshots

LIFE_S = 120.0
PACE_S = 0.05


def main(directory: Path, attempt: str) -> None:
    """Restore, and train with a snapshot after every step."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/rendezvous-{attempt}",
        rank=config.rank(),
        world_size=config.world_size(),
        timeout=timedelta(seconds=config.timeout_s()),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def digest() -> str:
        return state_digest([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])

    out, before = directory / f"rank-{config.rank()}-{attempt}.jsonl", digest()
    snapshots = Snapshots(model, optimizer)
    restored = snapshots.restore()
    say(out, restored=restored, digest=digest(), before=before)
    step, end_s = restored or 0, time.monotonic() + LIFE_S
    while time.monotonic() < end_s:
        time.sleep(PACE_S)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        started_s = time.monotonic()
        snapshots.finish()
        stall_s = time.monotonic() - started_s
        optimizer.step()
        step += 1
        say(out, step=step, digest=digest(), stall_s=stall_s, committed=snapshots.committed_step)
        snapshots.begin(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

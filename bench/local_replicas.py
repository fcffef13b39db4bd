"""What does a node keep and copy when L of its ranks hold one state?

    python -m bench.local_replicas [--mb 64] [--saves 6]

L ranks of one node train a model of which each has a replica, with a snapshot every step. The
memory of the SMP's slots and the bytes that all ranks copied a snapshot are compared with a run in
which every rank copies all of its state, which ``mesh=`` asks for.
"""

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from bench.nodes import Cluster
from bench.nodes_rank import Work, say
from bench.rows import record
from holdfast import config
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout.groups import Dim, Job, Kind

RANKS = (1, 2, 4, 8)


def _rank(
    divided: bool, mb: int, work: Work, attempt: int, place: dict[str, str], log: Path
) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)
    rank, ranks = config.rank(), config.world_size()
    store = distributed.FileStore(str(work.directory / f"store-{attempt}"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = nn.Linear(1024, mb * 2**20 // 4 // 1024 // 3, bias=False)  # a third of the state
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    own = None if divided else Job((Dim("own", ranks, Kind.SHARD),), ranks)
    with Snapshots(model, optimizer, mesh=own, parities=0) as snapshots:
        for step in range(1, work.steps + 1):
            model.weight.grad = torch.full_like(model.weight, 1e-3)
            snapshots.finish()
            optimizer.step()
            snapshots.begin(step)
            started_s = time.monotonic()
            assert snapshots.wait_committed() == step
            seconds = time.monotonic() - started_s
        status = snapshots.status()
        found = {"bytes": status["bytes"], "copied": snapshots.copied_bytes // work.steps}
        say(work.directory / f"rank-{rank}-{attempt}.jsonl", **found, s=seconds)
        distributed.barrier()
    distributed.destroy_process_group()


def measure(folder: Path, ranks: int, divided: bool, mb: int, saves: int) -> dict[str, Any]:
    """Return the bytes in memory, and those that all ranks copied in a snapshot."""
    run = Cluster(Work(folder / f"{ranks}-{divided}", saves, 0), 1, ranks)
    try:
        run.start(partial(_rank, divided, mb))
        said = run.finish()
    finally:
        run.close()
    return {
        "slot_bytes": said[0]["bytes"],
        "copied_bytes": sum(each["copied"] for each in said),
        "wait_s": max(each["s"] for each in said),
    }


def main() -> None:
    """Measure both ways, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64, help="of the state, in MiB")
    parser.add_argument("--saves", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            row: dict[str, Any] = {"ranks": ranks, "mb": args.mb, "saves": args.saves}
            for name, divided in (("whole", False), ("divided", True)):
                found = measure(Path(folder), ranks, divided, args.mb, args.saves)
                row |= {f"{name}_{key}": value for key, value in found.items()}
            row["memory_ratio"] = row["whole_slot_bytes"] / row["divided_slot_bytes"]
            record("local_replicas", row)


if __name__ == "__main__":
    main()

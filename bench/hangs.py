"""Ten thousand steps of three ranks with everything that takes long and is no hang.

    python -m bench.hangs [--steps 10000] [--load 2] [--floor 2]

The floor is two seconds, where users have 45. Every 500 steps the model is evaluated for two
floors, every 1,000 a checkpoint is written by rank 0 alone, which takes one and a half, and every
2,500 a function is compiled anew, while other processes keep the cores busy. A row counts the
events that say that a rank hung or was slow; none is right. A rank that computes has ten floors:
the first compilation takes 11 to 15 s here. The time that noting a step takes is in it, too.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.progress import track
from torch import nn

from bench.rows import record
from holdfast import Guard, Hang, events
from holdfast.events import recorder
from holdfast.liveness.watchdog import Watchdog

RANKS, FLOOR_S, PACE_S = 3, 2.0, 10.0
EVALUATE, SAVE, COMPILE = 500, 1000, 2500
SAVED = 40_000_000  # values of a checkpoint
NOTED = 100_000
TOLD = "step", "waited_s", "behind", "waiting_in"  # of a hang, in the row


def spin(end_s: float) -> None:
    """Keep a core busy."""
    while time.time() < end_s:
        pass


def save(path: Path, floor_s: float) -> None:
    """Write a checkpoint for longer than the floor."""
    end_s = time.monotonic() + 1.5 * floor_s
    while time.monotonic() < end_s:
        torch.save(torch.zeros(SAVED), path)


def rank_of(rank: int, folder: Path, steps: int, floor_s: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    os.environ["RANK"] = str(rank)
    recorder.ensure_ledger(folder)
    recorder.claim_ledger("hangs")
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        assert model.weight.grad is not None
        dist.all_reduce(model.weight.grad)
        return loss.detach()

    with Guard(model, optimizer, hang=Hang(floor_s=floor_s, pace_s=PACE_S)) as guard:
        for step in track(range(1, steps + 1), disable=rank > 0):
            guard.step(forward_backward, torch.ones(8, 64))
            if step % EVALUATE == 0:
                model.eval()
                time.sleep(2 * floor_s)
                model.train()
            if step % SAVE == 0 and rank == 0:
                save(folder / "checkpoint.pt", floor_s)
            if step % COMPILE == 0:
                torch.compiler.reset()
                torch.compile(lambda x: (x * 2).relu().sum())(torch.ones(step))
    events.flush()
    dist.destroy_process_group()


def noted_ns() -> float:
    """Return what noting a step costs the training thread."""
    watchdog = Watchdog(nn.Linear(1, 1), Hang())
    began_s = time.perf_counter()
    for step in range(NOTED):
        watchdog.step_done(step)
    return 1e9 * (time.perf_counter() - began_s) / NOTED


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps that take long and are no hangs.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--load", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--floor", type=float, default=FLOOR_S, help="seconds, of a hang")
    options = parser.parse_args()
    context = mp.get_context("spawn")
    busy = [
        context.Process(target=spin, args=(time.time() + 3600,), daemon=True)
        for _ in range(options.load)
    ]
    for each in busy:
        each.start()
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_of, (Path(folder), options.steps, options.floor), nprocs=RANKS)
            seconds = time.monotonic() - began_s
            ledger = Path(folder) / events.LEDGER_NAME
            stored = [*events.read_ledger(ledger)] if ledger.exists() else []
            found = [event.kind for _, event in stored]
            said = [event.detail for _, event in stored if event.kind == "rank_hung"]
    finally:
        for each in busy:
            each.kill()
    record(
        "hangs",
        {
            "steps": options.steps,
            "ranks": RANKS,
            "floor_s": options.floor,
            "pace_s": PACE_S,
            "evaluations": options.steps // EVALUATE,
            "checkpoints": options.steps // SAVE,
            "compilations": options.steps // COMPILE,
            "busy_processes": options.load,
            "seconds": round(seconds, 1),
            "hangs_said": found.count("rank_hung"),
            "said": [{name: detail[name] for name in TOLD} for detail in said],
            "stragglers_said": found.count("straggler"),
            "noted_ns": round(noted_ns()),
        },
    )


if __name__ == "__main__":
    main()

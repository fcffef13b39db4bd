"""One rank of a run in which something goes wrong at a step: ``hang_ranks.py RUN_DIR CASE``."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from holdfast import Guard, Hang, events
from holdfast.events import recorder

STEPS, AT, FLOOR_S, STEP_S = 40, 20, 2.0, 0.02


def compute(seconds: float) -> None:
    """Keep the core busy for a processor time, so that other load makes no rank slow."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Batches:
    """Batches of a loader that stops to answer on rank 1 in the case ``loader``."""

    def __init__(self, case: str, rank: int) -> None:
        self.case, self.rank = case, rank

    def __iter__(self):
        for step in range(STEPS):
            if self.case == "loader" and self.rank == 1 and step == AT:
                os.read(os.pipe()[0], 1)  # of a process that has died
            yield torch.full((2, 4), float(step))


def main(run_dir: Path, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    recorder.ensure_ledger(run_dir)
    recorder.claim_ledger("hangs")
    model = nn.Linear(4, 1)  # DDP would import for seconds
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow = case == "slow"
    if case == "far":
        socket.gethostname = lambda: f"host-{rank}"
    hang = Hang(floor_s=FLOOR_S, restart=case in ("skip", "far"), pace_s=0.2 if slow else 1e6)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        step = int(batch[0, 0])
        compute(STEP_S * (3 if slow and rank == 2 else 1))
        if rank == 1 and step == AT:
            if case in ("stop", "far"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if case == "skip":
                os.read(os.pipe()[0], 1)
            if case == "other":
                dist.broadcast(torch.ones(3), 1)
        loss = model(batch).sum()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        return loss.detach()

    with Guard(model, optimizer, hang=hang) as guard:
        for step, batch in enumerate(Batches(case, rank)):
            guard.step(forward_backward, batch)
            if case == "healthy" and step == AT:
                if rank == 0:
                    compute(2.5 * FLOOR_S)  # saves a checkpoint, say
                with guard.pause():
                    time.sleep(2.5 * FLOOR_S)
                model.eval()
                time.sleep(2.5 * FLOOR_S)
                model.train()
                if rank == 1:  # waits for a compiler
                    words = ["-c", f"import time\nwhile time.thread_time() < {2.5 * FLOOR_S}: 0"]
                    subprocess.run(["/bin/sh", "-c", '"$0" "$@"; :', sys.executable, *words])
    events.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""A rank that bench.restart kills: it notes when it got how far, in a file of its own."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

started_s = time.time()

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402

from holdfast import Snapshots  # noqa: E402


def main(folder: Path, pace_s: float) -> None:
    """Train until killed; a line for each stage and step."""
    rank, host = int(os.environ["RANK"]), os.uname().nodename
    order = folder / f"kill-{host}"
    with (folder / f"rank-{rank}-{host}-{os.getpid()}.jsonl").open("w") as file:

        def note(stage: str, time_s: float = 0.0, step: int = 0) -> None:
            line = {"stage": stage, "time_s": time_s or time.time(), "rank": rank, "step": step}
            file.write(json.dumps(line | {"host": host, "pid": os.getpid()}) + "\n")
            file.flush()

        note("started", started_s)
        note("imported")
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
        note("group")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters())
        snapshots = Snapshots(model, optimizer)
        note("wrapped")
        step = snapshots.restore() or 0
        note("restored", step=step)
        while True:
            step += 1
            if order.exists():
                order.unlink()
                note("killed", step=step)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            ddp(torch.full((4, 256), float(step))).sum().backward()
            snapshots.finish()
            optimizer.step()
            snapshots.begin(step)
            note("step", step=step)
            time.sleep(pace_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))

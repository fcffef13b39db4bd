"""What the checks of collectives cost a training step: two ranks on this machine, gloo and DDP.

    python -m bench.collectives [--demo] [--layout fsdp] [--pairs N]

A Guard's steps with the checks and without them in turn, in one training. Two figures for a step:
the ratio of the pairs, in wall and CPU time, and the CPU time within the checks themselves as a
share of the step's, which other work on the machine disturbs less. Before, a training with checks
must leave the bits of one without them.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bench.rows import record
from bench.training_step import DEMO, LARGE, Step
from holdfast import events
from holdfast.collectives.checks import Collectives
from holdfast.collectives.transfers import Transfer
from holdfast.digest.tensors import state_digest
from holdfast.guard import Guard
from holdfast.replay.gradients import local_of

RANKS, GATE_STEPS = 2, 2


class Spent:
    """Adds up the CPU time of the calling threads, and the wall time, within some methods."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0

    def within(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            result = method(*args)
            self.cpu_s += time.thread_time() - cpu_s
            self.wall_s += time.perf_counter() - wall_s
            return result

        setattr(owner, name, timed)


def trainer(options: argparse.Namespace, *, wanted: bool) -> tuple[Step, Guard]:
    """The model, laid out over the ranks, with its Guard."""
    step = Step(*(DEMO if options.demo else LARGE), "fp32")
    if options.layout == "ddp":
        step.model = DistributedDataParallel(step.model)  # type: ignore[assignment]
    else:
        fully_shard(step.model)
        step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-3)
    return step, Guard(step.model, step.optimizer, clip_grad_norm=1.0, collectives=wanted)


def digest_after(options: argparse.Namespace, steps: int, *, wanted: bool) -> str:
    """The state's digest after some steps."""
    step, guard = trainer(options, wanted=wanted)
    for _ in range(steps):
        guard.step(step.forward_backward, step.batch)
    return state_digest([local_of(each) for each in step.model.parameters()])


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Steps with and without checks in turn."""
    step, guard = trainer(options, wanted=True)
    checks, spent = guard._verifier._collectives, Spent()
    for owner, name in ((Transfer, "note_given"), (Transfer, "note_got"), (Collectives, "check")):
        spent.within(owner, name)

    def run(wanted: bool) -> tuple[float, float]:
        checks.wanted = wanted
        dist.barrier()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        guard.step(step.forward_backward, step.batch)
        return time.process_time() - cpu_s, time.perf_counter() - wall_s

    for wanted in (True, False):
        run(wanted)
    spent.cpu_s = spent.wall_s = 0.0
    pairs = [(run(False), run(True)) for _ in range(options.pairs)]
    share: Callable[[int], list[float]] = lambda of: [on[of] / off[of] for off, on in pairs]  # noqa: E731
    off_cpu_s = statistics.median(off[0] for off, _ in pairs)
    return {
        "layout": options.layout,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "pairs": options.pairs,
        "cpu_ratio": statistics.median(share(0)),
        "cpu_ratio_quartiles": statistics.quantiles(share(0), n=4)[::2],
        "wall_ratio": statistics.median(share(1)),
        "step_cpu_s": off_cpu_s,
        "step_wall_s": statistics.median(off[1] for off, _ in pairs),
        "checks_cpu_s": spent.cpu_s / options.pairs,
        "checks_share_of_cpu": spent.cpu_s / options.pairs / off_cpu_s,
        "load": os.getloadavg()[0],
    }


def rank(number: int, folder: str, options: argparse.Namespace, rows: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS)
    on, off = (digest_after(options, GATE_STEPS, wanted=wanted) for wanted in (True, False))
    row = measured(options)
    found = [event for event in events.recent() if event.kind == "collective_fault"]
    rows.put((number, on == off and not found, row))
    dist.barrier()
    gc.collect()  # or gloo's threads can hang this process
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and record what the first one measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true", help="the demo's model")
    parser.add_argument("--layout", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--pairs", type=int, default=8)
    options = parser.parse_args()
    context = get_context("spawn")
    rows: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=rank, args=(number, folder, options, rows), daemon=True)
            for number in range(RANKS)
        ]
        for process in started:
            process.start()
        said = sorted(rows.get(timeout=1800) for _ in started)
        for process in started:
            process.join(60)
    if not all(right for _, right, _ in said):
        raise SystemExit("other bits than without checks, or an alarm: nothing is recorded")
    record("collectives", said[0][2])


if __name__ == "__main__":
    main()

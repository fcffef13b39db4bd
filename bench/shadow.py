"""Shadow replicas: clean audits that accuse nobody, and how soon a faulty rank is named.

    python -m bench.shadow [--steps 10000] [--trials 60] [--seed 0]

Three gloo ranks train a small model under DDP. Clean: every step is audited, and in each every rank
is computed by another one too; any event is a false alarm. Naming: rank 1 errs in every backward
pass, or in a share of them, by one value that is a thousandth off; steps are audited at a rate, and
counted until it is named, for many seeds.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.rows import record
from holdfast import config, events
from holdfast.guard import Guard
from holdfast.inject.statistics import Rate
from holdfast.replay import Shadow, expected_steps_to_name

RANKS, FAULTY, MOST_STEPS = 3, 1, 1000
NAMING = ((0.1, 1.0), (0.5, 0.2))  # audited share, share of the faulty rank's passes that err
LIMIT_S = 3600.0


class Training:
    """One rank's model; ``error_rate`` is the share of its backward passes that err."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
        )
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.error_rate, self.passes = 0.0, torch.Generator().manual_seed(1)
        torch.manual_seed(RANKS * seed + dist.get_rank() + 1)

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.model(batch)
        if float(torch.rand((), generator=self.passes)) < self.error_rate:
            hidden.register_hook(_wrong)
        loss = hidden.square().mean()
        loss.backward()
        return loss

    def batch(self, step: int) -> torch.Tensor:
        place = (self.seed * 10**6 + step) * RANKS + dist.get_rank()
        generator = torch.Generator().manual_seed(place)
        return torch.randn(8, 16, generator=generator)


def _wrong(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad[0, 0] *= 1.001
    return grad


def _clean(training: Training, steps: int, told: Path) -> dict[str, Any]:
    guard = Guard(training.model, training.optimizer, shadow=1.0, seed=training.seed)
    for step in range(steps):
        guard.step(training.forward_backward, training.batch(step))
        if step % 100 == 99 and dist.get_rank() == 0:
            told.write_text(str(step + 1))
    shadows = [e for e in events.recent() if e.kind.startswith("shadow") or e.kind == "evict"]
    return {"accusations": len(shadows), "reruns": len(events.recent()) - len(shadows)}


def _steps_to_name(training: Training, rate: float, seed: int) -> tuple[int, list[int]]:
    shadow = Shadow(rate, until_evicted=False)
    guard = Guard(training.model, training.optimizer, shadow=shadow, seed=seed)
    while not guard.shadow.accused.named and guard.steps_done < MOST_STEPS:
        guard.step(training.forward_backward, training.batch(guard.steps_done))
    return guard.steps_done, sorted(guard.shadow.accused.named)


def _rank(rank: int, store: str, said: str, steps: int, trials: int, seed: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    file, limit = dist.FileStore(store, RANKS), timedelta(seconds=config.timeout_s())
    dist.init_process_group("gloo", store=file, rank=rank, world_size=RANKS, timeout=limit)
    training, told = Training(seed), Path(said)
    result: dict[str, Any] = {"clean": _clean(training, steps, told.with_suffix(".steps"))}
    for rate, error_rate in NAMING:
        training.error_rate = error_rate if rank == FAULTY else 0.0
        draws = range(seed * trials, (seed + 1) * trials)
        taken = [_steps_to_name(training, rate, draw) for draw in draws]
        result[f"{rate}/{error_rate}"] = taken
    if rank == 0:
        told.write_text(json.dumps(result))
    dist.barrier()
    del training
    gc.collect()  # or gloo's threads can hang this process
    dist.destroy_process_group()


def measure(steps: int, trials: int, seed: int) -> dict[str, Any]:
    """What rank 0 found."""
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        said, told = Path(folder, "said.json"), Path(folder, "said.steps")
        context = get_context("forkserver")
        context.set_forkserver_preload(["holdfast.guard", "torch.distributed"])
        given = (str(Path(folder, "store")), str(said), steps, trials, seed)
        ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        task, waited_s = progress.add_task("audits", total=steps), 0.0
        while any(process.is_alive() for process in ranks) and waited_s < LIMIT_S:
            ranks[0].join(1.0)
            waited_s += 1.0
            progress.update(task, completed=int(told.read_text() or 0) if told.exists() else 0)
        for process in ranks:
            process.kill()
            process.join(10.0)
        if not said.exists():
            raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
        found: dict[str, Any] = json.loads(said.read_text())
        return found


def main() -> None:
    """All rows; exit code 1 if anyone was accused wrongly, or the faulty rank was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="clean steps, each audited")
    parser.add_argument("--trials", type=int, default=60, help="runs until the rank is named")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data, faults and audits")
    args = parser.parse_args()
    found = measure(args.steps, args.trials, args.seed)
    clean, wrong = found["clean"], found["clean"]["accusations"] > 0
    alarms = Rate(min(clean["accusations"], args.steps), args.steps)
    row = {"variant": "clean", "seed": args.seed, "ranks": RANKS, "audits": args.steps, **clean}
    if args.steps:
        record("shadow", {**row, "comparisons": RANKS * args.steps, "upper_95": alarms.upper})
    for rate, error_rate in NAMING if args.trials else ():
        trials = found[f"{rate}/{error_rate}"]
        said = expected_steps_to_name(rate, RANKS, error_rate)
        taken, named = [steps for steps, _ in trials], [units for _, units in trials]
        record(
            "shadow",
            {
                "variant": "naming",
                "seed": args.seed,
                "ranks": RANKS,
                "rate": rate,
                "error_rate": error_rate,
                "trials": len(trials),
                "named_rightly": sum(units == [FAULTY] for units in named),
                "expected_steps": round(said.expected, 2),
                "expected_range": [said.low, said.high],
                "mean_steps": round(statistics.mean(taken), 2),
                "longest_steps": max(taken),
                "within_range": sum(said.low <= steps <= said.high for steps in taken),
            },
        )
        wrong |= any(units != [FAULTY] for units in named)
    raise SystemExit(int(wrong))


if __name__ == "__main__":
    main()

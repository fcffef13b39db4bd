"""What recomputation and the whole ladder cost a training step.

    python -m bench.ladder [--tiny | --large] [--only PART …] [--dtype fp32|bf16 …] [--pairs N]

- ``audit``: a sample of steps under a Guard, one in a hundred of them repeated, against the same
  Guard without audits. The claim is at most 1.5 %.
- ``shadow``: three gloo ranks under DDP, one step in a hundred shadowed, against none; per rank.
- against the bare loop: ``guard``, a Guard with its statistics; ``checks``, that and verified
  products; ``snapshots``, that and a snapshot every step; ``ladder``, all of these and audits of
  one step in a hundred; ``planned``, the same with snapshots as often as the planner has them
  (``Snapshots(interval="auto")``: by what they cost here, for one failure a day).

Correctness first: each side must end with the bare loop's bits, and each sample of a hundred steps
has exactly one audit, for which the seed is chosen. The sides take turns of ten steps, at the end
of which the last snapshot is committed: no copy overlaps the other side's time.
"""

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.paired import paired
from bench.rows import record
from bench.training_step import DEMO, LARGE, Step
from holdfast import config
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.replay.majority import is_sampled
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast_lab.trainer.gpt import GPTConfig

TINY = (GPTConfig(layers=1, heads=2, width=32, context=16), 2)
RATE, CLAIM, RANKS = 0.01, 1.015, 3
TURNS = 10  # of each side in a sample
# What each part has over the bare loop.
RUNGS: dict[str, dict[str, Any]] = {
    "guard": {},
    "checks": {"checks": True},
    "snapshots": {"every": 1},
    "ladder": {"checks": True, "every": 1, "audit": RATE},
    "planned": {"checks": True, "interval": "auto", "audit": RATE},
}
PARTS = ("audit", "shadow", *RUNGS)
LIMIT_S = 3600.0

Size = tuple[GPTConfig, int]
Sampled = Callable[[int, int], bool]  # whether a step is, with a seed


def seed_for(sampled: Sampled, steps: int, samples: int) -> int:
    """The first seed with which every sample of so many steps has exactly one audit."""
    blocks = [range(n * steps, (n + 1) * steps) for n in range(samples)]
    return next(
        seed
        for seed in range(10**6)
        if all(sum(sampled(seed, step) for step in block) == 1 for block in blocks)
    )


class Side:
    """A model and what one turn of it does; a sample has so many steps."""

    def __init__(self, size: Size, dtype: str, steps: int) -> None:
        self.step, self.steps = Step(*size, dtype), steps // TURNS

    def bare(self) -> None:
        for _ in range(self.steps):
            self.step.bare()

    @contextmanager
    def guarded(
        self,
        *,
        checks: bool = False,
        every: int | None = None,
        interval: str | None = None,
        **options: Any,
    ) -> Iterator[Callable[[], None]]:
        """Steps under a Guard, with verified products and with snapshots if told so."""
        step = self.step
        with ExitStack() as stack:
            snapshots, settle = None, lambda: None
            if every or interval:
                run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                pace = {"every": every, "interval": interval}
                snapshots = Snapshots(step.model, step.optimizer, run_dir=run_dir, **pace)
                settle = snapshots.wait_committed
            guard = Guard(
                step.model, step.optimizer, snapshots=snapshots, clip_grad_norm=1.0, **options
            )
            stack.enter_context(guard)

            def run() -> None:
                with protect(step.model) if checks else ExitStack():
                    for _ in range(self.steps):
                        float(guard.step(step.forward_backward, step.batch))
                    settle()

            yield run


def _audited(seed: int, step: int) -> bool:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    return Guard(model, optimizer, audit=RATE, seed=seed)._is_audited(step)


def _timed(one: Side, first: Callable[[], None], two: Side, second: Callable[[], None], pairs: int):  # type: ignore[no-untyped-def]
    """Gate, then time, one side against the other."""
    for _ in range(TURNS):
        first()
        second()
    if one.step.digest() != two.step.digest():
        raise SystemExit("the sides do not end with the same bits; nothing was timed")
    return paired(first, second, pairs=pairs, warmup=0, turns=TURNS)


def audit(size: Size, dtype: str, steps: int, pairs: int) -> dict[str, Any]:
    """One process: audits against none."""
    plain, candidate = Side(size, dtype, steps), Side(size, dtype, steps)
    seed = seed_for(_audited, steps, pairs + 1)
    with plain.guarded() as none, candidate.guarded(audit=RATE, seed=seed) as audited:
        return _timed(plain, none, candidate, audited, pairs)


def against_bare(
    size: Size, dtype: str, steps: int, pairs: int, rungs: dict[str, Any]
) -> dict[str, Any]:
    """One process: some rungs of the ladder against the bare loop."""
    plain, candidate = Side(size, dtype, steps), Side(size, dtype, steps)
    seed = seed_for(_audited, steps, pairs + 1)
    with candidate.guarded(**rungs, seed=seed) as run:
        return _timed(plain, plain.bare, candidate, run, pairs)


def shadow(size: Size, dtype: str, steps: int, pairs: int) -> dict[str, Any]:
    """Ranks under DDP: shadows against none, as rank 0 sees it."""
    with tempfile.TemporaryDirectory() as folder:
        said, store = Path(folder, "said.json"), str(Path(folder, "store"))
        context = get_context("forkserver")
        given = (store, str(said), size, dtype, steps, pairs)
        ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(LIMIT_S)
            process.kill()
        if not said.exists():
            raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
        found: dict[str, Any] = json.loads(said.read_text())
        return found


def _rank(rank: int, store: str, said: str, size: Size, dtype: str, steps: int, pairs: int) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    file, limit = dist.FileStore(store, RANKS), timedelta(seconds=config.timeout_s())
    dist.init_process_group("gloo", store=file, rank=rank, world_size=RANKS, timeout=limit)
    seed = seed_for(lambda seed, step: is_sampled(RATE, seed, step), steps, pairs + 1)
    sides = [Side(size, dtype, steps) for _ in range(2)]
    for side in sides:
        side.step.model = DistributedDataParallel(side.step.model)
        for _ in range(2):  # DDP lays its buckets out anew after the first pass
            side.step.forward_backward(side.step.batch)
    with sides[0].guarded() as none, sides[1].guarded(shadow=RATE, seed=seed) as shadowed:
        row = _timed(sides[0], none, sides[1], shadowed, pairs)
    if rank == 0:
        Path(said).write_text(json.dumps(row))
    dist.barrier()
    del sides, side, none, shadowed
    gc.collect()  # or gloo's threads can hang this process
    dist.destroy_process_group()


def main() -> None:
    """Every part in every dtype; exit code 1 if an audit costs more than is claimed."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--tiny", action="store_true", help="only see that it runs; no row is kept")
    sizes.add_argument("--large", action="store_true", help="d_model 512, 8 layers, sequence 256")
    parser.add_argument("--only", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), action="append", help="default: both")
    # A seed with one audit in every sample is looked for: of more samples there is hardly one.
    parser.add_argument("--pairs", type=int, default=6, choices=range(1, 8), metavar="1…7")
    args = parser.parse_args()
    size, steps = (TINY, 20) if args.tiny else (LARGE if args.large else DEMO, round(1 / RATE))
    kept = print if args.tiny else record
    missed = False
    for part in args.only or PARTS:
        for dtype in args.dtype or ("fp32", "bf16"):
            given = size, dtype, steps, args.pairs
            if part in RUNGS:
                row = against_bare(*given, RUNGS[part])
            else:
                row = {"audit": audit, "shadow": shadow}[part](*given)
            missed |= part == "audit" and row["ratio"] > CLAIM
            circumstances = {"variant": part, "dtype": dtype, "rate": RATE, "steps": steps}
            circumstances |= {"width": size[0].width, "tokens": size[0].context * size[1]}
            circumstances["turns"] = TURNS
            circumstances["ranks"] = RANKS if part == "shadow" else 1
            kept("ladder", {**circumstances, **row})
    raise SystemExit(int(missed and not args.tiny))


if __name__ == "__main__":
    main()

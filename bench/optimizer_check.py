"""What the check of the optimizer's step costs of a training step, in CPU time and in paired steps.

    python -m bench.optimizer_check [--steps N] [--pairs N] [--demo] [--fused]

The model of ``bench.training_step --large`` (25 M parameters). Correctness first: with the check
the bits are those of the bare loop. Its CPU time is the mean over one round of 64 steps of the
optimizer alone, in which each parameter is checked once, and is divided by that of a whole step.
Pairs are whole steps of a Guard with the check and of one without.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.paired import paired
from bench.rows import record
from bench.training_step import DEMO, LARGE, Step
from holdfast import events
from holdfast.guard import Guard
from holdfast.step.optimizer_check import SHARE, OptimizerCheck


def timed(name: str, spent: list[float]) -> None:
    """Add the CPU time of a hook to the list."""
    plain = getattr(OptimizerCheck, name)

    def run(*args: object) -> object:
        before = time.process_time()
        found = plain(*args)
        spent.append(time.process_time() - before)
        return found

    setattr(OptimizerCheck, name, run)


def cpu_times(plain: Step, step: Step, steps: int) -> dict[str, Any]:
    """Compare the bits, and return the CPU times of the check and of whole steps."""
    spent: list[float] = []
    for name in ("_before", "_after"):
        timed(name, spent)
    check = OptimizerCheck(step.model, step.optimizer)
    check.watch()
    whole = []
    for _ in range(steps):
        plain.bare()
        before, hooks = time.process_time(), sum(spent)
        step.bare()
        whole.append(time.process_time() - before - (sum(spent) - hooks))
    if plain.digest() != step.digest():
        raise SystemExit("not the bare loop's bits: nothing was timed")
    spent.clear()
    round_of = round(1 / SHARE)
    for _ in range(round_of):
        step.optimizer.step()
    each = [before + after for before, after in zip(spent[::2], spent[1::2], strict=True)]
    check.close()
    step_s = statistics.median(whole)
    return {
        "step_cpu_s": step_s,
        "check_cpu_s": sum(each) / round_of,
        "share_of_step": sum(each) / round_of / step_s,
        "largest_check_of_step": max(each) / step_s,
        "updates_checked": check.coverage()[0]["checked"],
    }


def guarded(step: Step, share: float) -> Callable[[], None]:
    """Return the step under a Guard that checks a share of updates."""
    guard = Guard(step.model, step.optimizer, clip_grad_norm=1.0, optimizer_check=share)

    def run() -> None:
        guard.step(step.forward_backward, step.batch)

    return run


def main() -> None:
    """Check the bits, time, and record a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--demo", action="store_true", help="the demo's model")
    parser.add_argument("--fused", action="store_true", help="the fused AdamW")
    args = parser.parse_args()
    config, batch_size = DEMO if args.demo else LARGE

    def fresh() -> Step:
        made = Step(config, batch_size, "fp32")
        for group in made.optimizer.param_groups:
            group["fused"] = args.fused
        return made

    plain, step = fresh(), fresh()
    row = {
        "optimizer": "AdamW fused" if args.fused else "AdamW",
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "share": SHARE,
        **cpu_times(plain, step, args.steps),
    }
    if args.pairs:
        sides = [guarded(fresh(), share) for share in (0.0, SHARE)]
        row |= paired(*sides, pairs=args.pairs, warmup=1)
        if events.recent():
            raise SystemExit(f"steps were in doubt: {events.recent()[0].kind}")
    record("optimizer_check", row | {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()

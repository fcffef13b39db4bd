"""What the check of the state at rest costs of a training step, in CPU time of the process.

    python -m bench.at_rest [--steps N] [--demo]

The model of ``bench.training_step --large`` under a Guard with a snapshot after every step, and the
whole state checked in each. CPU time is taken because it hardly depends on other work on the
machine.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench.rows import record
from bench.training_step import DEMO, LARGE, Step
from holdfast.guard import Guard
from holdfast.snapshot.client.at_rest import AtRest
from holdfast.snapshot.client.snapshots import Snapshots


def main() -> None:
    """Time checks and steps, and record the median of their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--demo", action="store_true", help="the demo's model")
    args = parser.parse_args()
    config, batch_size = DEMO if args.demo else LARGE
    step, plain = (Step(config, batch_size, "fp32") for _ in range(2))
    checks: list[float] = []
    compare = AtRest._changed

    def timed(rest: AtRest, copy: object) -> list[int]:
        before = time.process_time()
        found = compare(rest, copy)  # type: ignore[arg-type]
        checks.append(time.process_time() - before)
        return found

    AtRest._changed = timed  # type: ignore[method-assign, assignment]
    steps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        snapshots = Snapshots(step.model, step.optimizer, run_dir=Path(folder))
        with Guard(
            step.model, step.optimizer, snapshots=snapshots, clip_grad_norm=1.0, at_rest=1.0
        ) as guard:
            for _ in range(args.steps):
                before = time.process_time()
                guard.step(step.forward_backward, step.batch)
                steps.append(time.process_time() - before)
                plain.bare()
    if step.digest() != plain.digest():
        raise SystemExit("not the bare loop's bits: nothing was timed")
    # The first step is run twice, and has no optimizer state yet.
    checks, steps = checks[2:], steps[1:]
    rows = sorted(check / whole for check, whole in zip(checks, steps, strict=True))
    state = sum(tensor.nbytes for tensor in step.model.parameters()) * 3
    record(
        "at_rest",
        {
            "parameters": sum(p.numel() for p in step.model.parameters()),
            "state_bytes": state,
            "check_cpu_s": statistics.median(checks),
            "step_cpu_s": statistics.median(steps),
            "share_of_step": statistics.median(rows),
            "quartiles": statistics.quantiles(rows, n=4)[::2],
        },
    )


if __name__ == "__main__":
    main()

"""What an adapter costs a healthy run: the framework's own trainer under ``protect``, and guarded.

    python -m bench.integrations [accelerate lightning …] [--pairs N] [--steps N]

Correctness first: both runs must end with the same bits. A sample is a whole run of the trainer,
with a snapshot every step; the difference of a long and a short run leaves out how both begin and
end. Each framework has a file ``bench/integrations_<name>.py`` with a function ``train(steps,
run_dir)``, which trains without an adapter if ``run_dir`` is None, and returns a digest. They train
the same GPT-2 in steps of two batches of four sequences; torchtitan trains a Llama 3 of that width.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles

import torch

from bench.rows import record

Train = Callable[[int, Path | None], str]
SHORT = 4


def seconds(train: Train, steps: int, *, guarded: bool) -> float:
    """Time the steps of a run beyond the first few."""
    times = []
    for length in (SHORT, SHORT + steps):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            train(length, Path(folder) / "run" if guarded else None)
            times.append(time.perf_counter() - began)
    return times[1] - times[0]


def measure(name: str, steps: int, pairs: int) -> dict[str, object]:
    """Compare a framework's training with and without its adapter."""
    train: Train = import_module(f"bench.integrations_{name}").train
    with tempfile.TemporaryDirectory() as folder:
        if train(SHORT, Path(folder) / "run") != train(SHORT, None):
            raise SystemExit(f"{name}: the guarded run has other bits")
    found = [
        (seconds(train, steps, guarded=False), seconds(train, steps, guarded=True))
        for _ in range(pairs)
    ]
    ratios = [guarded / bare for bare, guarded in found]
    low, _, high = quantiles(ratios, n=4)
    return {
        "framework": name,
        "steps": steps,
        "pairs": pairs,
        "ratio": round(median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "bare_ms_a_step": round(1000 * median(bare for bare, _ in found) / steps, 2),
        "guarded_ms_a_step": round(1000 * median(guarded for _, guarded in found) / steps, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure the frameworks that are named, by default all."""
    known = sorted(
        path.stem.split("_", 1)[1] for path in Path(__file__).parent.glob("integrations_*")
    )
    parser = argparse.ArgumentParser(description="Cost of the adapters on healthy runs.")
    parser.add_argument("frameworks", nargs="*", default=known)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.frameworks:
        row = measure(name, options.steps, options.pairs)
        record("integrations", row)


if __name__ == "__main__":
    main()

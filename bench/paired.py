"""Paired timing: A B A B …, and the ratio pair by pair, so that drift of the machine cancels."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def paired(
    baseline: Callable[[], None],
    candidate: Callable[[], None],
    *,
    pairs: int,
    warmup: int = 2,
) -> dict[str, Any]:
    """Time both in turn and summarise the ratios candidate / baseline.

    Returns:
        Median, quartiles and number of the ratios, and the median seconds of each side.
    """
    for _ in range(warmup):
        baseline()
        candidate()
    times = [(_seconds(baseline), _seconds(candidate)) for _ in range(pairs)]
    ratios = sorted(b / a for a, b in times)
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "pairs": pairs,
        "baseline_s": round(statistics.median(a for a, _ in times), 5),
        "candidate_s": round(statistics.median(b for _, b in times), 5),
    }


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _seconds(run: Callable[[], None]) -> float:
    _synchronise()
    started_s = time.perf_counter()
    run()
    _synchronise()
    return time.perf_counter() - started_s

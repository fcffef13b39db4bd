"""Timing of functions for the studies of overhead."""

from collections.abc import Callable
from statistics import median
from time import perf_counter


def seconds(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started_s = perf_counter()
    run()
    return perf_counter() - started_s


def median_s(run: Callable[[], object], trials: int) -> float:
    """Return the median seconds of several calls."""
    return median(seconds(run) for _ in range(trials))

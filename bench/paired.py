"""Paired timing: A B A B …, and the ratio pair by pair, so that drift of the machine cancels."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


def positive(text: str) -> int:
    """Read an option that is a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def several(text: str) -> int:
    """Read a number of pairs, of which quartiles are taken."""
    if positive(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: quartiles need at least 2 pairs")
    return int(text)


def paired(
    baseline: Callable[[], None],
    candidate: Callable[[], None],
    *,
    pairs: int,
    warmup: int = 2,
    turns: int = 1,
    before: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time both in turn and summarise the ratios candidate / baseline.

    Args:
        turns: how often each runs in one pair, in turn; the ratio is that of the sums. Where a long
            sample is wanted, a machine that changes its speed meanwhile changes it for both sides.
        before: called before every run and not timed, e.g. to flush the cache.

    Returns:
        Median, quartiles and number of the ratios, the median seconds of each side, and the median
        ratio of the CPU time of all threads: other programs on the machine lengthen it less.
    """
    for _ in range(warmup):
        for run in (baseline, candidate):
            before()
            run()
    times = [_pair(baseline, candidate, turns, before) for _ in range(pairs)]
    ratios = sorted(b.wall / a.wall for a, b in times)
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
        "cpu_ratio": round(statistics.median(b.cpu / a.cpu for a, b in times), 4),
        "pairs": pairs,
        "baseline_s": round(statistics.median(a.wall for a, _ in times), 7),
        "candidate_s": round(statistics.median(b.wall for _, b in times), 7),
    }


class Placements(Generic[T]):
    """The same operands in several places of memory, which take turns pair by pair.

    Where operands lie moves a small product by more than a check costs; one place would be measured
    instead of the check. Give ``turn`` to ``paired`` as ``before``.
    """

    def __init__(self, places: Sequence[T]) -> None:
        self.places = places
        self._runs = 0

    def turn(self) -> None:
        """Another run follows: every second time at another place."""
        self._runs += 1

    @property
    def current(self) -> T:
        """Where the run takes place."""
        return self.places[(self._runs - 1) // 2 % len(self.places)]


class _Seconds(NamedTuple):
    wall: float
    cpu: float


def _synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _pair(
    baseline: Callable[[], None],
    candidate: Callable[[], None],
    turns: int,
    before: Callable[[], None],
) -> tuple[_Seconds, _Seconds]:
    each = [(_seconds(baseline, before), _seconds(candidate, before)) for _ in range(turns)]
    sums = [
        _Seconds(sum(s.wall for s in side), sum(s.cpu for s in side))
        for side in zip(*each, strict=True)
    ]
    return sums[0], sums[1]


def _seconds(run: Callable[[], None], before: Callable[[], None]) -> _Seconds:
    before()
    _synchronise()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _synchronise()
    return _Seconds(time.perf_counter() - wall, time.process_time() - cpu)

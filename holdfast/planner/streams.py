"""Random times of the faults of one kind in a fleet, and Poisson and binomial counts."""

import random
from heapq import heapify, heapreplace
from math import exp, gamma, inf, sqrt

from holdfast.planner.fleet import Faults

_GAUSSIAN_FROM = 1000.0
_CHUNK = 500.0


class Stream:
    """The faults of several units in order of time, with Weibull times between those of a unit.

    The stream is stationary: a unit's first time is the rest of an interval that has already begun.
    With exponential times all units together are one Poisson stream. ``next_s`` is the time of the
    next fault.
    """

    def __init__(self, faults: Faults, units: int, draw: random.Random) -> None:
        self._units, self._draw = units, draw
        self._shape, self._mttf_s = faults.shape, faults.mttf_s
        self._scale = faults.mttf_s / gamma(1 + 1 / faults.shape)
        self._heap: list[tuple[float, int]] = []
        self.next_s = inf
        if faults.mttf_s == inf:
            return
        if faults.shape == 1:
            self.next_s = draw.expovariate(units / faults.mttf_s)
            return
        self._heap = [(self._left_s(), unit) for unit in range(units)]
        heapify(self._heap)
        self.next_s = self._heap[0][0]

    def _left_s(self) -> float:
        """Draw the rest of an interval at a random time, which hits longer ones more often."""
        power = self._draw.gammavariate(1 + 1 / self._shape, 1.0)
        return float(self._draw.random() * self._scale * power ** (1 / self._shape))

    def advance(self) -> int:
        """Return the unit of the next fault and set ``next_s`` to the one after it."""
        if not self._heap:
            self.next_s += self._draw.expovariate(self._units / self._mttf_s)
            return self._draw.randrange(self._units)
        unit = self._heap[0][1]
        again_s = self.next_s + self._draw.weibullvariate(self._scale, self._shape)
        heapreplace(self._heap, (again_s, unit))
        self.next_s = self._heap[0][0]
        return unit


def poisson(draw: random.Random, mean: float) -> int:
    """Draw a Poisson count; for means above 1,000 from the normal distribution, rounded."""
    if mean > _GAUSSIAN_FROM:
        return max(0, round(draw.gauss(mean, sqrt(mean))))
    count = 0
    while mean > 0:
        # A Poisson count is the sum of counts with smaller means, whose exp does not underflow.
        part = min(mean, _CHUNK)
        mean -= part
        left, floor = draw.random(), exp(-part)
        while left > floor:
            left *= draw.random()
            count += 1
    return count


def binomial(draw: random.Random, count: int, share: float) -> int:
    """Draw a binomial count; for more than 1,000 trials from the normal distribution, rounded."""
    if count > _GAUSSIAN_FROM:
        spread = sqrt(count * share * (1 - share))
        return min(count, max(0, round(draw.gauss(count * share, spread))))
    return sum(draw.random() < share for _ in range(count))

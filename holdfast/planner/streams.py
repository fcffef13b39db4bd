"""When faults of one kind strike the units of a fleet; and counts drawn without a library."""

import random
from heapq import heapify, heapreplace
from math import exp, gamma, inf, sqrt

from holdfast.planner.fleet import Faults

_GAUSSIAN_FROM = 1000.0
_CHUNK = 500.0


class Stream:
    """Faults of so many units, each with Weibull times between them, in the order of time.

    A unit that failed begins anew. The stream is met in full course: a unit's first time is what
    is left of an interval under way. Of exponential times all units are one Poisson stream.

    ``next_s`` is when the next one strikes; ``advance()`` says which unit it does.
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
        """Of the interval that a random moment falls into, which is drawn by its length."""
        power = self._draw.gammavariate(1 + 1 / self._shape, 1.0)
        return float(self._draw.random() * self._scale * power ** (1 / self._shape))

    def advance(self) -> int:
        """The unit that is struck now; ``next_s`` moves on."""
        if not self._heap:
            self.next_s += self._draw.expovariate(self._units / self._mttf_s)
            return self._draw.randrange(self._units)
        unit = self._heap[0][1]
        again_s = self.next_s + self._draw.weibullvariate(self._scale, self._shape)
        heapreplace(self._heap, (again_s, unit))
        self.next_s = self._heap[0][0]
        return unit


def poisson(draw: random.Random, mean: float) -> int:
    """A Poisson count; of means above 1,000 the normal limit, rounded."""
    if mean > _GAUSSIAN_FROM:
        return max(0, round(draw.gauss(mean, sqrt(mean))))
    count = 0
    while mean > 0:
        # Means add up: exp of each part is far from underflow.
        part = min(mean, _CHUNK)
        mean -= part
        left, floor = draw.random(), exp(-part)
        while left > floor:
            left *= draw.random()
            count += 1
    return count


def binomial(draw: random.Random, count: int, share: float) -> int:
    """A binomial count; of more than 1,000 the normal limit, rounded."""
    if count > _GAUSSIAN_FROM:
        spread = sqrt(count * share * (1 - share))
        return min(count, max(0, round(draw.gauss(count * share, spread))))
    return sum(draw.random() < share for _ in range(count))

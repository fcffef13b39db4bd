"""Ranks that compute for longer than the others, and so hold all of them up."""

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

SLOWER = 1.3  # times the median of the other ranks
SPREADS = 5.0  # standard deviations of the other ranks above it
LOOKS = 3  # so many in a row
_NORMAL = 1.4826  # from the median absolute deviation to the standard deviation


class Stragglers:
    """Compares the ranks' own times of a step, look after look."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = defaultdict(int)  # in a row: slow ones above 0, others below
        self._told: set[int] = set()

    def look(self, own_s: Mapping[int, float]) -> dict[int, float]:
        """Return the ranks that have just become stragglers, with their factor over the others.

        A rank is one if its time is 1.3 × the median of the others, and five deviations above it,
        in three looks in a row. It is told again only after it was not in three looks in a row.
        ``own_s`` are the seconds that each rank computes in a step.
        """
        found = {}
        for rank, own in own_s.items():
            others = [each for other, each in own_s.items() if other != rank]
            middle = median(others or [own])
            spread = _NORMAL * median(abs(each - middle) for each in others or [own])
            slow = own > SLOWER * middle and own > middle + SPREADS * spread
            before = self._looks[rank]
            self._looks[rank] = max(before, 0) + 1 if slow else min(before, 0) - 1
            if self._looks[rank] == LOOKS and rank not in self._told:
                self._told.add(rank)
                found[rank] = own / middle if middle else float("inf")
            elif self._looks[rank] == -LOOKS:
                self._told.discard(rank)
        return found

"""The units that shadow replicas have found wrong so far, and the events that name them."""

import time
from collections import Counter
from collections.abc import Sequence

from holdfast import events
from holdfast.events import EventKind
from holdfast.replay.majority import Judgement

WRONG_TO_EVICT = 2  # wrong passes, in one audit or several, that make a fault persistent


class Accused:
    """Counts the wrong passes of each unit; the counts are the same on all ranks.

    Attributes:
        named: Number of wrong passes by unit.
        evicted: Units with ``WRONG_TO_EVICT`` wrong passes or more.
    """

    def __init__(
        self, units: Sequence[tuple[int, ...]], rank: int, places: Sequence[tuple[str, str]]
    ) -> None:
        self._units, self._rank, self._places = units, rank, places
        self.named: Counter[int] = Counter()
        self.evicted: set[int] = set()

    def take(self, judged: Judgement, started_s: float) -> None:
        """Record an event for each wrong unit, on one rank that is not part of any of them."""
        accused = judged.accused()
        blameless = [unit for unit in range(len(self._units)) if unit not in accused]
        speaks = self._rank == self._units[(blameless or [0])[0]][0]
        for unit, count in accused.items():
            self.named[unit] += count
            evict = self.named[unit] >= WRONG_TO_EVICT and unit not in self.evicted
            if evict:
                self.evicted.add(unit)
            if speaks:
                self._name(judged, unit, started_s, evict=evict)
        if judged.undecided and self._rank == self._units[0][0]:
            ranks = [list(self._units[unit]) for unit in judged.undecided]
            events.record(EventKind.SHADOW_UNDECIDED, detector="shadow", detail={"units": ranks})

    def _name(self, judged: Judgement, unit: int, started_s: float, *, evict: bool) -> None:
        wrong = [run for run in judged.wrong if run.by == unit]
        detail = {
            "unit": list(self._units[unit]),
            "wrong_passes": len(wrong),
            "own": any(run.target == unit for run in wrong),
            "wrong_passes_so_far": self.named[unit],
        }
        for rank in self._units[unit]:
            host, device = self._places[rank]
            here = {"rank": rank, "host": host, "device": device, "detector": "shadow"}
            events.record(
                EventKind.SHADOW_MISMATCH,
                rung="" if judged.undecided else "recompute",
                duration_s=time.perf_counter() - started_s,
                detail=detail,
                **here,
            )
            if evict:
                events.record(EventKind.EVICT, detail=detail, **here)

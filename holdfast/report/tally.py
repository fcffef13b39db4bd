"""Counts of a run's events for the HTML page and for Prometheus, limited in number of labels."""

from collections import Counter, defaultdict
from collections.abc import Callable

from holdfast.events import Event, Role
from holdfast.report.kinds import role_of

MANY = {"kind": 100, "rung": 10, "rank": 1024, "op": 200, "host": 256}
OTHER = "other"


class Names:
    """The first ``limit`` values of a label; later ones are counted as ``other``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def __call__(self, name: str) -> str:
        """Return the name, or ``other`` if there are too many."""
        if name not in self._known and len(self._known) >= self._limit:
            return OTHER
        self._known.add(name)
        return name


class Tally:
    """Events by kind, rung and rank, faults by op, and seconds by rung.

    Guarantees: counts only grow, and a label once given stays with its value; at most ``MANY``
    values a label, so that a broken run cannot flood what scrapes it.
    """

    def __init__(self) -> None:
        self._names: dict[str, Callable[[str], str]] = {n: Names(size) for n, size in MANY.items()}
        self.events: Counter[tuple[str, str, str]] = Counter()  # kind, rung, rank
        self.ops: Counter[str] = Counter()
        self.hosts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, event: Event) -> None:
        """Count one event."""
        labels = {"kind": event.kind, "rung": event.rung, "rank": str(event.rank)}
        kind, rung, rank = (self._names[name](value) for name, value in labels.items())
        self.events[kind, rung, rank] += 1
        if role_of(event) is Role.FOUND:
            self.hosts[self._names["host"](event.host)] += 1
            if event.op:
                self.ops[self._names["op"](event.op)] += 1
        if rung:
            self.seconds[rung] += event.duration_s

    def by(self, label: str) -> dict[str, int]:
        """Sum the events by ``kind``, ``rung`` or ``rank``, the most frequent first."""
        place = ("kind", "rung", "rank").index(label)
        sums: Counter[str] = Counter()
        for key, count in self.events.items():
            sums[key[place]] += count
        return dict(sums.most_common())

    def as_dict(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return {
            "events": sum(self.events.values()),
            **{f"by_{label}": self.by(label) for label in ("kind", "rung", "rank")},
            "by_op": dict(self.ops.most_common()),
            "seconds_by_rung": dict(self.seconds),
        }

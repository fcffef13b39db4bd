"""Counts of a run's events for the HTML page and for Prometheus, with limits on labels."""

from collections import Counter, defaultdict

from holdfast.events import Event, Role
from holdfast.report.kinds import role_of

MANY = {"kind": 100, "rung": 10, "rank": 1024, "op": 200, "host": 256}
OTHER = "other"


class Tally:
    """Events by kind, rung and rank, faults by op and host, and seconds by rung.

    Guarantees: counts only grow, and a name keeps its label. There are at most ``MANY`` labels of
    each kind, so that a broken run cannot overload the server that scrapes it.
    """

    def __init__(self) -> None:
        self._known: defaultdict[str, set[str]] = defaultdict(set)
        self.events: Counter[tuple[str, str, str]] = Counter()  # kind, rung, rank
        self.ops: Counter[str] = Counter()
        self.hosts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, event: Event) -> None:
        """Count one event."""
        rung = self._label("rung", event.rung)
        self.events[
            self._label("kind", event.kind), rung, self._label("rank", str(event.rank))
        ] += 1
        if role_of(event) is Role.FOUND:
            self.hosts[self._label("host", event.host)] += 1
            if event.op:
                self.ops[self._label("op", event.op)] += 1
        if rung:
            self.seconds[rung] += event.duration_s

    def _label(self, kind: str, name: str) -> str:
        """Return the name, or ``other`` if there are ``MANY`` other names of this kind already."""
        known = self._known[kind]
        if name not in known and len(known) >= MANY[kind]:
            return OTHER
        known.add(name)
        return name

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

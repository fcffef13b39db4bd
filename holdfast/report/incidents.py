"""Grouping of events into incidents: a fault, the check that detected it, and the response.

An incident is a fault that was repaired within an op, a step that was repeated or rolled back, or
the end of processes from which the run recovered.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.events import RUNGS, Event, EventKind, Role
from holdfast.inject.schedule import KILLS
from holdfast.report.kinds import CAME_BACK, role_of

STATUSES = {
    "answered": "answered",
    "genuine": "confirmed as computed",
    "below the line": "below the line",
    "not seen": "not seen",
    "open": "not repaired",
}
# Kinds of events without a step or an op: each is an incident of its own, with this status.
SINGLE: dict[str, str] = {
    EventKind.SNAPSHOT_CORRUPT: "answered",
    EventKind.SMP_LOST: "answered",
    EventKind.SNAPSHOTS_LOST: "open",
    EventKind.REPLICA_DIVERGED: "open",
}
T = TypeVar("T")
_GRAVITY = {name: place for place, name in enumerate(STATUSES)}


@dataclass
class Incident:
    """One fault and the response to it.

    ``struck`` counts the injected faults by their description, and ``kinds`` lists what was found
    and done. ``start_s`` and ``end_s`` are seconds since 1970; ``step`` is −1 outside of steps.
    ``rung`` is the highest one that repaired something, ``status`` is one of ``STATUSES``, and
    ``in_op_s`` is the time of repairs inside ops.
    """

    start_s: float
    end_s: float
    step: int
    ranks: list[int] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    detectors: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    kinds: list[str] = field(default_factory=list)
    rung: str = ""
    status: str = "open"
    events: int = 0
    in_op_s: float = 0.0

    @property
    def at_rest(self) -> bool:
        """True if a fault was injected into the state at rest."""
        return any(text.endswith("(rest)") for text in self.struck)

    @property
    def duration_s(self) -> float:
        """The sum of repairs inside ops, or the wall time of any other incident."""
        return self.in_op_s if self.rung == "correct" else self.end_s - self.start_s

    @property
    def gravity(self) -> tuple[int, int, float]:
        """The key that sorts graver incidents last: status, rung, duration."""
        return _GRAVITY[self.status], RUNGS.index(self.rung), self.duration_s

    def as_dict(self) -> dict[str, object]:
        """Return the incident as plain values."""
        return {**vars(self), "struck": dict(self.struck), "duration_s": self.duration_s}


def incidents_of(events: Iterable[Event]) -> list[Incident]:
    """Group the events of a run into incidents, by the time they began."""
    book = _Book()
    for event in sorted(events, key=lambda event: event.time_s):
        book.take(event)
    told = (incident for incident in book.incidents if incident.events)
    return sorted(told, key=lambda incident: incident.start_s)


def is_kill(event: Event) -> bool:
    """Return whether an injected fault ended processes instead of changing values."""
    return event.detail.get("kind") in KILLS


def struck_text(event: Event) -> str:
    """Describe an injected fault."""
    detail = event.detail
    bit = f" bit {detail['bit']}" if detail.get("bit") is not None else ""
    place = "" if is_kill(event) else f" ({detail.get('site', '')})"
    return f"{str(detail.get('kind', '')).replace('_', ' ')}{bit}{place}"


class _Book:
    """The incidents so far, and those to which the next event may belong."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._in_op: dict[tuple[int, int, str], Incident] = {}
        self._steps: dict[int, Incident] = {}
        self._unseen: dict[int, dict[int, Incident]] = {}  # injected in a step, not answered yet
        self._death: Incident | None = None
        self._restored: set[tuple[int, str]] = set()

    def take(self, event: Event) -> None:
        """Add an event to its incident; events come in order of time."""
        role = role_of(event)
        if role is Role.NOTE:
            return
        if event.kind in SINGLE:
            self._add(self._new(event), event).status = SINGLE[event.kind]
        elif event.kind in CAME_BACK and event.step < 0:
            self._restore(event)
        elif role is Role.STRUCK and is_kill(event):
            if self._is_back(event.rank):
                self._death, self._restored = None, set()
            self._death = self._death or self._new(event)
            self._add(self._death, event)
        else:
            if self._restored:
                self._death, self._restored = None, set()
            self._strike(event) if role is Role.STRUCK else self._in_step(event, role)

    def _is_back(self, rank: int) -> bool:
        """Return whether a rank, or of a whole host (−1) any, has returned from the last death."""
        return any(rank in (-1, restored) for restored, _ in self._restored)

    def _strike(self, event: Event) -> None:
        incident = self._add(self._new(event), event)
        incident.status = "below the line" if event.detail.get("below_line") else "not seen"
        self._unseen.setdefault(event.step, {})[id(incident)] = incident
        if event.detail.get("site") != "module":
            self._in_op[_place(event)] = incident

    def _in_step(self, event: Event, role: Role) -> None:
        place = _place(event)
        # A step is repeated after the repair of a weight at rest: both are one incident.
        alone = event.kind in (EventKind.STATE_FAULT, EventKind.OPTIMIZER_FAULT)
        if event.rung == "correct" and not alone:
            incident = self._in_op.get(place) or self._new(event)
            self._in_op[place] = self._add(incident, event)
            self._unseen.get(event.step, {}).pop(id(incident), None)
            return
        incident = self._steps.get(event.step) or self._new(event)
        self._steps[event.step] = self._add(incident, event)
        struck = self._in_op.pop(place, None)
        if struck is not None and id(struck) in self._unseen.get(event.step, {}):
            self._absorb(incident, struck)
        # A shadow finds a fault and repairs it in one event, and so do the checks of the state at
        # rest and of updates; but a repaired tensor says nothing of other faults in its step.
        if role is Role.ANSWER or (event.rung and not alone):
            self._answer(incident, event)

    def _answer(self, incident: Incident, event: Event) -> None:
        verdict = event.detail.get("verdict")
        if event.rung:
            unseen = [*self._unseen.get(event.step, {}).values()]
            if event.rung == "rollback":  # which undoes what was struck at rest in steps before
                earlier = (self._unseen[step] for step in self._unseen if step < event.step)
                unseen += [each for found in earlier for each in found.values() if each.at_rest]
            for struck in unseen:
                self._absorb(incident, struck)
        elif verdict == "persistent":
            incident.status = "open"
        elif incident.status == "open" and verdict in ("genuine", None):
            incident.status = "genuine"

    def _absorb(self, incident: Incident, struck: Incident) -> None:
        """Merge an injected fault into the incident of the step that it disturbed."""
        incident.start_s = min(incident.start_s, struck.start_s)
        incident.ranks = _joined(struck.ranks, incident.ranks)
        incident.ops = _joined(struck.ops, incident.ops)
        incident.struck.update(struck.struck)
        incident.events += struck.events
        struck.events = 0
        del self._unseen[struck.step][id(struck)]

    def _restore(self, event: Event) -> None:
        if self._death is None or (event.rank, event.kind) in self._restored:
            self._death, self._restored = self._new(event), set()
        self._restored.add((event.rank, event.kind))
        self._add(self._death, event).detectors = ["restart"]
        # Steps that follow have the same numbers as earlier ones and are computed again.
        self._in_op.clear()
        self._steps.clear()
        self._unseen.clear()

    def _new(self, event: Event) -> Incident:
        incident = Incident(event.time_s - event.duration_s, event.time_s, event.step)
        self.incidents.append(incident)
        return incident

    def _add(self, incident: Incident, event: Event) -> Incident:
        incident.end_s = max(incident.end_s, event.time_s)
        incident.events += 1
        incident.in_op_s += event.duration_s if event.rung == "correct" else 0.0
        incident.ranks = _joined(incident.ranks, [event.rank] if event.rank >= 0 else [])
        incident.ops = _joined(incident.ops, [event.op] if event.op else [])
        incident.detectors = _joined(incident.detectors, [event.detector] if event.detector else [])
        if event.kind == EventKind.INJECTED:
            incident.struck[struck_text(event)] += 1
        else:
            incident.kinds = _joined(incident.kinds, [EventKind.summary_of(event.kind)])
        if event.rung in RUNGS[1:]:
            incident.status = "answered"
            incident.rung = max(incident.rung, event.rung, key=RUNGS.index)
        return incident


def _place(event: Event) -> tuple[int, int, str]:
    updated = event.kind == EventKind.OPTIMIZER_FAULT or event.detail.get("site") == "update"
    return event.rank, event.step, "update" if updated else event.op


def _joined(first: list[T], more: Iterable[T]) -> list[T]:
    """Concatenate two lists without repetitions."""
    return list(dict.fromkeys([*first, *more]))

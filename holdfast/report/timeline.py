"""The events of a run as marks on lanes over wall time, or as columns of counts."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.events import RUNGS, Event, EventKind, Role
from holdfast.report.incidents import struck_text
from holdfast.report.kinds import RUNG_TITLES, role_of
from holdfast.report.quantities import duration, shortened

LANES = {
    "struck": "injected",
    "found": "seen",
    **RUNG_TITLES,
    "note": "noted",
}
MARKS_A_LANE = 200
COLUMNS = 120
# The kinds that the persister records. Other events without a rank belong to a whole host or run.
_OF_PERSISTER = (
    *(EventKind.PERSISTED, EventKind.PERSIST_SLOW, EventKind.PERSIST_FAILED),
    EventKind.SNAPSHOT_CORRUPT,
)


@dataclass(frozen=True)
class Mark:
    """One event, or several in a column, at a number of seconds since the first event.

    ``lasted_s`` is the duration that a single event had when it was recorded.
    """

    at_s: float
    count: int
    text: str
    lasted_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The marks of all events of a run, by lane and time.

    ``start_s`` is the first event in seconds since 1970. ``lanes`` has the order of ``LANES`` and
    leaves out empty ones. ``column_s`` is the width of a lane's columns, 0 if each event has a mark
    of its own.
    """

    start_s: float
    span_s: float
    lanes: dict[str, list[Mark]]
    column_s: dict[str, float]


def timeline_of(events: Iterable[Event]) -> Timeline | None:
    """Make the timeline of a run; return None without events."""
    ordered = sorted(events, key=lambda event: event.time_s)
    if not ordered:
        return None
    start_s, span_s = ordered[0].time_s, ordered[-1].time_s - ordered[0].time_s
    by_lane: defaultdict[str, list[Event]] = defaultdict(list)
    for event in ordered:
        by_lane[lane_of(event)].append(event)
    lanes, column_s = {}, {}
    for lane in (name for name in LANES if name in by_lane):
        many = len(by_lane[lane]) > MARKS_A_LANE
        column_s[lane] = span_s / COLUMNS if many else 0.0
        draw = _columns if many else _single
        lanes[lane] = draw(by_lane[lane], start_s, column_s[lane])
    return Timeline(start_s, span_s, lanes, column_s)


def lane_of(event: Event) -> str:
    """Choose the lane of an event by its rung, or without one by its role."""
    if event.rung in RUNGS[1:]:
        return event.rung
    role = role_of(event)
    if role in (Role.STRUCK, Role.NOTE):
        return str(role.value)
    return "found"


def describe(event: Event) -> str:
    """Describe an event in one line."""
    injected = event.kind == EventKind.INJECTED
    what = shortened(struck_text(event) if injected else EventKind.summary_of(event.kind))
    seen = f", seen by {shortened(event.detector)}" if event.detector else ""
    place = f" in {shortened(event.op)}" if event.op else ""
    took = f", {duration(event.duration_s)}" if event.duration_s else ""
    step = f"step {event.step}" if event.step >= 0 else ""
    who = "persister" if event.kind in _OF_PERSISTER else ""
    who = f"rank {event.rank}" if event.rank >= 0 else who
    origin = ", ".join(filter(None, (step, who)))
    return f"{origin}: {what}{place}{seen}{took}" if origin else f"{what}{place}{seen}{took}"


def _single(events: list[Event], start_s: float, _: float) -> list[Mark]:
    return [Mark(event.time_s - start_s, 1, describe(event), event.duration_s) for event in events]


def _columns(events: list[Event], start_s: float, width_s: float) -> list[Mark]:
    counts = [0] * COLUMNS
    for event in events:
        place = (event.time_s - start_s) / width_s if width_s else 0
        counts[min(COLUMNS - 1, int(place))] += 1
    return [
        Mark((place + 0.5) * width_s, count, f"{count:,} events")
        for place, count in enumerate(counts)
        if count
    ]

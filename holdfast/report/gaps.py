"""Where a run had less protection than it asked for, as far as its ledger and its results tell."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.events import Event, EventKind
from holdfast.report.sources import Record

# Kinds by what was missing, in the order of the page; names of other releases may be among them.
MISSING: dict[str, tuple[str, ...]] = {
    "not covered": (),  # from the coverage of matrix products
    "not committed": (
        *("snapshots_suspended", EventKind.SNAPSHOT_TORN, EventKind.SMP_LOST),
        *(EventKind.REPLICA_DIVERGED, EventKind.PERSIST_FAILED, EventKind.PERSIST_SLOW),
    ),
    "not restored": (
        *(EventKind.SNAPSHOTS_LOST, EventKind.SNAPSHOT_CORRUPT, "begun_again"),
        EventKind.LOADER_UNSAVED,
    ),
    "not verified": (
        *("guard_attached", EventKind.WEIGHT_CHANGED_UNSEEN, EventKind.SHADOW_UNDECIDED),
        *(EventKind.NONFINITE_GENUINE, EventKind.SCRUB_FAILED),
    ),
    "not recorded": (EventKind.EVENTS_DROPPED,),
}
COVERAGE_REMEDY = "docs/fault_model.md says what is covered; Guard(audit=1.0) repeats every step."
_REASONS = ("reason", "error", "cause")


@dataclass(frozen=True)
class Gap:
    """A kind of missing protection: how often, the latest reason if one is known, and a remedy."""

    missing: str
    what: str
    count: int
    reason: str
    remedy: str


def gaps_of(events: Iterable[Event], coverage: Record | None) -> list[Gap]:
    """List what was not covered, committed, restored, verified or recorded, one entry a kind."""
    by_kind: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_kind[event.kind].append(event)
    found = list(_uncovered(coverage["sites"])) if coverage is not None else []
    for missing, kinds in MISSING.items():
        found += [_gap(missing, by_kind[kind]) for kind in kinds if kind in by_kind]
    return found


def _uncovered(sites: Sequence[Record]) -> Iterable[Gap]:
    reasons = Counter(site["reason"] for site in sites if not site["covered"])
    for reason, count in reasons.most_common():
        yield Gap("not covered", "matrix products", count, reason, COVERAGE_REMEDY)


def _gap(missing: str, events: Sequence[Event]) -> Gap:
    latest = max(events, key=lambda event: event.time_s)
    counts = [event.detail.get("count") for event in events]
    total = sum(count if isinstance(count, int) else 1 for count in counts)
    reason = next((str(latest.detail[name]) for name in _REASONS if name in latest.detail), "")
    remedy = EventKind(latest.kind).advice if latest.kind in {*EventKind} else ""
    return Gap(missing, EventKind.summary_of(latest.kind), total, reason, remedy)

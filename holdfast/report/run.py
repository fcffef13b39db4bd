"""The report on a training run, read from its directory."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from holdfast.errors import ConfigError
from holdfast.events import Event, EventKind
from holdfast.report import sources
from holdfast.report.gaps import Gap, gaps_of
from holdfast.report.incidents import Incident, incidents_of
from holdfast.report.kinds import RUNG_TITLES
from holdfast.report.sources import Record
from holdfast.report.suspects import Faults, Suspect
from holdfast.report.tally import Tally
from holdfast.report.timeline import Timeline, timeline_of
from holdfast.snapshot.node.launch import FINISHED_NAME

INCIDENTS_SHOWN = 200
DEVICES_SHOWN, OPS_SHOWN = 20, 10
POINTS = 500  # a curve is drawn with at most so many


@dataclass(frozen=True)
class State:
    """The state of a run: ``running``, ``finished``, ``failed``, ``interrupted`` or ``unknown``.

    It is unknown of a user's own script that ended without snapshots or in the middle.
    ``reason`` says why it failed; ``last_sign_s`` is the time of its last write, in seconds since
    1970.
    """

    kind: str
    reason: str
    last_sign_s: float


@dataclass(frozen=True)
class Curve:
    """Loss and wall time of steps; of each ``stride`` steps in a long run, the highest values."""

    steps: list[int]
    loss: list[float]
    seconds: list[float]
    stride: int


@dataclass(frozen=True)
class Pace:
    """The durations of steps, in seconds, on the rank that writes metrics."""

    steps: int
    median_s: float
    p95_s: float
    total_s: float
    repeated: int
    repeated_s: float


@dataclass(frozen=True)
class RungUse:
    """The number and durations of the incidents that a rung of the ladder repaired."""

    rung: str
    incidents: int
    median_s: float
    longest_s: float
    total_s: float


@dataclass(frozen=True)
class Baseline:
    """A run to compare with.

    ``equal`` says that the final states are the same; it is None unless both runs have ended.
    """

    name: str
    pace: Pace | None
    curve: Curve
    equal: bool | None


@dataclass(frozen=True)
class RunReport:
    """All values that the page of a training run shows; ``as_dict`` returns them ready for JSON."""

    name: str
    path: str
    made_s: float
    state: State
    settings: Record
    steps_done: int
    steps_wanted: int | None
    ranks: int
    tally: Record
    curve: Curve
    pace: Pace | None
    baseline: Baseline | None
    timeline: Timeline | None
    incidents: list[Incident]
    incidents_total: int
    fault_steps: list[int]
    restart_steps: list[int]
    started_after: int
    statuses: dict[str, int]
    rungs: list[RungUse]
    devices: list[Suspect]
    ops: list[Suspect]
    ops_total: int
    coverage: Record | None
    stall_s: float | None
    snapshot_bytes: int | None
    smps: list[Record] = field(default_factory=list)
    guards: list[Record] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    finite: bool = True
    events_dropped: int = 0
    gaps: list[Gap] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values."""
        lists = {name: [item.as_dict() for item in getattr(self, name)] for name in _NESTED}
        return asdict(self) | lists


_NESTED = ("incidents", "devices", "ops")


def gather_run(run_dir: Path, baseline: Path | None = None) -> RunReport:
    """Read a run and perhaps a baseline to compare with; it may still be running."""
    metrics, events, results = _read(run_dir)
    summaries = sources.read_summaries(run_dir)
    told = results or summaries
    settings, smps = sources.read_settings(run_dir), sources.read_smps(run_dir)
    incidents = incidents_of(events)
    tally, faults = Tally(), Faults()
    for event in events:
        tally.add(event)
    faults.take(events)
    seen = max((event.rank for event in events), default=0)
    ranks = int(settings.get("ranks") or max(1, 1 + seen, len(summaries)))
    done = max([metrics.steps_done, *(event.step for event in events)])
    done = max([done, *(summary["step"] for summary in summaries)])
    return RunReport(
        name=run_dir.name,
        path=str(run_dir),
        made_s=time.time(),
        state=state_of(run_dir, settings, results, smps),
        settings=settings,
        steps_done=done,
        steps_wanted=settings.get("steps"),
        ranks=ranks,
        tally=tally.as_dict(),
        curve=_curve(metrics),
        pace=_pace(metrics),
        baseline=_baseline(baseline, results) if baseline is not None else None,
        timeline=timeline_of(events),
        incidents=_gravest(incidents),
        incidents_total=len(incidents),
        fault_steps=_fault_steps(incidents),
        restart_steps=_restart_steps(events),
        started_after=_started_after(events),
        statuses=dict(Counter(incident.status for incident in incidents)),
        rungs=_rungs(incidents),
        devices=faults.by_device(steps=done, ranks=ranks)[:DEVICES_SHOWN],
        ops=faults.by_op(steps=done)[:OPS_SHOWN],
        ops_total=len(faults.ops),
        coverage=sources.coverage_of(told),
        stall_s=_highest(told, "snapshot_stall_s"),
        snapshot_bytes=_highest(told, "snapshot_bytes"),
        guards=summaries,
        smps=smps,
        checkpoints=sources.read_checkpoints(run_dir),
        gaps=gaps_of(events, sources.coverage_of(told)),
        finite=all(result.get("finite", True) for result in results),
        events_dropped=sum(
            count if isinstance(count := event.detail.get("count"), int) else 1
            for event in events
            if event.kind == EventKind.EVENTS_DROPPED
        ),
    )


def _read(run_dir: Path) -> tuple[sources.Metrics, list[Event], list[Record]]:
    if not sources.is_run(run_dir):
        raise ConfigError(f"{run_dir} holds no run: no {', no '.join(sources.MARKS)} in it")
    metrics = sources.Metrics()
    metrics.take(sources.MetricsTail(run_dir).read())
    return metrics, list(sources.Ledgers(run_dir).read()), sources.read_results(run_dir)


def state_of(
    run_dir: Path,
    settings: Record,
    results: Sequence[Record],
    smps: Sequence[Record],
) -> State:
    """Tell whether a run goes on or how it ended, from what it left and from its living SMPs."""
    reason = sources.read_fatal(run_dir)
    connected = any(any(smp.get("connected", ())) for smp in smps)
    if settings and len(results) >= (settings.get("ranks") or 1):
        kind = "finished"
    elif not settings and not connected and (run_dir / FINISHED_NAME).is_file():
        kind = "finished"  # as snapshots note in the run of a user's own script
    elif sources.is_locked(run_dir) or connected:
        kind = "running"
    elif reason:
        kind = "failed"
    else:
        kind = "interrupted" if settings or smps else "unknown"
    return State(kind, reason, sources.last_sign_s(run_dir))


def _curve(metrics: sources.Metrics) -> Curve:
    steps = sorted(metrics.loss)
    stride = max(1, -(-len(steps) // POINTS))
    groups = [steps[start : start + stride] for start in range(0, len(steps), stride)]
    loss, seconds = (
        [max((values[step] for step in group), key=_badness) for group in groups]
        for values in (metrics.loss, metrics.seconds)
    )
    return Curve([group[-1] for group in groups], loss, seconds, stride)


def _badness(value: float) -> tuple[bool, float]:
    return value != value, value


def _pace(metrics: sources.Metrics) -> Pace | None:
    taken = list(metrics.seconds.values())
    if not taken:
        return None
    count = sum(metrics.counts.values())
    p95_s = quantiles(taken, n=20, method="inclusive")[-1] if len(taken) > 1 else taken[0]
    total_s = sum(s * metrics.counts[step] for step, s in metrics.seconds.items())
    total_s += metrics.repeated_s
    return Pace(count, median(taken), p95_s, total_s, metrics.repeated, metrics.repeated_s)


def _baseline(path: Path, results: Sequence[Record]) -> Baseline:
    metrics, _, theirs = _read(path)
    parts = ("model", "optimizer", "scheduler")
    ours, others = ([[r.get(part) for part in parts] for r in rs] for rs in (results, theirs))
    return Baseline(
        path.name, _pace(metrics), _curve(metrics), ours == others if ours and others else None
    )


def _gravest(incidents: Sequence[Incident]) -> list[Incident]:
    """Choose the incidents that are listed one by one, in order of time."""
    gravest = sorted(incidents, key=lambda incident: incident.gravity, reverse=True)
    return sorted(gravest[:INCIDENTS_SHOWN], key=lambda incident: incident.start_s)


def _fault_steps(incidents: Sequence[Incident]) -> list[int]:
    """List the steps with an incident; of steps too close to be drawn apart, only the first."""
    steps = sorted({incident.step for incident in incidents if incident.step >= 0})
    apart = max(1, (steps[-1] - steps[0]) // POINTS) if steps else 1
    return list({step // apart: step for step in reversed(steps)}.values())[::-1]


def _restart_steps(events: Sequence[Event]) -> list[int]:
    """List the steps with which a started run went on, after those that were done before."""
    back = (e for e in events if e.kind == EventKind.RESTORED and e.step < 0)
    steps = {e.detail["step"] for e in back if isinstance(e.detail.get("step"), int)}
    return sorted(steps)[-POINTS:]


def _started_after(events: Sequence[Event]) -> int:
    """Return the step with which the last start went on; results of ranks count from there."""
    back = [e for e in events if e.kind == EventKind.RESTORED and e.step < 0]
    step = max(back, key=lambda event: event.time_s).detail.get("step") if back else 0
    return step if isinstance(step, int) else 0


def _rungs(incidents: Sequence[Incident]) -> list[RungUse]:
    used = []
    for rung in RUNG_TITLES:
        took = [incident.duration_s for incident in incidents if incident.rung == rung]
        if took:
            used.append(RungUse(rung, len(took), median(took), max(took), sum(took)))
    return used


def _highest(results: Sequence[Record], name: str) -> Any:
    return max((result[name] for result in results if name in result), default=None)

"""The sections of a training run's page, in order."""

import time
from collections.abc import Iterator
from math import isfinite

from holdfast.events import EventKind
from holdfast.report.charts import Line, line_chart, responsive, timeline_chart
from holdfast.report.coverage_section import coverage_section
from holdfast.report.fault_sections import incidents_section, ladder_section, suspects_section
from holdfast.report.gaps import Gap
from holdfast.report.kinds import RUNG_TITLES
from holdfast.report.markup import Markup, tag
from holdfast.report.parts import columns, legend, pairs, section, table, tiles
from holdfast.report.quantities import NONE, counted, duration, number, share, shortened, size
from holdfast.report.run import RunReport
from holdfast.report.smp_status import smp_rows
from holdfast.report.sources import Record

GAPS_SHOWN = 50
UNKNOWN = tag("p", "Not known: Guard.attach does not see it.", class_="none")
GUARD_TIMES = {
    "passes": "forward and backward passes",
    "repeats": "repeated passes",
    "optimizer": "optimizer, within Guard.step",
    "guard": "the Guard itself, with its waiting for snapshots",
}
GAP_COLUMNS = (*columns("missing"), *columns("times", numeric=True), *columns("what", "remedy"))


def run_sections(report: RunReport) -> list[Markup]:
    """Render every section of the page; those on incidents only if there are any."""
    told = [incidents_section(report), ladder_section(report)] if report.incidents_total else []
    return [
        tiles(tiles_of(report)),
        _timeline(report),
        _curves(report),
        *told,
        suspects_section(report),
        *_gaps(report),
        coverage_section(report),
        _costs(report),
        _snapshots(report),
        _about(report),
    ]


def tiles_of(report: RunReport) -> Iterator[tuple[str, object, object]]:
    """Yield what matters most of a run: title, number, and a value for comparison."""
    state = _state(report)
    of = f"of {report.steps_wanted:,}, {state}" if report.steps_wanted else None
    yield "steps done", f"{report.steps_done:,}", of or state
    struck = report.tally["by_kind"].get(EventKind.INJECTED, 0)
    answered = sum(report.statuses.get(name, 0) for name in ("answered", "genuine"))
    injected = f", {counted(struck, 'fault')} injected" if struck else ""
    yield "incidents", f"{report.incidents_total:,}", f"{answered:,} answered{injected}"
    yield "lost to faults", duration(sum(rung.total_s for rung in report.rungs)), "in all answers"
    if report.pace is not None:
        yield "step, median", duration(report.pace.median_s), _ratio(report)
    if report.coverage is not None:
        sites = report.coverage["sites"]
        covered = sum(site["covered"] for site in sites)
        part = share(covered / len(sites)) if sites else NONE
        yield "matmul sites covered", f"{covered} of {len(sites)}", part
    ages = [smp["age_s"] for smp in report.smps if smp.get("age_s") is not None]
    if ages:
        yield "newest snapshot", duration(max(ages)), "old"
    elif report.stall_s is not None:
        yield "waited for snapshots", duration(report.stall_s), _per_step(report)


def _state(report: RunReport) -> str:
    return "end not known" if report.state.kind == "unknown" else report.state.kind


def _ratio(report: RunReport) -> str:
    base = report.baseline
    if base is None or base.pace is None or report.pace is None:
        return f"95th percentile {duration(report.pace.p95_s)}" if report.pace else ""
    return f"{report.pace.median_s / base.pace.median_s - 1:+.1%} against {base.name}"


def _per_step(report: RunReport) -> str:
    since = "since the last restart" if report.started_after else "in all"
    steps = report.steps_done - report.started_after
    if report.stall_s is None or steps < 1:
        return since
    return f"{since}, {duration(report.stall_s / steps)} a step"


def _timeline(report: RunReport) -> Markup:
    timeline = report.timeline
    if timeline is None:
        text = f"No events in {counted(report.steps_done, 'step')}: a healthy step writes none."
        return section("Timeline", tag("p", text, class_="none"))
    start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timeline.start_s))
    note = f"Wall time since {start}. Each mark is an event, and its tail is the time that it took."
    if any(timeline.column_s.values()):
        width = duration(max(timeline.column_s.values()))
        note = f"Wall time since {start}. Bars count events, {width} a bar, on a root scale."
    chart = responsive(lambda width: timeline_chart(timeline, width))
    return section("Timeline", chart, note=note)


def _curves(report: RunReport) -> Markup:
    curve, base = report.curve, report.baseline
    if not curve.steps:
        text = "None was recorded: a Guard with snapshots does, and so does holdfast train."
        return section("Loss and step time", tag("p", text, class_="none"))
    others = [base.curve] if base is not None and base.curve.steps else []

    first, last = curve.steps[0], curve.steps[-1]
    known = any(map(isfinite, curve.loss))

    def draw(width: int, name: str) -> Markup:
        lines = [Line("calm", o.steps, getattr(o, name)) for o in others]
        lines.append(Line("run", curve.steps, getattr(curve, name)))
        timed = name == "seconds"
        return line_chart(
            width,
            lines,
            label=f"{name} by step",
            x_title="step",
            y_shown=duration if timed else number,
            y_low=0.0 if timed else None,
            faults=[step + 1 for step in report.fault_steps],
            borders=[step for step in report.restart_steps if first <= step <= last],
        )

    names = [("run", report.name), *(("calm", base.name) for _ in others if base is not None)]
    every = f" Of each {curve.stride} steps the highest is drawn." if curve.stride > 1 else ""
    return section(
        "Loss and step time",
        legend(names),
        tag("h3", "Loss, nats a token" if report.settings else "Loss"),
        responsive(lambda width: draw(width, "loss")) if known else UNKNOWN,
        tag("h3", "Wall time of a step"),
        responsive(lambda width: draw(width, "seconds")),
        note="The axis counts steps done, and events count from 0: their step 4 is the fifth. "
        "Strokes along the foot are steps with an incident, dotted lines are restarts."
        f"{every}",
    )


def _gaps(report: RunReport) -> list[Markup]:
    if not report.gaps:
        return []
    rows = (
        (gap.missing, f"{gap.count:,}", _what(gap), gap.remedy or NONE)
        for gap in report.gaps[:GAPS_SHOWN]
    )
    note = "Where this run had less protection than it could have, and what to do about it."
    return [section("Not protected", table(GAP_COLUMNS, rows), note=note)]


def _what(gap: Gap) -> str:
    return f"{gap.what}: {shortened(gap.reason)}" if gap.reason else gap.what


def _costs(report: RunReport) -> Markup:
    rows = list(_cost_rows(report))
    shown = pairs(rows) if rows else tag("p", "Nothing measured.", class_="none")
    note = "Time taken by protection and faults. A comparison of two single runs is no benchmark."
    return section("Overheads", shown, note=note)


def _cost_rows(report: RunReport) -> Iterator[tuple[str, object]]:
    pace, base = report.pace, report.baseline
    if pace is not None:
        yield "step, median", f"{duration(pace.median_s)} over {counted(pace.steps, 'step')}"
        yield "step, 95th percentile", duration(pace.p95_s)
        yield "all steps", duration(pace.total_s)
        again = f"{counted(pace.repeated, 'step')}, {duration(pace.repeated_s)}"
        yield "done again after restarts", again
    if base is not None and base.pace is not None:
        yield f"step of {base.name}, median", duration(base.pace.median_s)
        yield f"against {base.name}", _ratio(report)
    if report.stall_s is not None:
        stall = f"{duration(report.stall_s)} {_per_step(report)}"
        yield "training waited for snapshots", stall
    if report.snapshot_bytes is not None:
        since = " since the last restart" if report.started_after else ""
        yield "copied into snapshots", f"{size(report.snapshot_bytes)} a rank{since}"
    yield from _guard_rows(report.guards[0] if report.guards else {})
    for use in report.rungs:
        yield f"answered on rung {RUNG_TITLES[use.rung]}", duration(use.total_s)


def _guard_rows(guard: Record) -> Iterator[tuple[str, object]]:
    """Say where the time of a rank's steps went, as its Guard counted it since its start."""
    spent = guard.get("seconds", {})
    whole_s = sum(spent.values())
    if not whole_s:
        return
    for name, text in GUARD_TIMES.items():
        if spent.get(name):
            yield text, f"{duration(spent[name])}, {share(spent[name] / whole_s)} of its steps"
    sites = guard.get("coverage", {}).get("sites", ())
    checks_s = sum(site["encode_s"] + site["verify_s"] for site in sites if site["covered"])
    if checks_s:
        part = share(checks_s / whole_s)
        yield "checks of products, in passes", f"{duration(checks_s)}, {part} of its steps"


def _snapshots(report: RunReport) -> Markup:
    rows: list[tuple[str, object]] = []
    for smp in report.smps:
        of = f"node {smp['node']}, " if len(report.smps) > 1 else ""
        found = smp_rows(smp) if "error" not in smp else [("SMP", f"no answer: {smp['error']}")]
        rows += [(of + name, value) for name, value in found]
    if not report.smps:
        rows.append(("in memory", "no snapshot process runs any more"))
    on_disk = ", ".join(f"{step:,}" for step in report.checkpoints[-5:]) or "none"
    return section("Snapshots", pairs([*rows, ("steps on disk", on_disk)]))


def _about(report: RunReport) -> Markup:
    rows: list[tuple[str, object]] = [("directory", report.path), ("state", _state(report))]
    nested_last = sorted(report.settings.items(), key=lambda item: isinstance(item[1], dict))
    for name, value in nested_last:
        text = NONE if value is None else str(value)
        if isinstance(value, dict):
            text = ", ".join(f"{key} {each}" for key, each in value.items())
        rows.append((name.replace("_", " "), text))
    return section("The run", pairs(rows))

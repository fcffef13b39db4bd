"""The sections of a training run's page, in reading order."""

import time
from collections.abc import Iterator

from holdfast.events import EventKind
from holdfast.report.charts import Line, line_chart, responsive, timeline_chart
from holdfast.report.coverage_section import coverage_section
from holdfast.report.fault_sections import incidents_section, ladder_section, suspects_section
from holdfast.report.kinds import RUNG_TITLES
from holdfast.report.markup import Markup, tag
from holdfast.report.parts import legend, pairs, section, tiles
from holdfast.report.quantities import NONE, counted, duration, number, share, size
from holdfast.report.run import RunReport


def run_sections(report: RunReport) -> list[Markup]:
    """Render every section of the page; those about incidents only if there are any."""
    told = [incidents_section(report), ladder_section(report)] if report.incidents_total else []
    return [
        tiles(_tiles(report)),
        _timeline(report),
        _curves(report),
        *told,
        suspects_section(report),
        coverage_section(report),
        _costs(report),
        _snapshots(report),
        _about(report),
    ]


def _tiles(report: RunReport) -> Iterator[tuple[str, object, object]]:
    of = f"of {report.steps_wanted:,}, {report.state.kind}" if report.steps_wanted else None
    yield "steps done", f"{report.steps_done:,}", of or report.state.kind
    struck = report.tally["by_kind"].get(EventKind.INJECTED, 0)
    answered = sum(report.statuses.get(name, 0) for name in ("answered", "genuine"))
    against = f"{answered:,} answered"
    yield (
        "incidents",
        f"{report.incidents_total:,}",
        (f"{against}, {counted(struck, 'fault')} injected" if struck else against),
    )
    yield "lost to faults", duration(sum(rung.total_s for rung in report.rungs)), "in all answers"
    if report.pace is not None:
        yield "step, median", duration(report.pace.median_s), _ratio(report)
    coverage = _covered(report)
    if coverage is not None:
        yield (
            "matmul sites covered",
            f"{coverage[0]} of {coverage[1]}",
            share(coverage[0] / coverage[1] if coverage[1] else float("nan")),
        )
    age = _age_s(report)
    if age is not None:
        yield "newest snapshot", duration(age), "old"
    elif report.stall_s is not None:
        yield "waited for snapshots", duration(report.stall_s), _per_step(report)


def _ratio(report: RunReport) -> str:
    base = report.baseline
    if base is None or base.pace is None or report.pace is None:
        return f"95th percentile {duration(report.pace.p95_s)}" if report.pace else ""
    return f"{report.pace.median_s / base.pace.median_s - 1:+.1%} against {base.name}"


def _per_step(report: RunReport) -> str:
    if report.stall_s is None or report.pace is None:
        return "in all"
    return f"in all, {duration(report.stall_s / report.pace.steps)} a step"


def _covered(report: RunReport) -> tuple[int, int] | None:
    if report.coverage is None:
        return None
    sites = report.coverage["sites"]
    return sum(site["covered"] for site in sites), len(sites)


def _age_s(report: RunReport) -> float | None:
    ages = [smp["age_s"] for smp in report.smps if smp.get("age_s") is not None]
    return max(ages, default=None)


def _timeline(report: RunReport) -> Markup:
    timeline = report.timeline
    if timeline is None:
        return section("Timeline", tag("p", _no_faults(report), class_="none"))
    start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(timeline.start_s))
    note = f"Wall time since {start}. Each mark is an event, its tail what it took; hover to read."
    if any(timeline.column_s.values()):
        width = duration(max(timeline.column_s.values()))
        note = f"Wall time since {start}. Bars count events, {width} a bar, on a root scale."
    chart = responsive(lambda width: timeline_chart(timeline, width))
    return section("Timeline", chart, note=note)


def _no_faults(report: RunReport) -> str:
    return f"No events in {counted(report.steps_done, 'step')}: a healthy step writes none."


def _curves(report: RunReport) -> Markup:
    curve, base = report.curve, report.baseline
    if not curve.steps:
        text = "No metrics here: holdfast train writes them, a script of one's own need not."
        return section("Loss and step time", tag("p", text, class_="none"))
    others = [base.curve] if base is not None and base.curve.steps else []

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
        )

    names = [("run", report.name), *(("calm", base.name) for _ in others if base is not None)]
    every = f" Of each {curve.stride} steps the highest is drawn." if curve.stride > 1 else ""
    return section(
        "Loss and step time",
        legend(names),
        tag("h3", "Loss, nats a token"),
        responsive(lambda width: draw(width, "loss")),
        tag("h3", "Wall time of a step"),
        responsive(lambda width: draw(width, "seconds")),
        note=f"Strokes along the foot are steps with an incident.{every}",
    )


def _costs(report: RunReport) -> Markup:
    rows: list[tuple[str, object]] = []
    if report.pace is not None:
        pace = report.pace
        rows.append(
            ("step, median", f"{duration(pace.median_s)} over {counted(pace.steps, 'step')}")
        )
        rows.append(("step, 95th percentile", duration(pace.p95_s)))
        rows.append(("all steps", duration(pace.total_s)))
        again = f"{counted(pace.repeated, 'step')}, {duration(pace.repeated_s)}"
        rows.append(("done again after restarts", again))
    base = report.baseline
    if base is not None and base.pace is not None:
        rows.append((f"step of {base.name}, median", duration(base.pace.median_s)))
        rows.append((f"against {base.name}", _ratio(report)))
    if report.stall_s is not None:
        rows.append(
            ("training waited for snapshots", f"{duration(report.stall_s)} {_per_step(report)}")
        )
    if report.snapshot_bytes is not None:
        rows.append(("copied into snapshots", f"{size(report.snapshot_bytes)} a rank"))
    rows += [
        (f"answered on rung {RUNG_TITLES[use.rung]}", duration(use.total_s)) for use in report.rungs
    ]
    note = "What protection and faults took. A comparison of two single runs is no benchmark."
    return section(
        "Overheads",
        pairs(rows) if rows else tag("p", "Nothing measured.", class_="none"),
        note=note,
    )


def _snapshots(report: RunReport) -> Markup:
    on_disk = ", ".join(f"{step:,}" for step in report.checkpoints[-5:]) or "none"
    rows: list[tuple[str, object]] = []
    for smp in report.smps:
        of = f"node {smp['node']}, " if len(report.smps) > 1 else ""
        rows += [(of + name, value) for name, value in _smp_rows(smp)]
    if not report.smps:
        rows.append(("in memory", "no snapshot process runs any more"))
    rows.append(("steps on disk", on_disk))
    return section("Snapshots", pairs(rows))


def _smp_rows(smp: dict[str, object]) -> list[tuple[str, object]]:
    if "error" in smp:
        return [("snapshot process", f"does not answer: {smp['error']}")]
    newest = "none yet"
    if smp["newest"] is not None:
        newest = f"step {smp['newest']:,}, {duration(_float(smp['age_s']))} old"
    connected = smp["connected"]
    assert isinstance(connected, list)
    return [
        ("snapshot process", f"{smp['pid']}, up {duration(_float(smp['uptime_s']))}"),
        ("newest clean snapshot", newest),
        ("ranks connected", f"{sum(connected)} of {len(connected)}"),
        ("committed, aborted", f"{smp['commits']}, {smp['aborts']}"),
        ("memory", size(_float(smp["bytes"]))),
        ("training waited", f"{duration(_float(smp['stall_s']))} in all"),
    ]


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _about(report: RunReport) -> Markup:
    plain = {k: v for k, v in report.settings.items() if not isinstance(v, dict)}
    nested = {k: v for k, v in report.settings.items() if isinstance(v, dict)}
    rows: list[tuple[str, object]] = [("directory", report.path), ("state", report.state.kind)]
    rows += [(name.replace("_", " "), NONE if v is None else str(v)) for name, v in plain.items()]
    for name, values in nested.items():
        rows.append((name, ", ".join(f"{k} {v}" for k, v in values.items())))
    return section("The run", pairs(rows))

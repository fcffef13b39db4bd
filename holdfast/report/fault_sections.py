"""The sections of a run's page on incidents, the rungs that repaired them, and suspects."""

from collections import Counter

from holdfast.report.incidents import Incident
from holdfast.report.kinds import RUNG_TITLES
from holdfast.report.markup import Markup, breakable, joined, tag
from holdfast.report.parts import badge, columns, section, table
from holdfast.report.quantities import NONE, counted, duration, ranges, share, shortened
from holdfast.report.run import INCIDENTS_SHOWN, RunReport
from holdfast.report.suspects import Suspect

INCIDENT_COLUMNS = (
    *columns("after", "took", "step", "rank", numeric=True, short=True),
    *columns("what", "where", "seen by", "answered by"),
)
RUNG_COLUMNS = (
    *columns("rung"),
    *columns("incidents", "median", "longest", "together", numeric=True),
)
SUSPECT_COLUMNS = (
    *columns("unit"),
    *columns("faults", "share (95 %)", "fair share", numeric=True),
    *columns("faulty steps, of those done (95 %)", "by chance", numeric=True),
)
_NAMED = 3


def incidents_section(report: RunReport) -> Markup:
    """List incidents with their injected faults, the checks that found them, and their rungs."""
    rows = [_incident_row(report, incident) for incident in report.incidents]
    hidden = report.incidents_total - len(rows)
    note = "An incident is one fault with everything that was done about it."
    if hidden:
        note = (
            f"The {INCIDENTS_SHOWN} gravest of {report.incidents_total:,} incidents, by time; "
            "holdfast events lists everything."
        )
    return section("Faults, and what answered them", table(INCIDENT_COLUMNS, rows), note=note)


def _incident_row(report: RunReport, incident: Incident) -> tuple[object, ...]:
    start_s = report.timeline.start_s if report.timeline else 0.0
    found = shortened(", ".join(incident.kinds[:_NAMED]))
    struck = ", ".join(_some(_counted_alike(incident.struck)))
    what = (shortened(struck), tag("small", found))
    return (
        duration(max(0.0, incident.start_s - start_s)),
        duration(incident.duration_s),
        f"{incident.step:,}" if incident.step >= 0 else NONE,
        ranges(incident.ranks) or NONE,
        what if incident.struck else found,
        _places(incident.ops),
        shortened(", ".join(_some(incident.detectors))) or NONE,
        badge(incident.rung, incident.status),
    )


def _counted_alike(struck: Counter[str]) -> list[str]:
    return [word if count == 1 else f"{count:,} × {word}" for word, count in struck.items()]


def _some(names: list[str]) -> list[str]:
    more = len(names) - _NAMED
    return [*names[:_NAMED], *([f"{more} more"] if more > 0 else [])]


def _places(ops: list[str]) -> Markup:
    if not ops:
        return Markup("process")
    return joined(tag("div", breakable(name)) for name in _some(ops))


def ladder_section(report: RunReport) -> Markup:
    """Show the number of incidents by the highest rung that they needed, and their durations."""
    rows = []
    for use in report.rungs:
        times = (duration(each) for each in (use.median_s, use.longest_s, use.total_s))
        rows.append((badge(use.rung, ""), f"{use.incidents:,}", *times))
    note = "Incidents by the highest rung that they needed, and how long they took."
    used = {use.rung for use in report.rungs}
    tried = {rung for rung, count in report.tally["by_rung"].items() if count} - used
    passed = [title for rung, title in RUNG_TITLES.items() if rung in tried]
    unused = [title for rung, title in RUNG_TITLES.items() if rung not in used | tried]
    rest = [
        tag("p", f"{what}: {', '.join(titles)}.", class_="note")
        for what, titles in (("Only on the way to a higher one", passed), ("Not needed", unused))
        if titles
    ]
    return section("The ladder", table(RUNG_COLUMNS, rows), *rest, note=note)


def suspects_section(report: RunReport) -> Markup:
    """List the devices and ops that computed wrong results, the most frequent first."""
    note = (
        "Where computations were found wrong; a step, rank and op counts once. By chance: how "
        "likely it is at most that any of equal devices has so many; below 5 % it stands out."
    )
    if not report.devices:
        text = f"No fault was found in any device in {counted(report.steps_done, 'step')}."
        return section("Suspects", tag("p", text, class_="none"))
    hidden = report.ops_total - len(report.ops)
    more = f"{hidden} more ops with as few faults or fewer."
    return section(
        "Suspects",
        tag("h3", "Devices"),
        table(SUSPECT_COLUMNS, map(_suspect_row, report.devices)),
        tag("h3", "Ops"),
        table(SUSPECT_COLUMNS[:3] + SUSPECT_COLUMNS[4:5], map(_op_row, report.ops)),
        tag("p", more, class_="note") if hidden else None,
        note=note,
    )


def _suspect_row(suspect: Suspect) -> tuple[object, ...]:
    name, faults, part, steps = _op_row(suspect)
    chance = f"at most {share(suspect.chance)}" if suspect.chance < 1 else "likely"
    verdict = tag("span", "! stands out", class_="badge bad") if suspect.stands_out else None
    return name, faults, part, share(suspect.fair), steps, (chance, " ", verdict)


def _op_row(suspect: Suspect) -> tuple[object, ...]:
    part = f"{share(suspect.share)} ({share(suspect.low)} to {share(suspect.high)})"
    rates = f"{suspect.steps:,} ({share(suspect.rate_low)} to {share(suspect.rate_high)})"
    return breakable(suspect.name), f"{suspect.faults:,}", part, rates

"""The output of ``holdfast screen``: tables of units, workloads and findings, and the verdict."""

from holdfast.cli.quantities import shown_duration
from holdfast.cli.tables import print_table, say
from holdfast.screen.judge import FINDERS, Finding
from holdfast.screen.verdict import HEALTHY, SUSPECT, UnitWork, Verdict

UNIT_COLUMNS = ("unit", "rounds", "executions", "GFLOP/s", "GB/s", "utilisation", "")
OP_COLUMNS = ("op", "executions", "share of time", "speed, slowest unit", "fastest unit")
FINDING_COLUMNS = ("unit", "op", "found by", "wrong", "first seen after")
_GIGA = 1e9


def print_verdict(verdict: Verdict) -> None:
    """Print units, workloads, findings, troubles and notes, and the verdict as the last line."""
    if verdict.work:
        rows = [_unit_row(work, verdict) for work in verdict.work]
        print_table(UNIT_COLUMNS, rows, title="units", right=UNIT_COLUMNS[1:-1])
        print_table(OP_COLUMNS, _op_rows(verdict), title="workloads", right=OP_COLUMNS[1:])
    if verdict.findings:
        rows = [_finding_row(finding) for finding in verdict.findings]
        print_table(FINDING_COLUMNS, rows, title="findings", right=FINDING_COLUMNS[3:])
        for finding in verdict.findings:
            _print_details(finding)
    for trouble in verdict.troubles:
        say(f"{trouble.unit}: {trouble.what}")
    for note in verdict.notes:
        say(f"note: {note}")
    print(_comparisons(verdict))
    print(_conclusion(verdict))


def _unit_row(work: UnitWork, verdict: Verdict) -> list[str]:
    name = work.unit.name
    troubled = {trouble.unit for trouble in verdict.troubles}
    state = "SUSPECT" if name in verdict.suspects() else "unable" if name in troubled else "healthy"
    if state == "healthy" and any(name in each.split(" or ") for each in verdict.suspects()):
        state = "SUSPECT?"
    return [
        name,
        str(work.rounds),
        f"{work.executions.total():,}",
        f"{work.speed('flop') / _GIGA:.1f}",
        f"{work.speed('B') / _GIGA:.1f}",
        f"{work.utilisation:.0%}",
        state,
    ]


def _op_rows(verdict: Verdict) -> list[list[str]]:
    names = list(dict.fromkeys(op for work in verdict.work for op in work.units))
    total_s = sum(work.seconds.total() for work in verdict.work)
    return [_op_row(op, [w for w in verdict.work if op in w.units], total_s) for op in names]


def _op_row(op: str, works: list[UnitWork], total_s: float) -> list[str]:
    unit = works[0].units[op]
    scale, prefix = (1, "") if unit == "test" else (_GIGA, "G")
    speeds = [work.speed(unit, op) / scale for work in works]
    return [
        op,
        f"{sum(work.executions[op] for work in works):,}",
        f"{sum(work.seconds[op] for work in works) / total_s:.0%}",
        *(f"{speed:.2f} {prefix}{unit}/s" for speed in (min(speeds), max(speeds))),
    ]


def _finding_row(finding: Finding) -> list[str]:
    wrong = f"{finding.wrong:,}" if finding.wrong else "?"
    return [
        finding.unit,
        finding.op,
        ", ".join(finding.finders),
        f"{wrong} of {finding.executions:,}",
        shown_duration(finding.first_s),
    ]


def _print_details(finding: Finding) -> None:
    where = f"{finding.unit}, {finding.op}"
    for difference in finding.differences:
        say(f"{where}: {difference.text}")
    if not finding.differences and not finding.checks:
        say(f"{where}: which bits are wrong is not known, as no right result was at hand")
    for check in finding.checks:
        say(f"{where}: its own check: {check}")


def _comparisons(verdict: Verdict) -> str:
    parts = (f"{verdict.comparisons.get(finder, 0):,} by {finder}" for finder in FINDERS)
    text = f"{verdict.compared:,} comparisons ({', '.join(parts)})"
    if verdict.false_alarm_bound is None:
        return text
    return (
        f"{text}, no alarm: on healthy hardware fewer than {verdict.false_alarm_bound:.1e} false "
        "alarms a comparison (rule of three, 95 %)"
    )


def _conclusion(verdict: Verdict) -> str:
    about = " (faults were emulated, so this is not about the machine)" if verdict.emulated else ""
    if verdict.state == HEALTHY:
        many = "s" if len(verdict.work) > 1 else ""
        units = f"{len(verdict.work)} unit{many}, {shown_duration(verdict.seconds)}"
        return f"HEALTHY: {units}, every result the same bit for bit{about}"
    if verdict.state == SUSPECT:
        return f"SUSPECT: {', '.join(verdict.suspects())}{about}"
    return f"UNABLE to tell{about}"

"""The verdict on a run: a level from good to bad, and the sentence that explains it."""

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.events import EventKind
from holdfast.inject.statistics import rule_of_three
from holdfast.report.quantities import counted, duration
from holdfast.report.run import RunReport

GOOD, ATTENTION, BAD = "good", "attention", "bad"
LEVELS = {GOOD: "Good", ATTENTION: "Look closer", BAD: "Not good"}


@dataclass(frozen=True)
class Verdict:
    """The headline of a report, its level (one of ``LEVELS``) and further warnings."""

    level: str
    headline: str
    lines: tuple[str, ...] = ()


def verdict_of(report: RunReport) -> Verdict:
    """Judge a run by what is wrong, else by what needs a look, else by how it went."""
    wrong, doubtful = list(_wrong(report)), list(_doubtful(report))
    told = _told(report)
    if wrong:
        return Verdict(BAD, wrong[0], (*wrong[1:], *doubtful, told))
    if doubtful:
        return Verdict(ATTENTION, doubtful[0], (*doubtful[1:], told))
    headline, *lines = _well(report)
    return Verdict(GOOD, headline, (*lines, told))


def _wrong(report: RunReport) -> Iterator[str]:
    if report.state.kind == "failed":
        yield f"The run failed: {report.state.reason}"
    if report.baseline is not None and report.baseline.equal is False:
        yield f"The final state is not that of {report.baseline.name}."
    if not report.finite:
        yield "The weights hold NaN or INF."
    unseen, left = report.statuses.get("not seen", 0), report.statuses.get("open", 0)
    if left:
        going = " or are still being dealt with" if report.state.kind == "running" else ""
        yield f"{counted(left, 'fault')} found and not repaired{going}."
    if unseen and report.settings.get("mode") == "unprotected":
        yield f"Unprotected: {counted(unseen, 'fault')} struck, and nothing looked for them."
    elif unseen:
        yield f"{counted(unseen, 'injected fault')} not seen."


def _doubtful(report: RunReport) -> Iterator[str]:
    if report.events_dropped:
        yield (
            f"{counted(report.events_dropped, 'event')} are missing here: the ledger could not be "
            "written when they were recorded."
        )
    if report.state.kind == "interrupted":
        yield f"Interrupted at {progress(report)}."
        yield _resumable(report)
    for smp in report.smps:
        if "error" in smp:
            yield f"The snapshot process does not answer: {smp['error']}"
    below = report.statuses.get("below the line", 0)
    if below:
        yield (
            f"{counted(below, 'injected fault')} too small to be told from rounding: not seen, as "
            "stated for checksums. --audit 1.0 finds them."
        )
    for device in (device for device in report.devices if device.stands_out):
        yield (
            f"{device.name} has {device.faults} of {counted(device.of, 'fault')}, more than its "
            f"share of {device.fair:.0%}: screen or replace it."
        )
    for kind in (
        EventKind.EVICT,
        EventKind.SHADOW_UNDECIDED,
        EventKind.PERSIST_FAILED,
        EventKind.PERSIST_SLOW,
        EventKind.SNAPSHOT_TORN,
        EventKind.FAULT_MISSED,
    ):
        count = report.tally["by_kind"].get(kind, 0)
        if count:
            yield f"{counted(count, 'event')} {kind}: see the events."


def _well(report: RunReport) -> Iterator[str]:
    going = "Running: " if report.state.kind == "running" else ""
    equal = report.baseline is not None and report.baseline.equal
    if report.incidents_total == 0:
        yield f"{going}No fault in {counted(report.steps_done, 'step')}."
        if report.steps_done:
            yield (
                "At 95 % confidence that is fewer than "
                f"{rule_of_three(report.steps_done):.2g} faults a step (rule of three)."
            )
    elif equal:
        all_of = counted(report.incidents_total, "incident")
        yield f"{all_of}, every one answered: the run ended as if none had struck."
    else:
        all_of = counted(report.incidents_total, "incident")
        yield f"{going}{all_of}, every one answered."
    if equal and report.baseline is not None:
        yield (
            f"Weights, optimizer and schedule are those of {report.baseline.name}, bit for bit, on "
            "every rank."
        )


def _told(report: RunReport) -> str:
    mode = report.settings.get("mode", "a Guard in a script of its own")
    parts = [progress(report), counted(report.ranks, "rank"), mode]
    if report.pace is not None:
        parts.append(f"{duration(report.pace.total_s)} of steps")
    return " · ".join(parts)


def progress(report: RunReport) -> str:
    """Say how many steps are done, and of how many."""
    of = f" of {report.steps_wanted:,}" if report.steps_wanted else ""
    return f"step {report.steps_done:,}{of}"


def _resumable(report: RunReport) -> str:
    held = [smp["newest"] for smp in report.smps if smp.get("newest") is not None]
    if held:
        return f"Memory holds step {min(held):,}: resume it before the snapshot process ends."
    if report.checkpoints:
        return f"No snapshot is left in memory; step {report.checkpoints[-1]:,} is on disk."
    return "No snapshot is left in memory, and none is on disk."

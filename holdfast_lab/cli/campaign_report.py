"""The report that ``holdfast campaign`` prints and writes as JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from holdfast.cli.tables import print_table
from holdfast.inject.statistics import Rate
from holdfast_lab.campaign import DTYPES, CellResult, Counts, Plan, group_of, summed, total
from holdfast_lab.cli import say
from holdfast_lab.provenance import provenance

PRODUCT_SITES = ("output", "accumulator", "operand_a", "operand_b")
BEYOND_REPAIR = ("operand_a_memory", "operand_b")  # recomputation gives the same result
SHOWN = 10

SITE_COLUMNS = (
    "site",
    "dtype",
    "injected",
    "detected (95 %)",
    "masked",
    "below rounding",
    "harmless",
    "harmful",
    "repaired bit for bit",
)


def print_report(
    console: Console, results: Sequence[CellResult], broken: Sequence[tuple[str, CellResult]]
) -> None:
    """Print the detections by fault and by site, and the cells that contradict the fault model."""
    _print_faults(results)
    by_site = summed(results, lambda cell: (cell.site, cell.dtype))
    print_table(
        SITE_COLUMNS,
        [_site_row(*key, counts=counts) for key, counts in by_site.items()],
        title="By site; undetected faults by what they do",
        right=SITE_COLUMNS[2:],
    )
    for line in _lines(results):
        say(console, line)
    for what, result in broken[:SHOWN]:
        say(console, f"! {what}: {result.cell.key}")
    verdict = f"CONTRADICTED in {len(broken)} cells" if broken else "holds in every cell"
    say(console, f"the fault model {verdict}", style="bold")


def _print_faults(results: Sequence[CellResult]) -> None:
    struck = [result for result in results if result.cell.site in PRODUCT_SITES]
    by_fault = summed(struck, lambda cell: (group_of(cell), cell.dtype))
    dtypes = [name for name in DTYPES if any(key[1] == name for key in by_fault)]
    if not struck:
        return
    rows = [
        (group, *(_shown(by_fault.get((group, dtype), Counts())) for dtype in dtypes))
        for group in dict.fromkeys(key[0] for key in by_fault)
    ]
    print_table(("fault", *dtypes), rows, title="Detected, with 95 % intervals", right=dtypes)


def _shown(counts: Counts) -> str:
    return _percent(Rate(counts.detected, counts.trials))


def _site_row(site: str, dtype: str, *, counts: Counts) -> tuple[str, ...]:
    missed = (counts.masked, counts.below_rounding, counts.harmless)
    harmful = Rate(counts.harmful, counts.trials)
    repaired = f"{counts.replayed_corrected:,} of {counts.replayed_detected:,}"
    if site in BEYOND_REPAIR:
        repaired = f"– of {counts.replayed_detected:,}"
    return (
        site,
        dtype,
        f"{counts.trials:,}",
        _shown(counts),
        *(f"{count:,}" for count in missed),
        f"{harmful.count:,} (≤ {harmful.upper:.1e})",
        repaired,
    )


def _percent(rate: Rate) -> str:
    if not rate.trials:
        return "–"
    low, high = rate.interval
    return f"{rate.value:.2%} ({low:.2%}–{high:.2%})"


def _lines(results: Sequence[CellResult]) -> Iterator[str]:
    counts = total(results)
    alarms, suspects = (
        Rate(count, counts.clean_rows) for count in (counts.false_alarms, counts.clean_suspects)
    )
    yield (
        f"injected: {counts.trials:,} faults, of which {counts.would_harm:,} would do harm; "
        f"{counts.harmful:,} of these were not found"
    )
    yield (
        f"end to end: {counts.replayed:,} faults, {counts.replayed_detected:,} reported, "
        f"{counts.replayed_corrected:,} repaired bit for bit; {counts.disagreements:,} where the "
        "emulated pass and the real product disagree"
    )
    yield (
        f"clean: {alarms.trials:,} rows, {alarms.count:,} false alarms (rate ≤ {alarms.upper:.1e}),"
        f" {suspects.count:,} suspected and cleared (rate ≤ {suspects.upper:.1e})"
    )
    empty = sum(result.counts.trials == 0 for result in results)
    if empty:
        yield f"{empty:,} cells are empty: no element there has the bit that was to flip"
    worst = sorted(results, key=lambda result: -result.counts.harmful)[:SHOWN]
    if worst and worst[0].counts.harmful:
        yield "most harmful faults not found:"
        for result in worst:
            if result.counts.harmful:
                yield f"  {result.counts.harmful:,} of {result.counts.trials:,}: {result.cell.key}"


def report_as_json(
    plan: Plan,
    directory: Path,
    results: Sequence[CellResult],
    broken: list[tuple[str, CellResult]],
) -> dict[str, object]:
    """Return the report as values that JSON can hold."""
    by_fault = summed(results, lambda cell: (cell.dtype, cell.site, group_of(cell)))
    return {
        "plan": plan.digest(),
        "seed": plan.seed,
        **provenance("holdfast_lab.campaign.runner"),
        "cells": len(plan.cells),
        "trials": plan.trials,
        "directory": str(directory),
        "total": total(results).as_dict(),
        "groups": [
            {"dtype": key[0], "site": key[1], "fault": key[2], **counts.as_dict()}
            | {"interval": list(Rate(counts.detected, counts.trials).interval)}
            for key, counts in by_fault.items()
        ],
        "broken": [{"what": what, "cell": result.cell.key} for what, result in broken],
        "holds": not broken,
    }

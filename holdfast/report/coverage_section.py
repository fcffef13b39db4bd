"""The section of a run's page on what is covered: matmuls, steps of optimizers, modules."""

from holdfast.inject.statistics import Rate
from holdfast.report.charts import shares
from holdfast.report.markup import Markup, breakable, tag
from holdfast.report.parts import columns, section, table
from holdfast.report.quantities import number, share
from holdfast.report.run import RunReport
from holdfast.report.sources import Record

COSTLIEST = 10
UNCOVERED = 50
SITE_COLUMNS = (
    *columns("site", "method"),
    *columns("calls", "rows verified", "smallest change seen, × row's rms", numeric=True),
    *columns("checks, of the product's time", numeric=True),
)
OPTIMIZER_COLUMNS = columns("optimizer", "updates repeated in each step", "so far", "why not")


def coverage_section(report: RunReport) -> Markup:
    """Show the covered sites, the reasons for those that are not, and the costliest checks."""
    if report.coverage is None:
        text = (
            "Not known: a Guard with a protected model writes its coverage every few seconds. "
            "Without a Guard, print(protection.report()) shows it."
        )
        return section(
            "Coverage", tag("p", text, class_="none"), *_optimizers(report), *_modules(report)
        )
    sites: list[Record] = report.coverage["sites"]
    covered = [site for site in sites if site["covered"]]
    bare = [site for site in sites if not site["covered"]]
    costly = sorted(covered, key=_spent_s, reverse=True)[:COSTLIEST]
    label = f"{len(covered)} of {len(sites)} sites covered"
    return section(
        "Coverage",
        tag("p", f"{label}. {_summary(report.coverage, covered)}"),
        shares([("covered", len(covered)), ("uncovered", len(bare))], label),
        tag("h3", "Not covered"),
        table(
            columns("site", "why"),
            ((breakable(s["site"]), s["reason"]) for s in bare[:UNCOVERED]),
        ),
        tag("h3", f"The costliest checks, {len(costly)} of {len(covered)}"),
        table(SITE_COLUMNS, map(_row, costly)),
        *_optimizers(report),
        *_modules(report),
        note="These are the matrix products of rank 0 since its last start. Changes smaller than "
        "those seen cannot be told from rounding.",
    )


def _optimizers(report: RunReport) -> list[Markup]:
    """Show how much of each optimizer's step is computed again, as the first rank tells."""
    told = next((guard["optimizers"] for guard in report.guards if guard.get("optimizers")), ())
    rows = [(o["optimizer"], share(o["share"]), f"{o['checked']:,}", o["reason"]) for o in told]
    return [tag("h3", "Steps of optimizers"), table(OPTIMIZER_COLUMNS, rows)] if rows else []


def _modules(report: RunReport) -> list[Markup]:
    """Show how many modules are computed again in turn, and which are not, on the first rank."""
    told = next((guard["modules"] for guard in report.guards if guard.get("modules")), None)
    if told is None:
        return []
    text = f"{told['modules']:,} take turns, {share(told['share'])} in each step, and agreed with "
    text += f"{told['checked']:,} repetitions of forward or backward. Left out: "
    left = "; ".join(f"{name} ({why})" for name, why in [*told["left_out"].items()][:UNCOVERED])
    return [tag("h3", "Modules"), tag("p", f"{text}{left or 'none'}.")]


def _summary(coverage: Record, covered: list[Record]) -> str:
    rows = sum(site["rows"] for site in covered)
    product_s = sum(site["product_s"] for site in covered)
    # Results of earlier releases have another name for false alarms.
    alarms = coverage.get("false_alarms", coverage.get("dismissed_rows", 0))
    dismissed = Rate(min(alarms, rows), rows)
    cost = share(sum(map(_spent_s, covered)) / product_s) if product_s else "an unknown share"
    return (
        f"{_verified(coverage)}{rows:,} rows verified; {dismissed.count:,} suspected and cleared "
        "by another check "
        f"(rate at most {number(dismissed.upper)}). The checks took {cost} of the products' time."
    )


def _verified(coverage: Record) -> str:
    """Say which share of the passes was verified, if it was less than all; older files lack it."""
    asked, seen = coverage.get("frequency", 1.0), coverage.get("passes", 0)
    if asked >= 1 or not seen:
        return ""
    verified = coverage["verified_passes"]
    return (
        f"{verified:,} of {seen:,} passes verified ({share(verified / seen)}; asked for: "
        f"{share(asked)}). "
    )


def _spent_s(site: Record) -> float:
    spent: float = site["encode_s"] + site["verify_s"]
    return spent


def _row(site: Record) -> tuple[object, ...]:
    cost = share(_spent_s(site) / site["product_s"]) if site["product_s"] else "–"
    counts = (f"{site[name]:,}" for name in ("calls", "rows"))
    return breakable(site["site"]), site["method"], *counts, number(site["line"]), cost

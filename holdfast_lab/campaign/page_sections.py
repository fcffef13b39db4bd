"""The HTML page of a fault-injection campaign."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.inject.faults import bit_width, mantissa_bits
from holdfast.inject.statistics import Rate
from holdfast.report.charts import Line, line_chart, responsive, shares
from holdfast.report.markup import Markup, breakable, tag
from holdfast.report.parts import Column, legend, pairs, section, table, tiles
from holdfast.report.quantities import duration, number, share
from holdfast_lab.campaign import DTYPES, Counts
from holdfast_lab.campaign.models import DIRECTIONS
from holdfast_lab.campaign.page import BitCurve, CampaignReport, Group, gather_campaign
from holdfast_lab.campaign.page_files import is_campaign
from holdfast_lab.campaign.plan import injected_dtype

EFFECTS = ("detected", "masked", "below rounding", "harmless", "harmful")
SITE_COLUMNS = (
    Column("site"),
    Column("dtype"),
    Column("injected", numeric=True),
    Column("what became of them"),
    Column("detected (95 %)", numeric=True),
    Column("harmful, not found (at most)", numeric=True),
)
GROUP_COLUMNS = (
    Column("site"),
    Column("dtype"),
    Column("fault"),
    Column("injected", numeric=True),
    Column("detected (95 %)", numeric=True),
    Column("harmful, not found", numeric=True),
    Column("repaired, of those reported", numeric=True),
)
WORST_COLUMNS = (Column("cell"), Column("harmful, not found", numeric=True))


@dataclass(frozen=True)
class _Panel:
    site: str
    dtype: str
    curves: list[BitCurve]


class CampaignPage(CampaignReport):
    """The report on a campaign in the form that ``holdfast report`` shows."""

    def sections(self) -> list[Markup]:
        """Render the sections of the page, in order."""
        parts = [tiles(_tiles(self))]
        if self.broken:
            parts.append(_broken(self))
        return [*parts, _sites(self), _curves(self), _worst(self), _groups(self), _about(self)]


def campaign_report(path: Path) -> CampaignPage | None:
    """Make the report on a campaign; return None if the path holds no campaign."""
    return CampaignPage(**vars(gather_campaign(path))) if is_campaign(path) else None


def _tiles(report: CampaignReport) -> Iterator[tuple[str, object, object]]:
    counts = report.total
    yield "cells done", f"{report.done:,}", f"of {report.planned:,}"
    yield "faults injected", f"{counts.trials:,}", f"{counts.would_harm:,} would do harm"
    found = Rate(counts.would_harm - counts.harmful, counts.would_harm)
    yield "harmful ones found", share(found.value), _interval(found)
    repaired = Rate(counts.replayed_corrected, counts.replayed_detected)
    yield "reported ones repaired", share(repaired.value), f"bit for bit, {_interval(repaired)}"
    alarms = Rate(counts.false_alarms, counts.clean_rows)
    yield "false alarms", f"{alarms.count:,}", f"at most {number(alarms.upper)} a clean row"


def _interval(rate: Rate) -> str:
    low, high = rate.interval
    return f"{share(low)} to {share(high)}" if rate.trials else "no trials"


def _with_interval(rate: Rate) -> str:
    return f"{share(rate.value)} ({_interval(rate)})" if rate.trials else "–"


def _broken(report: CampaignReport) -> Markup:
    rows = ((what, breakable(cell)) for what, cell in report.broken)
    note = "What docs/fault_model.md claims, and these cells contradict."
    return section("Contradictions", table((Column("what"), Column("cell")), rows), note=note)


def _sites(report: CampaignReport) -> Markup:
    sums: dict[tuple[str, str], Counts] = {}
    for group in report.groups:
        key = (group.site, group.dtype)
        sums[key] = sums.get(key, Counts()) + group.counts
    rows = [_site_row(site, dtype, counts) for (site, dtype), counts in sums.items()]
    styles = legend((f"block {_style(effect)}", effect) for effect in EFFECTS)
    note = (
        "Masked faults change no value, those below rounding less than a product rounds anyway, "
        "harmless ones at most half of the format's digits."
    )
    return section("By site", styles, table(SITE_COLUMNS, rows), note=note)


def _style(effect: str) -> str:
    return effect.replace(" ", "-")


def _site_row(site: str, dtype: str, counts: Counts) -> tuple[object, ...]:
    found = {name: getattr(counts, name.replace(" ", "_")) for name in EFFECTS}
    label = ", ".join(f"{name} {count:,}" for name, count in found.items())
    bar = shares([(_style(name), count) for name, count in found.items()], label)
    harmful = Rate(counts.harmful, counts.trials)
    return (
        site,
        dtype,
        f"{counts.trials:,}",
        bar,
        _with_interval(Rate(counts.detected, counts.trials)),
        f"{harmful.count:,} ({share(harmful.upper)})",
    )


def _curves(report: CampaignReport) -> Markup:
    panels: dict[tuple[str, str], _Panel] = {}
    for curve in report.curves:
        panel = panels.setdefault((curve.site, curve.dtype), _Panel(curve.site, curve.dtype, []))
        panel.curves.append(curve)
    if not panels:
        text = "None here: curves need the campaign's directory, and cells in which bits flip."
        return section("Detection by bit", tag("p", text, class_="none"))
    used = dict.fromkeys(curve.direction for curve in report.curves)
    key = legend((direction, f"bit flips {DIRECTIONS[direction]}") for direction in used)
    note = (
        "Share of single flips that were detected, with 95 % Wilson intervals. Low bits drown in "
        "rounding; an exponent bit that flips from 1 to 0 only removes a small element."
    )
    drawn = (part for panel in panels.values() for part in _panel(panel))
    return section("Detection by bit", key, *drawn, note=note)


def _panel(panel: _Panel) -> Iterator[Markup]:
    struck = injected_dtype(DTYPES[panel.dtype], panel.site)
    mantissa, width = mantissa_bits(struck), bit_width(struck)
    lines = [Line(c.direction, c.bits, c.rate, c.low, c.high) for c in panel.curves]
    yield tag("h3", f"{panel.site}, {panel.dtype}: mantissa | exponent | sign")
    yield responsive(
        lambda wide: line_chart(
            wide,
            lines,
            label=f"Detection by bit, {panel.site}, {panel.dtype}",
            x_title="bit",
            y_shown=share,
            y_low=0.0,
            y_high=1.0,
            borders=(mantissa - 0.5, width - 1.5),
        )
    )


def _worst(report: CampaignReport) -> Markup:
    rows = ((breakable(cell), f"{c.harmful:,} of {c.trials:,}") for cell, c in report.worst)
    note = "Harmful faults that no row checksum sees exist in every dtype: a rate, not a verdict."
    return section("Most harmful faults not found", table(WORST_COLUMNS, rows), note=note)


def _groups(report: CampaignReport) -> Markup:
    return section("By fault", table(GROUP_COLUMNS, map(_group_row, report.groups)))


def _group_row(group: Group) -> tuple[object, ...]:
    counts = group.counts
    return (
        group.site,
        group.dtype,
        group.fault,
        f"{counts.trials:,}",
        _with_interval(group.detected),
        f"{counts.harmful:,}",
        f"{counts.replayed_corrected:,} of {counts.replayed_detected:,}",
    )


def _about(report: CampaignReport) -> Markup:
    rows: list[tuple[str, object]] = [("from", report.path)]
    rows += [(name, str(value)) for name, value in report.environment.items() if value is not None]
    rows.append(("computed for", duration(report.total.seconds)))
    return section("The campaign", pairs(rows))

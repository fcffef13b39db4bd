"""The data that the HTML report on a fault-injection campaign shows, read from its result files."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast.inject.statistics import Rate
from holdfast.report.quantities import counted, number
from holdfast.report.verdict import ATTENTION, BAD, GOOD, Verdict
from holdfast_lab.campaign import DTYPES, CellResult, Counts, broken_claims, group_of, summed, total
from holdfast_lab.campaign.models import DIRECTIONS
from holdfast_lab.campaign.page_files import CampaignFiles, counts_of, read_campaign
from holdfast_lab.campaign.plots import bit_rates

WORST = 15


@dataclass(frozen=True)
class Group:
    """The sum of several cells with the same site, dtype and group of faults."""

    site: str
    dtype: str
    fault: str
    counts: Counts

    @property
    def detected(self) -> Rate:
        """Detected faults as a share of those injected."""
        return Rate(self.counts.detected, self.counts.trials)


@dataclass(frozen=True)
class BitCurve:
    """Detection rates of single flips by bit, with 95 % intervals."""

    site: str
    dtype: str
    direction: str
    bits: list[int]
    rate: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class CampaignReport:
    """The results of a campaign so far; a summary file has no ``curves`` and no ``worst``."""

    name: str
    path: str
    made_s: float
    planned: int
    done: int
    environment: dict[str, object]
    total: Counts
    broken: list[tuple[str, str]]
    groups: list[Group]
    curves: list[BitCurve]
    worst: list[tuple[str, Counts]]

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values."""
        return asdict(self)

    def verdict(self) -> Verdict:
        """Judge whether the fault model holds in every finished cell."""
        lines = tuple(_lines(self))
        if self.broken:
            cells = counted(len({cell for _, cell in self.broken}), "cell")
            return Verdict(BAD, f"The fault model is contradicted in {cells}.", lines)
        if self.done < self.planned:
            headline = f"Unfinished: {self.done:,} of {self.planned:,} cells, and no contradiction."
            return Verdict(ATTENTION, headline, lines)
        return Verdict(GOOD, f"The fault model holds in all {self.done:,} cells.", lines)


def gather_campaign(path: Path) -> CampaignReport:
    """Read the directory of a campaign or a file of its results."""
    files = read_campaign(path)
    results = files.results
    if files.summary is not None:
        return _of_summary(path, files, files.summary)
    harmful = sorted(results, key=lambda result: result.counts.harmful, reverse=True)[:WORST]
    return CampaignReport(
        name=path.name,
        path=str(path),
        made_s=time.time(),
        planned=files.planned,
        done=len(results),
        environment=files.environment,
        total=total(results),
        broken=[(what, result.cell.key) for what, result in broken_claims(results)],
        groups=_groups(results),
        curves=list(_curves(results)),
        worst=[(result.cell.key, result.counts) for result in harmful if result.counts.harmful],
    )


def _groups(results: Sequence[CellResult]) -> list[Group]:
    sums = summed(results, lambda cell: (cell.site, cell.dtype, group_of(cell)))
    return [
        Group(site, dtype, fault, counts)
        for (site, dtype, fault), counts in sums.items()
        if counts.trials
    ]


def _curves(results: Sequence[CellResult]) -> Iterator[BitCurve]:
    for site in dict.fromkeys(result.cell.site for result in results):
        for dtype in DTYPES:
            here = [r for r in results if (r.cell.site, r.cell.dtype) == (site, dtype)]
            for direction in DIRECTIONS:
                rates = bit_rates(here, direction)
                if rates:
                    values = list(rates.values())
                    low, high = zip(*(rate.interval for rate in values), strict=True)
                    shown = [rate.value for rate in values]
                    bits = list(rates)
                    yield BitCurve(site, dtype, direction, bits, shown, list(low), list(high))


def _of_summary(path: Path, files: CampaignFiles, values: dict[str, Any]) -> CampaignReport:
    return CampaignReport(
        name=path.name,
        path=str(path),
        made_s=time.time(),
        planned=files.planned,
        done=files.planned,
        environment=files.environment,
        total=counts_of(values["total"]),
        broken=[(row["what"], row["cell"]) for row in values["broken"]],
        groups=[Group(g["site"], g["dtype"], g["fault"], counts_of(g)) for g in values["groups"]],
        curves=[],
        worst=[],
    )


def _lines(report: CampaignReport) -> Iterator[str]:
    counts = report.total
    yield (
        f"{counted(counts.trials, 'fault')} injected, {counts.would_harm:,} of them harmful; "
        f"{counts.harmful:,} harmful ones were not found."
    )
    yield (
        f"{counts.replayed:,} went the whole way: {counts.replayed_detected:,} reported, "
        f"{counts.replayed_corrected:,} repaired bit for bit."
    )
    alarms = Rate(counts.false_alarms, counts.clean_rows)
    yield (
        f"{counted(alarms.count, 'false alarm')} in {counted(alarms.trials, 'clean row')} (rate at "
        f"most {number(alarms.upper)})."
    )

"""``vabft.false-positives`` and ``vabft.coherent``: clean rows over a threshold (section 6.4)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product as every

import torch

from holdfast.abft.thresholds.protocol import Product
from holdfast.inject.statistics import Rate
from holdfast_lab.distributions import COHERENT, RANDOM, Distribution
from holdfast_lab.study.published import Published
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.paper import (
    DISTRIBUTIONS,
    NO_FALSE_POSITIVE,
    NO_FALSE_POSITIVE_COHERENT,
    TRIALS_FALSE_POSITIVES,
)
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, residuals

OVER, RANDOM_FOR_CONTRAST = "clean rows over the threshold, %", "independent elements, for contrast"
TOTAL = "all together, %"
TABLES = {
    OVER: (COHERENT, NO_FALSE_POSITIVE_COHERENT),
    RANDOM_FOR_CONTRAST: (RANDOM, NO_FALSE_POSITIVE),
}
LARGEST_SHARE = 1e-4  # claim of holdfast: most clean rows that are suspected, on any distribution
COLOURS = {"vabft": "tab:red", "rounding": "tab:blue"}
MARKERS = {"fp64": "o", "fp32": "s", "fp16": "^", "bf16": "x"}
LARGEST_DRAWN = 1e3  # larger ratios come from underflow in fp32 and fp64, or from no error at all
FALSE_POSITIVE_SHAPE = (32, 256, 128)
COLUMNS = 256
INNERS = (1, 17, 256, 1000, 4096, 10000)  # constants add up exactly at powers of two


def alarm_row(table: str, case: Case, margins: Margins, published: Mapping[str, Published]) -> Row:
    """Make a row of the percentages of clean rows over each threshold.

    It also has the smallest ratios of threshold to error of V-ABFT and of ours.
    """
    rows = next(iter(margins.values())).rows
    measured = margins.share_over()
    measured |= {f"{name}: T / error": margins[name].tightness for name in ("vabft", "rounding")}
    rates = {name: Rate(margin.over, margin.rows) for name, margin in margins.items()}
    intervals = {name: _percent(rate) for name, rate in rates.items() if rate.count}
    trials = dict.fromkeys(published, rows)
    case = {**case, "rows": rows}
    return Row(table, case, measured, published, intervals=intervals, trials=trials)


def total_row(margins: Margins) -> Row:
    """Sum the rows of a study, and bound the false-alarm rate also if there was no alarm."""
    row = alarm_row(TOTAL, {}, margins, {})
    rates = {name: Rate(margin.over, margin.rows) for name, margin in margins.items()}
    return replace(row, intervals={name: _percent(rate) for name, rate in rates.items()})


def _percent(rate: Rate) -> tuple[float, float]:
    return 100 * rate.interval[0], 100 * rate.upper


def few_suspected(rows: list[Row]) -> str:
    """Check that at most one clean row in ten thousand is over its threshold."""
    for row in rows:
        share = row.measured["rounding"]
        if share > 100 * LARGEST_SHARE:
            return f"`rounding` suspects {share:.3g} % of clean rows, {dict(row.case)}"
    return ""


def _false_positives(settings: Settings, progress: Progress) -> Iterator[Row]:
    trials = settings.choose(2, 400, TRIALS_FALSE_POSITIVES)
    cases = list(every(("bf16", "fp16", "fp32"), DISTRIBUTIONS))
    progress.begin(float(trials * len(cases)))
    total = Margins()
    for precision, name in cases:
        generator, margins = settings.generator("false-positives", precision, name), Margins()
        for _ in range(trials):
            a, b = DISTRIBUTIONS[name](*FALSE_POSITIVE_SHAPE, DTYPES[precision], generator)
            c = a @ b
            margins.add(Product(a, b, c, c.dtype), residuals(a, b, c))
            progress.advance(1)
        case: Case = {"precision": precision, "distribution": name, "products": trials}
        yield alarm_row(OVER, case, margins, NO_FALSE_POSITIVE)
        total.include(margins)
    yield total_row(total)


def _coherent(settings: Settings, progress: Progress) -> Iterator[Row]:
    inners = settings.choose((9,), INNERS[1::2], INNERS)
    trials = settings.choose(1, 1, 4)
    total = Margins()
    progress.begin(float(trials * len(DTYPES) * (len(COHERENT) + len(RANDOM)) * sum(inners)))
    for table, (distributions, published) in TABLES.items():
        for (name, draw), precision in every(distributions.items(), DTYPES):
            margins = Margins()
            for inner, trial in every(inners, range(trials)):
                generator = settings.generator("coherent", name, precision, inner, trial)
                _add_clean(margins, draw, precision, inner, settings, generator)
                progress.advance(inner)
            case: Case = {"distribution": name, "precision": precision}
            yield alarm_row(table, case, margins, published)
            total.include(margins)
    yield total_row(total)


def _add_clean(
    margins: Margins,
    draw: Distribution,
    precision: str,
    inner: int,
    settings: Settings,
    generator: torch.Generator,
) -> None:
    rows = settings.choose(4, 64, min(8192, max(256, (1 << 22) // inner)))
    a, b = draw(rows, inner, settings.choose(8, COLUMNS, COLUMNS), DTYPES[precision], generator)
    c = a @ b
    margins.add(Product(a, b, c, c.dtype), residuals(a, b, c))


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot threshold / largest error of V-ABFT and ours; a value below 1 is a false alarm."""
    axes = figure.subplots()
    rows = [row for row in rows if row.table != TOTAL]
    names = list(dict.fromkeys(str(row.case["distribution"]) for row in rows))
    for (name, colour), (precision, marker) in every(COLOURS.items(), MARKERS.items()):
        chosen = [row for row in rows if row.case["precision"] == precision]
        values = [row.measured[f"{name}: T / error"] for row in chosen]
        heights = [names.index(str(row.case["distribution"])) for row in chosen]
        axes.scatter(values, heights, s=16, c=colour, marker=marker, label=f"{name} {precision}")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="threshold / largest error (below 1: a clean row is flagged)")
    axes.set_xlim(right=LARGEST_DRAWN)
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    figure.legend(loc="outside right upper")


STUDIES = (
    Study(
        name="vabft.false-positives",
        paper="V-ABFT, section 6.4",
        reproduces="no false positive on four random distributions in bf16, fp16 and fp32",
        run=_false_positives,
        verdict=few_suspected,
    ),
    Study(
        name="vabft.coherent",
        paper="V-ABFT, section 6.4, beyond what it tested",
        reproduces="where rounding errors of a row are not independent: V-ABFT flags clean rows, "
        "`rounding` suspects at most one in ten thousand",
        run=_coherent,
        plot=_plot,
        verdict=few_suspected,
    ),
)

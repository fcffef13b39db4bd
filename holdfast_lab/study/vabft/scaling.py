"""``vabft.scaling``: how thresholds and rounding errors grow with N (V-ABFT, section 4.2)."""

from collections.abc import Iterator
from math import hypot, log

from holdfast.abft.thresholds import REGISTRY
from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study.plots import over_size
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.paper import GROWTH_COLUMNS, SIZES, growth
from holdfast_lab.study.vabft.residuals import (
    DTYPES,
    Margin,
    Margins,
    exact_residuals,
    residuals,
)
from holdfast_lab.study.vabft.tightness import PAPER_DISTRIBUTION, PAPER_MEMBERS

RATIOS, GROWTH = "mean threshold / typical error", "exponent of the growth with N"
ROWS = 64


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    sizes = {
        "fp64": settings.choose(SIZES[:2], SIZES, (*SIZES, 4096)),
        "fp32": settings.choose((SIZES[0], SIZES[-1]), (*SIZES, 4096), (*SIZES, 4096, 8192)),
    }
    sizes["bf16"] = sizes["fp32"]
    trials = settings.choose(2, 2, 20)
    progress.begin(float(trials * sum(size**2 for some in sizes.values() for size in some)))
    fits = []
    for precision, chosen in sizes.items():
        found = {}
        for size in chosen:
            found[size] = _measure(precision, size, trials, settings, progress)
            yield _ratio_row(precision, size, found[size])
        fits.append(_growth_row(precision, found))
    yield from fits


def _measure(
    precision: str, size: int, trials: int, settings: Settings, progress: Progress
) -> tuple[Margins, Margins]:
    """Measure the registered thresholds, and the paper's two as in its tables."""
    registered, paper = Margins(), Margins()
    generator = settings.generator("scaling", precision, size)
    for _ in range(trials):
        draw = RANDOM[PAPER_DISTRIBUTION[precision]]
        a, b = draw(min(size, ROWS), size, size, DTYPES[precision], generator)
        c = a @ b
        exact = exact_residuals(a, b, c) if precision == "fp64" else residuals(a, b, c)
        registered.add(Product(a, b, c, c.dtype), exact)
        paper.add(Product(a, b, c, c.dtype), exact, PAPER_MEMBERS[precision])
        progress.advance(size**2)
    return registered, paper


def _ratio_row(precision: str, size: int, found: tuple[Margins, Margins]) -> Row:
    registered, _ = found
    measured = {name: margin.threshold / margin.typical for name, margin in registered.items()}
    case: Case = {
        "precision": precision,
        "distribution": PAPER_DISTRIBUTION[precision],
        "N": size,
    }
    return Row(RATIOS, case, measured)


def _growth_row(precision: str, found: dict[int, tuple[Margins, Margins]]) -> Row:
    """Compute the growth between the smallest and the largest of the paper's sizes."""
    sizes = sorted(set(found) & set(SIZES))
    ends = sizes[0], sizes[-1]
    margins = [found[size] for size in ends]
    small, large = (registered for registered, _ in margins)
    series: dict[str, list[tuple[float, float]]] = {
        "error": [(m["vabft"].typical, m["vabft"].typical_error) for m in (small, large)],
        "A-ABFT": [_threshold(paper["aabft"]) for _, paper in margins],
        "V-ABFT": [_threshold(paper["vabft"]) for _, paper in margins],
    }
    published = {
        name: growth(precision, column, *ends)
        for name, column in zip(series, GROWTH_COLUMNS, strict=True)
    }
    series |= {f"{n} (registered)": [_threshold(m[n]) for m in (small, large)] for n in REGISTRY}
    octaves = log(ends[1] / ends[0])
    measured, intervals = {}, {}
    for name, ((first, first_error), (last, last_error)) in series.items():
        measured[name] = log(last / first) / octaves
        room = hypot(first_error, last_error) / octaves
        intervals[name] = measured[name] - room, measured[name] + room
    case: Case = {"precision": precision, "from": ends[0], "to": ends[1]}
    trials = dict.fromkeys(published, small["vabft"].rows)
    return Row(GROWTH, case, measured, published, intervals=intervals, trials=trials)


def _threshold(margin: Margin) -> tuple[float, float]:
    return margin.threshold, margin.threshold_error


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot thresholds and rounding errors over N, with a panel for each precision."""
    shown = [row for row in rows if row.table == RATIOS]
    precisions = list(dict.fromkeys(row.case["precision"] for row in shown))
    grid = figure.subplots(1, len(precisions), sharey=True)
    for axes, precision in zip(grid, precisions, strict=True):
        chosen = [row for row in shown if row.case["precision"] == precision]
        over_size(axes, chosen, "N", dict.fromkeys(chosen[0].measured, "o-"))
        axes.set(title=precision, yscale="log", ylabel=RATIOS)
        axes.label_outer()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")


STUDY = Study(
    name="vabft.scaling",
    paper="V-ABFT, section 4.2, tables 4 to 6",
    reproduces="threshold / error over N: A-ABFT's grows away from the errors, V-ABFT's and ours "
    "stay with them",
    run=_run,
    plot=_plot,
)

"""``vabft.scaling``: how thresholds and rounding errors grow with N (V-ABFT, section 4.2)."""

from collections.abc import Iterator
from math import log
from statistics import linear_regression

from holdfast.abft.thresholds import REGISTRY
from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study.plots import over_size
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.paper import GROWTH_COLUMNS, growth
from holdfast_lab.study.vabft.residuals import DTYPES, Margins, exact_residuals, residuals
from holdfast_lab.study.vabft.tightness import PAPER_DISTRIBUTION, PAPER_MEMBERS

RATIOS, GROWTH = "mean threshold / typical error", "exponent of the growth with N"
ROWS = 64


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    sizes = {
        "fp64": settings.choose((16, 32), (64, 128, 256, 512, 1024), (64, 256, 1024, 4096)),
        "fp32": settings.choose((16, 32), (64, 256, 1024, 4096), (64, 256, 1024, 4096, 8192)),
    }
    sizes["bf16"] = sizes["fp32"]
    trials = settings.choose(1, 2, 20)
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
    sizes = list(found)
    series = {
        "error": [registered["vabft"].typical for registered, _ in found.values()],
        "A-ABFT": [paper["aabft"].threshold for _, paper in found.values()],
        "V-ABFT": [paper["vabft"].threshold for _, paper in found.values()],
    }
    published = {
        name: growth(precision, column) for name, column in zip(series, GROWTH_COLUMNS, strict=True)
    }
    series |= {
        f"{name} (registered)": [registered[name].threshold for registered, _ in found.values()]
        for name in REGISTRY
    }
    measured = {name: _exponent(sizes, values) for name, values in series.items()}
    return Row(GROWTH, {"precision": precision}, measured, published)


def _exponent(sizes: list[int], values: list[float]) -> float:
    """Return the slope of a straight line through the logarithms."""
    return linear_regression([log(size) for size in sizes], [log(v) for v in values]).slope


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

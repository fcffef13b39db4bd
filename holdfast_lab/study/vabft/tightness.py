"""``vabft.tightness-*``: thresholds against true rounding errors (V-ABFT, tables 4, 5 and 6)."""

from collections.abc import Callable, Iterator
from itertools import product as every

import torch

from holdfast.abft.thresholds import AAbft, Threshold, VAbft
from holdfast.abft.thresholds.protocol import Product
from holdfast.abft.thresholds.vabft import H100
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study.plots import over_size
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.paper import (
    SIZES,
    SUMMED_UP,
    TABLE_OF,
    TIGHTNESS_COLUMNS,
    TRIALS,
    tightness,
)
from holdfast_lab.study.vabft.residuals import (
    DTYPES,
    Margins,
    Residuals,
    exact_residuals,
    residuals,
)

Measure = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Residuals]

SIDE_BY_SIDE, AGAINST = "threshold / largest true error", "as the paper measures it"
PAPER_DISTRIBUTION = {"fp64": "u11", "fp32": "u11", "bf16": "u01"}
# Tables 4 and 5 use A-ABFT's calibrated y and V-ABFT's e_max of an H100, unlike their titles say.
PAPER_MEMBERS: dict[str, tuple[Threshold, Threshold]] = {
    "fp64": (AAbft(y=21.0), VAbft(e_max=H100)),
    "fp32": (AAbft(y=21.0), VAbft(e_max=H100)),
    "bf16": (AAbft(y="maxima"), VAbft(e_max=H100)),
}
BASELINE = {"fp64": "exact (the paper: mpmath)", "fp32": "fp64", "bf16": "fp64"}
ALSO = {"bf16": ("fp16",)}  # precisions without a table in the paper
# Claim of holdfast: upper limit of the least threshold / |error| of a product's rows.
CLAIM = {"fp64": 8.0, "fp32": 8.0, "fp16": 5.0, "bf16": 5.0}


def _study(precision: str) -> Study:
    precisions = (precision, *ALSO.get(precision, ()))
    return Study(
        name=f"vabft.tightness-{precision}",
        paper=f"V-ABFT, section 6.2, {TABLE_OF[precision]}",
        reproduces="threshold / true rounding error, of all registered thresholds, on six "
        f"distributions in {' and '.join(precisions)}; baseline: {BASELINE[precision]}",
        run=lambda settings, progress: _run(precisions, settings, progress),
        plot=_plot,
        verdict=_verdict,
    )


def _run(precisions: tuple[str, ...], settings: Settings, progress: Progress) -> Iterator[Row]:
    sizes = settings.choose(SIZES[:1], SIZES, SIZES)
    trials = settings.choose(3, 1 if "fp64" in precisions else 3, TRIALS[precisions[0]])
    cases = list(every(precisions, RANDOM, sizes))
    progress.begin(float(trials * sum(size**2 for *_, size in cases)))
    against = []
    for precision, distribution, size in cases:
        registered, paper = Margins(), Margins()
        for trial in range(trials):
            a, b, c = _operands(precision, distribution, size, trial, settings)
            product, exact = Product(a, b, c, c.dtype), _baseline(precision)(a, b, c)
            registered.add(product, exact)
            if distribution == PAPER_DISTRIBUTION.get(precision):
                paper.add(product, exact, PAPER_MEMBERS[precision])
            progress.advance(size**2)
        yield _side_by_side(precision, distribution, size, registered)
        if paper:
            against.append(_against(precision, distribution, size, paper))
    yield from against


def _side_by_side(precision: str, distribution: str, size: int, margins: Margins) -> Row:
    case: Case = {
        "precision": precision,
        "distribution": distribution,
        "size": size,
        "rows": margins["vabft"].rows,
    }
    return Row(SIDE_BY_SIDE, case, margins.tightness())


def _operands(
    precision: str, distribution: str, size: int, trial: int, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw A and B and compute A B; some rows of A suffice, as all have one distribution."""
    dtype = DTYPES[precision]
    limit = settings.choose(8, 384, 384) if precision == "fp64" else settings.choose(8, 128, size)
    generator = settings.generator("tightness", precision, distribution, size, trial)
    a, b = RANDOM[distribution](min(size, limit), size, size, dtype, generator)
    return a, b, a @ b


def _baseline(precision: str) -> Measure:
    return exact_residuals if precision == "fp64" else residuals


def _against(precision: str, distribution: str, size: int, paper: Margins) -> Row:
    a_abft, v_abft = paper["aabft"], paper["vabft"]
    error = v_abft.typical
    values = (
        error,
        a_abft.threshold,
        v_abft.threshold,
        a_abft.threshold / error,
        v_abft.threshold / error,
    )
    measured = dict(zip(TIGHTNESS_COLUMNS, values, strict=True))
    off = v_abft.typical_error
    errors = (off, a_abft.threshold_error, v_abft.threshold_error, off, off)
    intervals = {
        name: (value * (1 - error), value * (1 + error))
        for (name, value), error in zip(measured.items(), errors, strict=True)
    }
    case: Case = {"distribution": distribution, "size": size}
    trials = dict.fromkeys(measured, v_abft.rows)
    published = tightness(precision, size)
    for name in [name for name in published if name.endswith(SUMMED_UP)]:
        ratio = name.removesuffix(SUMMED_UP)
        measured[name], intervals[name] = measured[ratio], intervals[ratio]
    return Row(AGAINST, case, measured, published, intervals=intervals, trials=trials)


def _verdict(rows: list[Row]) -> str:
    """Check that our threshold is as tight as claimed and above every true error."""
    for row in rows:
        if row.table != SIDE_BY_SIDE:
            continue
        ratio, limit = row.measured["rounding"], CLAIM[str(row.case["precision"])]
        if ratio < 1:
            return f"`rounding` is {ratio:.3g} × a clean row's error, {dict(row.case)}"
        if ratio > limit:
            return f"`rounding` is {ratio:.3g} × the largest error, over {limit:.3g}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Draw a panel for each distribution: threshold / largest error over the size."""
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    precision = rows[0].case["precision"]
    shown = [r for r in rows if r.table == SIDE_BY_SIDE and r.case["precision"] == precision]
    for axes, distribution in zip(grid.flat, RANDOM, strict=True):
        chosen = [row for row in shown if row.case["distribution"] == distribution]
        over_size(axes, chosen, "size", dict.fromkeys(chosen[0].measured, "o-"))
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(title=distribution, yscale="log", ylabel="threshold / largest error")
        axes.label_outer()
    figure.suptitle(str(precision))
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside right upper")


STUDIES = tuple(_study(precision) for precision in TABLE_OF)

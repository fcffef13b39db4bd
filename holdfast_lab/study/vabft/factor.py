"""``vabft.factor``: how much tighter V-ABFT's threshold is than A-ABFT's (V-ABFT, section 4.3).

Both are thresholds of the same rows, so that their ratio depends on no rounding error.
"""

from collections.abc import Iterator
from itertools import product as every

from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import RANDOM
from holdfast_lab.study.plots import over_size
from holdfast_lab.study.registry import Figure, Progress, Row, Settings, Study, watched
from holdfast_lab.study.vabft.paper import FACTOR, SIZES
from holdfast_lab.study.vabft.residuals import DTYPES, Margin
from holdfast_lab.study.vabft.tightness import PAPER_DISTRIBUTION, PAPER_MEMBERS

RATIO = "T of A-ABFT / T of V-ABFT"


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    sizes = settings.choose(SIZES[:2], SIZES, SIZES)
    trials = settings.choose(2, 3, 100)
    for precision, size in watched(list(every(PAPER_MEMBERS, sizes)), progress):
        distribution, members = PAPER_DISTRIBUTION[precision], PAPER_MEMBERS[precision]
        margins = [Margin() for _ in members]
        for trial in range(trials):
            generator = settings.generator("factor", precision, size, trial)
            rows = min(size, settings.choose(8, 128, size))
            a, b = RANDOM[distribution](rows, size, size, DTYPES[precision], generator)
            product = Product(a, b, a @ b, a.dtype)
            for margin, member in zip(margins, members, strict=True):
                threshold = member(product)
                margin.add(threshold, threshold)
        a_abft, v_abft = margins
        ratio = a_abft.threshold / v_abft.threshold
        off = a_abft.threshold_error + v_abft.threshold_error
        yield Row(
            "thresholds of the same rows",
            {"precision": precision, "distribution": distribution, "size": size},
            {RATIO: ratio},
            {RATIO: FACTOR[precision]},
            intervals={RATIO: (ratio * (1 - off), ratio * (1 + off))},
            trials={RATIO: a_abft.rows},
        )


def _plot(rows: list[Row], figure: Figure) -> None:
    axes = figure.subplots()
    for precision in PAPER_MEMBERS:
        chosen = [row for row in rows if row.case["precision"] == precision]
        over_size(axes, chosen, "size", {RATIO: "o-"})
        axes.lines[-1].set_label(precision)
    axes.set(yscale="log", ylabel=RATIO)
    axes.legend()


STUDY = Study(
    name="vabft.factor",
    paper="V-ABFT, sections 4.3 and 6.2",
    reproduces="V-ABFT's threshold against A-ABFT's on the operands of tables 4 to 6",
    run=_run,
    plot=_plot,
)

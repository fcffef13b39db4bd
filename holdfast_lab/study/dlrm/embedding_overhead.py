"""``dlrm.embedding-overhead``: overhead of checks of embedding bags (DLRM-ABFT, figure 6)."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import floor, sqrt
from statistics import median, quantiles

import torch

from holdfast import native
from holdfast_lab.study.dlrm.embedding_subject import DIMS, POOLING, ROWS, Subject, subject
from holdfast_lab.study.published import Published, at_most, exactly
from holdfast_lab.study.registry import Progress, Row, Settings, Study
from holdfast_lab.study.timing import seconds

GOAL_MEDIAN, GOAL_WORST = 5.0, 10.0
COUNTED = "× operations counted"
OPERATIONS = Published(
    1.0,
    "section V-C",
    exactly(1.0, "1/d + 1/3m, a count of operations"),
    "operations are not time: a bag out of the cache waits for memory, and rows are wider by "
    "their checksums",
    printed="1/d + 1/3m",
)
FIGURE_6 = Published(None, "figure 6", at_most("26"))


def overheads(cold: Subject, pairs: int) -> list[float]:
    """Return ``protected / unchecked − 1`` in % for each pair of runs, with the table uncached."""
    assert torch.equal(cold.protected(), cold.unchecked())
    ratios = []
    for _ in range(pairs):
        times = []
        for run in (cold.unchecked, cold.protected):
            cold.cool()
            times.append(seconds(run))
        ratios.append(100 * (times[1] / times[0] - 1))
    return ratios


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    if native.core is None or not native.core.embedding_fbgemm():
        progress.begin(1)
        progress.advance(1)
        yield Row(
            "overhead, %", {}, {}, {"overhead, %": FIGURE_6}, "there is no FBGEMM here to compare"
        )
        return
    rows = settings.choose(2000, 400_000, ROWS)
    pairs = settings.choose(5, 60, 80)
    progress.begin(float(len(DIMS) * 4))
    for dim in DIMS:
        whole = subject(rows, dim)
        for weighted, prefetch in product((False, True), (True, False)):
            case = replace(whole, weighted=weighted, prefetch=prefetch)
            found = overheads(case, pairs)
            low, _, high = quantiles(found, n=4)
            counted = 100 * (1 / dim + 1 / (3 * POOLING))
            beyond = max(0, floor(pairs / 2 - 0.98 * sqrt(pairs)))  # 95 % interval of a median
            least, most = sorted(found)[beyond], sorted(found)[-beyond - 1]
            intervals = {"overhead, %": (least, most), COUNTED: (least / counted, most / counted)}
            yield Row(
                "overhead, %",
                {
                    "rows": rows,
                    "dim": dim,
                    "sum": "weighted" if weighted else "plain",
                    "prefetch": "on" if prefetch else "off",
                },
                {
                    "overhead, %": median(found),
                    COUNTED: median(found) / counted,
                    "quartile 1": low,
                    "quartile 3": high,
                    "memory, %": 100 * whole.checked.overhead,
                },
                {"overhead, %": FIGURE_6, COUNTED: OPERATIONS},
                intervals=intervals,
            )
            progress.advance(1)


def _verdict(rows: list[Row]) -> str:
    found = [row.measured["overhead, %"] for row in rows if "overhead, %" in row.measured]
    if not found or (median(found) <= GOAL_MEDIAN and max(found) <= GOAL_WORST):
        return ""
    return (
        f"median {median(found):.1f} % (goal {GOAL_MEDIAN:g}), worst {max(found):.1f} % "
        f"(goal {GOAL_WORST:g})"
    )


STUDY = Study(
    name="dlrm.embedding-overhead",
    paper="DLRM-ABFT, section VI-A2, table I and figure 6",
    reproduces="time that checks add to FBGEMM's embedding bag, plain and weighted, prefetch on "
    "and off, the table out of the cache",
    run=_run,
    verdict=_verdict,
)

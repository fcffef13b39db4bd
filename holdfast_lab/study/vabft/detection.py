"""``vabft.detection``: detection rates of flips of each bit (V-ABFT, tables 8 and 9)."""

from collections.abc import Iterator
from itertools import product as every

import torch

from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.inject.faults import flip_bit, has_bit
from holdfast.inject.statistics import Rate
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Figure, Progress, Row, Settings, Study
from holdfast_lab.study.vabft.paper import CASES, DETECTION_BITS, DISTRIBUTIONS, detection
from holdfast_lab.study.vabft.residuals import exceeds, residuals

MEMBERS = ("vabft", "rounding")
MODES = ("offline", "online")
DIRECTIONS = {"0→1": False, "1→0": True}
KINDS = list(every(DETECTION_BITS, DIRECTIONS.values()))
ROWS = 128  # rows with a fault of each kind in a product; more rows would be drawn alike

Shape = tuple[int, int, int]
Counts = dict[tuple[int, bool, str], Rate]  # by bit, whether it was set, and threshold


def strike(c: torch.Tensor, bit: int, was_set: bool, generator: torch.Generator) -> torch.Tensor:
    """Flip one bit of one element in every row of c [M, N], in place.

    The element is drawn evenly among those of the row in which the bit is set or not, as
    ``was_set`` says. The result is True for rows that have such an element, bool [M].
    """
    eligible = has_bit(c, bit) == was_set
    column = torch.rand(c.shape, generator=generator).masked_fill_(~eligible, -1).argmax(-1)
    rows = eligible.any(-1).nonzero().squeeze(-1)
    c[rows, column[rows]] = flip_bit(c[rows, column[rows]], bit)
    return eligible.any(-1)


def count_detected(
    a: torch.Tensor, b: torch.Tensor, mode: str, generator: torch.Generator
) -> Counts:
    """Flip one bit in each row of ``A B``, every bit and direction in equally many rows.

    ``a`` is bf16 [M, K], where M is a multiple of the number of ``KINDS``, and ``b`` is bf16 [K,
    N]. The mode ``"offline"`` changes and verifies the bf16 product, and ``"online"`` the fp32
    accumulator, in the bit that becomes the same bit of bf16 when it is rounded.
    """
    c = a @ b if mode == "offline" else a.float() @ b.float()
    low = 8 * (c.dtype.itemsize - 2)  # bits of the accumulator below bf16's own
    parts = zip(KINDS, c.chunk(len(KINDS)), strict=True)
    struck = [strike(part, bit + low, was_set, generator) for (bit, was_set), part in parts]
    product = Product(a, b, c, torch.bfloat16, online=mode == "online")
    found = residuals(a, b, c)
    counts: Counts = {}
    for name in MEMBERS:
        member = REGISTRY[name]
        over = exceeds(member(product), found[member.weights])
        for kind, rows, seen in zip(KINDS, struck, over.chunk(len(KINDS)), strict=True):
            counts[*kind, name] = Rate(int((rows & seen).sum()), int(rows.sum()))
    return counts


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    progress.begin(
        sum(_work(shape) * _products(shape, settings) for shape, _ in CASES) * len(MODES)
    )
    for mode in MODES:
        for shape, distribution in CASES:
            yield from _case(mode, shape, distribution, settings, progress)


def _case(
    mode: str, shape: Shape, distribution: str, settings: Settings, progress: Progress
) -> Iterator[Row]:
    _, inner, columns = settings.choose((0, 32, 16), shape, shape)
    rows = settings.choose(2, ROWS, ROWS) * len(KINDS)
    generator = settings.generator("detection", mode, shape, distribution)
    total: Counts = {}
    for _ in range(_products(shape, settings)):
        a, b = DISTRIBUTIONS[distribution](rows, inner, columns, torch.bfloat16, generator)
        for key, rate in count_detected(a, b, mode, generator).items():
            before = total.get(key, Rate(0, 0))
            total[key] = Rate(before.count + rate.count, before.trials + rate.trials)
        progress.advance(_work(shape))
    for bit in DETECTION_BITS:
        yield _row(mode, shape, distribution, bit, total)


def _products(shape: Shape, settings: Settings) -> int:
    """Return how many products to measure; fewer for the largest sizes."""
    return settings.choose(1, 4, 40) if shape[0] > ROWS else settings.choose(1, 10, 100)


def _work(shape: Shape) -> float:
    return float(shape[1] * (ROWS * len(KINDS) + shape[2]))


def _row(mode: str, shape: Shape, distribution: str, bit: int, counts: Counts) -> Row:
    rates = {
        f"{name} {direction}": counts[bit, was_set, name]
        for direction, was_set in DIRECTIONS.items()
        for name in MEMBERS
    }
    return Row.of_rates(
        f"detected flips, %, verified {mode}",
        {"M, K, N": str(shape), "distribution": distribution, "bit": bit},
        rates,
        detection(shape, distribution, bit) if mode == "offline" else {},
    )


def _verdict(rows: list[Row]) -> str:
    """Check that ours detects at least what the paper says of V-ABFT, in every cell."""
    ours = "rounding 0→1"
    worse = [
        row
        for row in rows
        if ours in row.published and row.intervals[ours][1] < (row.published[ours].value or 0.0)
    ]
    return f"`rounding` is below the paper's rate in {dict(worse[0].case)}" if worse else ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Draw a panel for each case: detection by bit, offline solid and online dotted."""
    cases = list(dict.fromkeys((row.case["M, K, N"], row.case["distribution"]) for row in rows))
    grid = figure.subplots(2, 4, sharex=True, sharey=True)
    for axes, case in zip(grid.flat, cases, strict=True):
        for name, colour in zip(MEMBERS, ("tab:red", "tab:blue"), strict=True):
            for mode, style in (("offline", "o-"), ("online", ":")):
                chosen = [
                    row
                    for row in rows
                    if (row.case["M, K, N"], row.case["distribution"]) == case
                    and row.table.endswith(mode)
                ]
                label = f"{name} {mode}"
                line(axes, chosen, "bit", f"{name} 0→1", style, label=label, color=colour)
        axes.set_title(f"{case[0]}\n{case[1]}", fontsize="small")
        axes.set(xlabel="bit", ylabel="detected 0→1, %")
        axes.label_outer()
    grid.flat[0].legend(fontsize="x-small")


STUDY = Study(
    name="vabft.detection",
    paper="V-ABFT, sections 6.5 and 6.6, tables 8 and 9",
    reproduces="share of single bit flips of a bf16 product that are seen, by bit, before and "
    "after it is rounded",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

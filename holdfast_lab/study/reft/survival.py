"""``reft.survival``: survival of in-memory snapshots and of unprotected state (figure 8)."""

from collections.abc import Callable, Iterator

import torch

from holdfast.inject.statistics import wilson_interval
from holdfast.planner.survival import Survival
from holdfast_lab.study.reft import paper
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study

DAYS = f"days until survival is {paper.THRESHOLD:g}"
READ = "the same, read off curves sampled every so many days"
NODES = "the same, if the 8 GPUs of a node are lost together"
SIMULATED = "survival on the day when the formula says so"
SNAPSHOTS, CHECKPOINTS = "1 parity, days", "checkpoints, days"
TWO, TIMES = "2 parities, days", "1 parity / checkpoints"
FORMULA, SHARE = "formula", "simulated"
GPUS_OF_A_NODE = 8
# A year in 720 points. Any spacing of 16.22 / m days with m from 30 to 36 gives the same values.
SPACING_DAYS = 365 / 720
_SIX_SIGMA = 6.0


def fleet(shape: float, nodes: int = paper.GPUS) -> Survival:
    """Return figure 8's fleet with this number of nodes; a node is lost with any of its GPUs."""
    each = paper.GPUS / nodes
    return Survival(nodes, paper.DP_PATHS, each * paper.HARDWARE, each * paper.SOFTWARE, shape)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    fleets = settings.choose(200, 4000, 40_000)
    progress.begin(float(2 * len(paper.SHAPES)))
    for shape in paper.SHAPES:
        yield _days(DAYS, shape, fleet(shape))
    yield _read_off()
    for shape in paper.SHAPES:
        nodes = paper.GPUS // GPUS_OF_A_NODE
        yield _days(NODES, shape, fleet(shape, nodes), compared=False)
    for shape in paper.SHAPES:
        for parities in (1, 2):
            yield _simulated(shape, parities, fleets, settings)
            progress.advance(1)


def _days(table: str, shape: float, model: Survival, compared: bool = True) -> Row:
    one = model.time_with_snapshots(paper.THRESHOLD)
    none = model.time_with_checkpoints(paper.THRESHOLD)
    two = model.time_with_snapshots(paper.THRESHOLD, parities=2)
    measured = {SNAPSHOTS: one, CHECKPOINTS: none, TWO: two, TIMES: one / none}
    case: Case = {"shape c": f"{shape:g}"}
    if shape != paper.READ_SHAPE or not compared:
        return Row(table, case, measured)
    published = {SNAPSHOTS: paper.SNAPSHOT_DAYS, CHECKPOINTS: paper.CHECKPOINT_DAYS}
    return Row(table, case, measured, published, f"{one:.4f} and {none:.4f} days")


def _read_off() -> Row:
    model = fleet(paper.READ_SHAPE)
    measured = {
        SNAPSHOTS: first_below(model.with_snapshots, SPACING_DAYS),
        CHECKPOINTS: first_below(model.with_checkpoints, SPACING_DAYS),
    }
    published = dict(zip((SNAPSHOTS, CHECKPOINTS), paper.READ_OFF, strict=True))
    case: Case = {"shape c": f"{paper.READ_SHAPE:g}", "spacing, days": f"{SPACING_DAYS:.3f}"}
    return Row(READ, case, measured, published, "our guess; the paper does not say how it read")


def first_below(survival: Callable[[float], float], spacing: float) -> float:
    """Return the first of the equally spaced days on which survival is below the threshold."""
    count = 0
    while survival(count * spacing) >= paper.THRESHOLD:
        count += 1
    return count * spacing


def _simulated(shape: float, parities: int, fleets: int, settings: Settings) -> Row:
    """Simulate lifetimes from the Weibull distribution, without any equation of survival."""
    model = fleet(shape)
    day = model.time_with_snapshots(paper.THRESHOLD, parities)
    generator = settings.generator("fleets", shape, parities)
    survived = sum(_survives(model, day, parities, generator) for _ in range(fleets))
    case: Case = {"shape c": f"{shape:g}", "parities": parities, "fleets": fleets}
    measured = {
        "day": day,
        FORMULA: model.with_snapshots(day, parities),
        SHARE: survived / fleets,
    }
    return Row(SIMULATED, case, measured, intervals={SHARE: wilson_interval(survived, fleets)})


def _survives(model: Survival, day: float, parities: int, generator: torch.Generator) -> bool:
    """Return whether no group of a fleet has lost more nodes than its parities rebuild."""
    unit = torch.empty(model.nodes, dtype=torch.float64).exponential_(generator=generator)
    lifetimes = (unit / model.hardware) ** (1 / model.shape)
    lost = (lifetimes <= day).view(-1, model.group).sum(1)
    return bool(lost.max() <= parities)


def _verdict(rows: list[Row]) -> str:
    """Check that parity prolongs survival at every shape and that formula and simulation agree."""
    for row in rows:
        if row.table in (DAYS, NODES):
            none, one, two = (row.measured[name] for name in (CHECKPOINTS, SNAPSHOTS, TWO))
            if not none < one < two:
                return f"parity does not prolong survival: {dict(row.measured)}"
        elif row.table == SIMULATED:
            expected, count = row.measured[FORMULA], int(row.case["fleets"])
            sigma = (expected * (1 - expected) / count) ** 0.5
            if abs(row.measured[SHARE] - expected) > _SIX_SIGMA * sigma:
                return f"the formula is not what is simulated: {dict(row.measured)}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot figure 8 with its threshold and two printed days, and curves for two parities."""
    axes = figure.subplots()
    days = [0.02 * 1.02**index for index in range(530)]
    for row, colour in zip([row for row in rows if row.table == DAYS], range(4), strict=True):
        model = fleet(float(row.case["shape c"]))
        curves = {
            ("checkpoints", ":"): [model.with_checkpoints(day) for day in days],
            ("1 parity", "-"): [model.with_snapshots(day) for day in days],
            ("2 parities", "--"): [model.with_snapshots(day, 2) for day in days],
        }
        for (name, style), curve in curves.items():
            label = f"c = {row.case['shape c']}, {name}"
            axes.plot(days, curve, f"C{colour}{style}", label=label)
    for printed in (paper.CHECKPOINT_DAYS, paper.SNAPSHOT_DAYS):
        assert printed.value is not None
        axes.plot(printed.value, paper.THRESHOLD, "k*", label=f"the paper's {printed.text} days")
    axes.axhline(paper.THRESHOLD, color="black", linewidth=0.6)
    axes.set(xscale="log", xlabel="days", ylabel="probability that the state survives")
    axes.legend(fontsize="x-small")


STUDY = Study(
    name="reft.survival",
    paper="REFT, section 5, figure 8",
    reproduces="how long state survives failures with snapshots and parity, and with checkpoints "
    "alone, on 3,072 GPUs in groups of 6",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

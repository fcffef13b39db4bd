"""``sdc.abft``: which detectors find the errors of unhealthy nodes (appendix D, figure 10).

The paper verified all linear layers in fp32 by checksums with the norm-wise bound of its equation
6, which detected next to nothing. Here the wrong values of each node are injected into products as
wide as the paper's, which are verified with every threshold. In a small model, where bounds are
tighter, four more detectors are measured: the limit for extreme values, the statistics of loss and
gradient norm, a repetition on the device itself, and a healthy shadow. Errors that repeat bit for
bit are a case of their own.
"""

from collections.abc import Iterator
from itertools import product as every

from holdfast import events
from holdfast.abft.thresholds import REGISTRY
from holdfast.inject.statistics import Rate
from holdfast_lab.emulation.device import Rhythm, UnhealthyDevice
from holdfast_lab.emulation.profile import NODES, node_profile
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.layers import LAYERS, RERUN, SHADOW, Bench, Caught, Checked, checked
from holdfast_lab.study.sdc.subjects import DEEP, SMALL, TINY, Size, Trainee, device_for
from holdfast_lab.study.sdc.wide import Wide

WIDE, LINES = "struck products of the paper's width seen, %", "line / rms of the product"
CLEAN_ROWS, HEALTHY = "clean rows of it flagged", "products flagged, healthy"
FAULTS, STEPS = "faults seen, %", "faulty steps seen, %"
REPEATED = "faulty steps seen, %, errors that repeat"
PAPERS, OURS = "norm", "rounding"
PAPER_WIDTH = 4096
WARM_UP_STEPS = 12  # steps before the spike statistics flag anything
WRONG_PER_STEP = 2.0


def _device(trainee: Trainee, node: int, seed: int, *, persistent: bool) -> UnhealthyDevice:
    return device_for(
        trainee.model,
        trainee.size,
        node,
        seed,
        WRONG_PER_STEP,
        persistent=persistent,
        start_step=0,
        rhythm=Rhythm(1, 1),  # errs in every step, as within a burst
    )


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, SMALL, DEEP)
    steps, healthy_steps = settings.choose(2, 20, 200), settings.choose(1, 10, 100)
    progress.begin(float(2 + WARM_UP_STEPS + steps))
    yield from _wide(settings)
    progress.advance(1)
    yield _healthy(size, healthy_steps, settings.seed)
    progress.advance(1)
    trainee = Trainee(size, seed=settings.seed, data_seed=settings.seed)
    bench, found = Bench(trainee), {key: Caught() for key in every(NODES, (False, True))}
    devices = [
        (_device(trainee, node, settings.seed, persistent=persistent), caught)
        for (node, persistent), caught in found.items()
    ]
    for step in range(WARM_UP_STEPS + steps):
        bench.step(step, devices if step >= WARM_UP_STEPS else ())
        progress.advance(1)
    events.clear()
    yield from (_faults(node, found[node, False]) for node in NODES)
    yield from (_steps(STEPS, node, found[node, False]) for node in NODES)
    yield from (_steps(REPEATED, node, found[node, True]) for node in NODES)


def _wide(settings: Settings) -> Iterator[Row]:
    rows, width = settings.choose((8, 64), (128, PAPER_WIDTH), (512, PAPER_WIDTH))
    calls = settings.choose(4, 40, 400)
    product = Wide.make(rows, width, settings.generator("wide"))
    shape: Case = {"rows": rows, "width": width}
    false = {name: float(count) for name, count in product.false_alarms().items()}
    yield Row(LINES, shape, product.lines())
    yield Row(CLEAN_ROWS, shape, false, {PAPERS: paper.NO_FALSE_FLAG})
    for node in NODES:
        draw = settings.generator("wide", node)
        rates = product.seen(node_profile(node), calls, draw)
        published = {PAPERS: paper.abft_flags(node)}
        yield _row(WIDE, {"node": node, "products": calls}, rates, published)


def _healthy(size: Size, steps: int, seed: int) -> Row:
    """Count the false alarms of the thresholds on a healthy device."""
    trainee, found = Trainee(size, seed=seed, data_seed=seed), Checked()
    for step in range(steps):
        with checked(trainee.model, found):
            trainee.gradients(step)
        trainee.update()
    case: Case = {"steps": steps, "products": found.products, "rows": found.rows}
    measured = {name: float(flags.products) for name, flags in found.flags.items()}
    return Row(HEALTHY, case, measured, {PAPERS: paper.NO_FALSE_FLAG})


def _faults(node: int, caught: Caught) -> Row:
    rates = {layer: Rate(caught.faults_by[layer], caught.faults) for layer in LAYERS}
    case: Case = {"node": node, "faults": caught.faults, "inside matmuls": caught.inside}
    return _row(FAULTS, case, rates, {})


def _steps(table: str, node: int, caught: Caught) -> Row:
    rates = {layer: Rate(caught.steps_by[layer], caught.steps) for layer in LAYERS}
    case: Case = {"node": node, "steps": caught.steps, "gradient wrong": caught.changed_steps}
    return _row(table, case, rates, {})


def _row(table: str, case: Case, rates: dict[str, Rate], published: paper.Values) -> Row:
    known = any(rate.trials for rate in rates.values())
    return Row.of_rates(table, case, rates, published, "" if known else "not struck")


def _verdict(rows: list[Row]) -> str:
    """Check that ours has no false alarm and that a shadow rank detects every wrong gradient."""
    for row in rows:
        if row.table in (HEALTHY, CLEAN_ROWS) and row.measured[OURS]:
            return f"`{OURS}`: {row.measured[OURS]:.0f} {row.table}"
        if row.table in (STEPS, REPEATED) and row.measured:
            seen = round(row.measured[SHADOW] * int(row.case["steps"]) / 100)
            if seen != row.case["gradient wrong"]:
                return f"a shadow misses wrong gradients of node {row.case['node']}"
        if row.table == REPEATED and row.measured.get(RERUN):
            return f"node {row.case['node']} was to repeat its errors, and did not"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Draw the shares of faults and of steps that each detector finds, by node."""
    tables = (WIDE, FAULTS, STEPS, REPEATED)
    for axes, table in zip(figure.subplots(4, 1, sharex=True), tables, strict=True):
        chosen = [row for row in rows if row.table == table and row.measured]
        for number, layer in enumerate(LAYERS):
            style = f"C{number}{'o-' if layer in (PAPERS, OURS, RERUN, SHADOW) else '.:'}"
            if table != WIDE or layer in REGISTRY:
                line(axes, chosen, "node", layer, style, markersize=4)
        axes.set_title(table, fontsize="small")
    axes.set(xlabel="node")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")


STUDY = Study(
    name="sdc.abft",
    paper="SDC study, appendix D, figure 10",
    reproduces="checksums with a norm-wise bound miss what unhealthy nodes do; which of our layers "
    "sees how much of it",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

"""``attnchecker.frequencies``: overhead with adaptive frequencies by error rate (figure 10)."""

from collections.abc import Iterator
from itertools import pairwise

from holdfast.planner.attention import SECTIONS, AttentionSize, CheckCosts, modelled_costs
from holdfast.planner.frequencies import (
    ErrorRates,
    FrequencyPlan,
    bearable_factor,
    plan_frequencies,
    sections_of,
)
from holdfast.planner.vulnerability import published
from holdfast_lab.study.attnchecker.paper import (
    ADAPTIVE_BY_INPUT,
    ADAPTIVE_OVERHEAD,
    CHECKS_SET_IN,
    FREQUENCY_RATES,
    FREQUENCY_TARGET,
)
from holdfast_lab.study.attnchecker.section_costs import measured_costs, work
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study

MODEL, BATCH, LENGTH = "bert-base", 16, 128
RATE = "errors of each type per 1e25 flops"
OVERHEAD, FAILURES, ALL = "overhead of the step, %", "failures / target", "with all checks, %"
ONSET = "where checks set in"
PRINTED = "target of 1e-11, as printed; the paper's overhead of checks"
ANCHORED = "target that needs checks from 13 on; the paper's overhead of checks"
MEASURED = "target that needs checks from 13 on; checks timed on this machine"
_ROUNDING = 1e-9


def rates_of(rate: float) -> ErrorRates:
    """Return the rates for a number of errors of each type per 1e25 flops."""
    return ErrorRates(rate / 1e25, rate / 1e25, rate / 1e25)


def plan_of(size: AttentionSize, rate: float, costs: CheckCosts, target: float) -> FrequencyPlan:
    """Plan the frequencies of BERT's attention for an error rate."""
    return plan_frequencies(sections_of(size, rates_of(rate), published(MODEL), costs), target)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    pairs = settings.choose(2, 15, 100)
    progress.begin(work(pairs))
    size = AttentionSize.of_model(MODEL, BATCH, LENGTH)
    timed = AttentionSize.of_model(
        MODEL, settings.choose(1, 8, BATCH), settings.choose(8, 128, 128)
    )
    theirs = modelled_costs(size)
    ours = measured_costs(timed, pairs, settings.generator("costs"), progress)
    first = FREQUENCY_RATES[0]
    anchor = plan_of(size, first, theirs, FREQUENCY_TARGET).unchecked_failure
    yield from _onset_rows(size, anchor)
    yield from _table(PRINTED, size, theirs, FREQUENCY_TARGET)
    yield from _table(ANCHORED, size, theirs, anchor)
    timed_anchor = plan_of(timed, first, ours, FREQUENCY_TARGET).unchecked_failure
    yield from _table(MEASURED, timed, ours, timed_anchor)


def _onset_rows(size: AttentionSize, anchor: float) -> Iterator[Row]:
    for name, target in (("as printed", FREQUENCY_TARGET), ("from 13 on", anchor)):
        factor = bearable_factor(size, rates_of(1.0), published(MODEL), target, 0.0)
        case: Case = {"target": f"{name}: {target:.3g}"}
        # The second factor is 13 by construction, so that it is not compared.
        compared = {RATE: CHECKS_SET_IN} if target == FREQUENCY_TARGET else {}
        yield Row(ONSET, case, {RATE: factor}, compared)


def _table(table: str, size: AttentionSize, costs: CheckCosts, target: float) -> Iterator[Row]:
    for rate in FREQUENCY_RATES:
        plan = plan_of(size, rate, costs, target)
        measured = {
            OVERHEAD: 100 * plan.cost / costs.step,
            ALL: 100 * plan.full_cost / costs.step,
            **plan.frequencies,
            FAILURES: plan.failure / target,
        }
        compared = ADAPTIVE_OVERHEAD if table == MEASURED else ADAPTIVE_BY_INPUT
        yield Row(table, {RATE: rate}, measured, {OVERHEAD: compared})


def _verdict(rows: list[Row]) -> str:
    """Check that plans meet their targets, and cost at most all checks and more at higher rates."""
    for table in (PRINTED, ANCHORED, MEASURED):
        chosen = [row.measured for row in rows if row.table == table]
        for one in chosen:
            if one[FAILURES] > 1 + _ROUNDING or one[OVERHEAD] > one[ALL] * (1 + _ROUNDING):
                return f"a plan misses its target or costs more than all checks: {dict(one)}"
        if any(low[OVERHEAD] > high[OVERHEAD] + _ROUNDING for low, high in pairwise(chosen)):
            return f"more errors cost less: {table}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the overhead of the three tables, and the frequencies of the second."""
    left, right = figure.subplots(1, 2)
    for table, style in ((PRINTED, "o-"), (ANCHORED, "s-"), (MEASURED, "^-")):
        chosen = [row for row in rows if row.table == table]
        label = table.replace("; ", ";\n")
        line(left, chosen, RATE, OVERHEAD, style, label=label, markersize=4)
        if table == ANCHORED:
            for name in SECTIONS:
                line(right, chosen, RATE, name, "o-")
    left.axhline(
        ADAPTIVE_OVERHEAD.range.high, color="black", linewidth=0.8, label="the paper's most"
    )
    left.set(xlabel=RATE, ylabel=OVERHEAD)
    right.set(xlabel=RATE, ylabel="frequency", title="of the second", ylim=(-0.05, 1.05))
    left.legend(fontsize="x-small")
    right.legend()


STUDY = Study(
    name="attnchecker.frequencies",
    paper="ATTNChecker, section 5.4, figure 10",
    reproduces="overhead when each section of attention is checked as often as a target needs, "
    "over the error rate",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

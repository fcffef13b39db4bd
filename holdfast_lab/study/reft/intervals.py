"""``reft.intervals``: the best interval between saves, by appendix A and by exhaustive search."""

from collections.abc import Iterator
from math import expm1, sqrt

from holdfast.planner.intervals import (
    every,
    interval_s,
    memory_loss_rate,
    overhead,
    several_failures,
)
from holdfast_lab.study.plots import line
from holdfast_lab.study.reft import paper
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study, watched

LEAST = "the best time between saves: equation 5 against every number of steps"
LOSS = "more nodes lost than one parity rebuilds: equation 7 in doubles"
UNIT = "more nodes lost than one parity rebuilds: equation 7 by its unit of time"
PERSIST = "checkpoints behind snapshots: equation 11 against equation 10"
STALLS_S = (0.01, 1.0, 10.0, paper.MEGATRON_CHECKPOINT_S, 600.0)
MTTFS_H = (1, 24, 240)
STEP_S = 2.0
CHOSEN, TRIED, AT_5 = "equation 5, steps", "all tried, steps", "equation 4, %"
FIRST_ORDER, TRUE = "at (5) / least, by (4)", "at (5) / least, exactly"
STABLE, RATIO = "ours", "as printed / ours"
PROBABILITIES = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)
GROUPS = (2, 4, 6, 8, 16, 64)
_DAY_S, _WINDOW_S, _MTTF_S = 86_400.0, 300.0, 30 * 86_400.0


def exact_overhead(interval: float, save: float, rate: float) -> float:
    """Return the loss per second of training with exponential failures that occur at any time.

    A period of work and its save is repeated after each failure, so that it takes ``(e^{λ (T + O)}
    − 1) / λ`` on average. Restarts add the same to all intervals.
    """
    return expm1(rate * (interval + save)) / (rate * interval) - 1


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    most = settings.choose(20_000, 400_000, 4_000_000)
    cases = [(stall, mttf) for mttf in MTTFS_H for stall in STALLS_S]
    for stall, mttf_h in watched(cases, progress):
        yield _least(stall, mttf_h, most)
    for nodes in (2, paper.DP_PATHS, 64):
        for probability in PROBABILITIES:
            yield _cancelled(nodes, probability)
    yield from _units()
    for nodes in GROUPS:
        yield _persisted(nodes)


def _least(stall: float, mttf_h: int, most: int) -> Row:
    rate = 1 / (3600.0 * mttf_h)
    chosen = every(stall, STEP_S, 1 / rate)
    count = min(most, 8 * chosen + 8)

    def first_order(steps: int) -> float:
        return overhead(steps * STEP_S, stall, 0.0, rate)

    def exact(steps: int) -> float:
        return exact_overhead(steps * STEP_S, stall, rate)

    tried = min(range(1, count + 1), key=first_order)
    truly = min(range(1, count + 1), key=exact)
    measured = {
        CHOSEN: chosen,
        TRIED: tried,
        AT_5: 100 * first_order(chosen),
        FIRST_ORDER: first_order(chosen) / first_order(tried),
        "exactly best, steps": truly,
        TRUE: exact(chosen) / exact(truly),
    }
    published = {FIRST_ORDER: paper.LEAST_BY_EQUATION_4, TRUE: paper.LEAST_IN_TRUTH}
    case: Case = {"stall, s": f"{stall:g}", "MTTF of the job, h": mttf_h}
    return Row(LEAST, case, measured, published)


def _cancelled(nodes: int, probability: float) -> Row:
    q = 1 - probability
    printed = 1 - q**nodes - nodes * probability * q ** (nodes - 1)
    ours = several_failures(probability, nodes)
    measured = {STABLE: ours, "as printed": printed, RATIO: printed / ours}
    case: Case = {"nodes": nodes, "λ": f"{probability:g}"}
    return Row(LOSS, case, measured, {RATIO: paper.LOSS_PROBABILITY})


def _units() -> Iterator[Row]:
    units = {"second": 1.0, "5 minutes": _WINDOW_S, "hour": 3600.0, "day": _DAY_S}
    rates = {
        f"(7), λ per {name}": several_failures(unit_s / _MTTF_S, paper.DP_PATHS) / unit_s
        for name, unit_s in units.items()
    }
    rates["ours"] = memory_loss_rate(1 / _MTTF_S, paper.DP_PATHS, 1, _WINDOW_S)
    for name, rate in rates.items():
        case: Case = {
            "rate": name,
            "nodes": paper.DP_PATHS,
            "MTTF of a node, days": round(_MTTF_S / _DAY_S),
            "until rebuilt, min": round(_WINDOW_S / 60),
        }
        yield Row(UNIT, case, {"losses a year": rate * 365 * _DAY_S})


def _persisted(nodes: int) -> Row:
    losses = {r: several_failures(paper.HARDWARE, nodes, r) for r in (1, 2) if r < nodes}
    times = {f"λ_re, {r} parit{'y' if r == 1 else 'ies'}": loss for r, loss in losses.items()}
    longer = {
        f"T_re_ckpt / T_ckpt, {r}": interval_s(1.0, loss) / interval_s(1.0, paper.HARDWARE)
        for r, loss in losses.items()
    }
    return Row(PERSIST, {"nodes": nodes, "λ": f"{paper.HARDWARE:g}"}, times | longer)


def _verdict(rows: list[Row]) -> str:
    """Check that no interval beats ours by equation 4, and none by much in truth."""
    for row in rows:
        if row.table != LEAST:
            continue
        if row.measured[FIRST_ORDER] > 1 + 1e-12:
            return f"another interval is better: {dict(row.case)}, {dict(row.measured)}"
        rare = sqrt(2 * float(row.case["stall, s"]) / (3600 * int(row.case["MTTF of the job, h"])))
        if row.measured[TRUE] > 1 + rare:
            return f"equation 4 misleads: {dict(row.case)}, {dict(row.measured)}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the overhead over the interval, to first order and exact, and the rarer checkpoints."""
    left, right = figure.subplots(1, 2)
    rate = 1 / (3600.0 * MTTFS_H[1])
    intervals = [2.0 * 1.05**index for index in range(220)]
    for colour, stall in enumerate(STALLS_S):
        curve = [100 * overhead(interval, stall, 0.0, rate) for interval in intervals]
        left.plot(intervals, curve, f"C{colour}", label=f"O_save = {stall:g} s")
        exact = [100 * exact_overhead(interval, stall, rate) for interval in intervals]
        left.plot(intervals, exact, f"C{colour}:")
    for row in rows:
        if row.table == LEAST and row.case["MTTF of the job, h"] == MTTFS_H[1]:
            left.plot(row.measured[CHOSEN] * STEP_S, row.measured[AT_5], "k*")
    title = f"one failure in {MTTFS_H[1]} h; dotted: exact; stars: (5)"
    left.set(xscale="log", yscale="log", ylim=(0.01, 200), title=title)
    left.set(xlabel="time between saves, s", ylabel="overhead, %")
    left.legend(fontsize="small")
    for parities in (1, 2):
        name = f"T_re_ckpt / T_ckpt, {parities}"
        found = [row for row in rows if row.table == PERSIST]
        label = f"{parities} parit{'y' if parities == 1 else 'ies'}"
        line(right, found, "nodes", name, "o-", label=label)
    right.set_xscale("log", base=2)
    right.set(yscale="log", xlabel="nodes of a group", ylabel="T_re_ckpt / T_ckpt")
    right.legend()


STUDY = Study(
    name="reft.intervals",
    paper="REFT, appendix A",
    reproduces="the interval at which saving and recomputing cost least, found by trying all, and "
    "how much rarer checkpoints may be behind snapshots with parity",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

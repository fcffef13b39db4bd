"""The plots of ``holdfast plan``: frequencies over error rates, fleets, and survival over days."""

from collections.abc import Callable, Sequence
from math import isfinite, sqrt
from pathlib import Path

import numpy as np

from holdfast.cli.plots import drawn
from holdfast.planner.attention import SECTIONS, CheckCosts
from holdfast.planner.detection import Looks
from holdfast.planner.fleet import LadderQuestion
from holdfast.planner.frequencies import ErrorRates, FrequencyPlan
from holdfast.planner.ladder import plan_checkpoints, plan_ladder
from holdfast.planner.survival import Survival

DEVICES = (*(2**power for power in range(17)), 100_000)
RATE_POINTS, DAY_POINTS = 200, 300
_DECADES_SHOWN = 2.0
_NEARLY_SURE, _HARDLY = 0.999, 0.02


def draw_frequencies(
    path: Path,
    plan_at: Callable[[float], FrequencyPlan],
    rates: ErrorRates,
    costs: CheckCosts,
    limits: tuple[float, float],
) -> None:
    """Draw frequencies, failures and overhead over the error rate (the axes of Figure 10).

    ``plan_at`` returns the plan for rates multiplied by a factor. The limits are the factors below
    which no checks are needed and above which none suffice. Overhead is a share of attention's time
    if that is known, else in seconds.
    """
    onset = limits[0]
    low, high = min(1.0, onset) / sqrt(10), max(1.0, onset) * sqrt(10)
    factors = np.geomspace(low, max(high, onset * 10**_DECADES_SHOWN), RATE_POINTS)
    plans = [plan_at(float(factor)) for factor in factors]
    per_1e25 = [factor * rates.total * 1e25 for factor in factors]
    unit, text = (costs.attention / 100, "% of attention") if costs.attention else (1.0, "s")
    with drawn(path, (7, 8)) as figure:
        top, middle, bottom = figure.subplots(3, 1, sharex=True)
        for name in SECTIONS:
            top.plot(per_1e25, [plan.frequencies[name] for plan in plans], label=name)
        middle.plot(per_1e25, [plan.unchecked_failure for plan in plans], "C7--", label="no checks")
        middle.plot(per_1e25, [plan.failure for plan in plans], "C0", label="planned")
        middle.axhline(plans[0].target, color="black", linewidth=0.8, label="target")
        bottom.plot(per_1e25, [plan.cost / unit for plan in plans], "C0", label="planned")
        bottom.axhline(plans[0].full_cost / unit, color="C7", linestyle="--", label="all checks")
        for axes in (top, middle, bottom):
            axes.axvline(rates.total * 1e25, color="C3", linestyle=":", label="these rates")
            axes.legend(fontsize="small")
        top.set(ylabel="frequency", ylim=(-0.05, 1.05))
        middle.set(ylabel="failures an execution", yscale="log")
        x_label = "errors per 1e25 flops, all types"
        bottom.set(ylabel=f"overhead, {text}", xscale="log", xlabel=x_label)


def draw_fleets(path: Path, question: LadderQuestion, looks: Looks) -> None:
    """Draw hours lost and faults undetected over fleets of 1 to 100,000 devices.

    Nodes and groups of the other fleets are no larger than those of the question. Detectors run in
    the same shares of steps in all fleets, because the target is per device.
    """
    fleets = [question.resized(count) for count in sorted({*DEVICES, question.fleet.devices})]
    devices = [fleet.fleet.devices for fleet in fleets]
    ladder = [plan_ladder(fleet, looks).month for fleet in fleets]
    running = [plan_ladder(fleet, Looks(0, 0, 0)).month for fleet in fleets]
    alone = [plan_checkpoints(fleet).month for fleet in fleets]
    with drawn(path, (7, 7)) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        top.plot(devices, [month.lost_h for month in alone], "k--", label="checkpoints alone")
        top.plot(devices, [month.lost_h for month in ladder], "C0", label="ladder")
        undetected = "ladder, nothing detected"
        top.plot(devices, [month.lost_h for month in running], "C0:", label=undetected)
        bottom.plot(devices, [month.undetected_faults for month in alone], "k--")
        bottom.plot(devices, [month.undetected_faults for month in ladder], "C0")
        for axes in (top, bottom):
            axes.axvline(question.fleet.devices, color="black", linewidth=0.8)
            axes.set(xscale="log", yscale="log")
        top.set(ylabel="hours lost in a month of 730", title="expected; the line marks this fleet")
        bottom.set(xlabel="devices", ylabel="undetected silent faults a month")
        top.legend(fontsize="small")


def draw_survival(
    path: Path, curves: Survival, parities: Sequence[int], probability: float
) -> None:
    """Draw the survival of a fleet's state over days, for each number of parities (Figure 8).

    A line marks ``probability``, and the legend gives the day at which each curve falls to it.
    """
    ends = [curves.time_with_snapshots(_HARDLY, count) for count in parities]
    last = max([end for end in ends if isfinite(end)], default=1.0)
    days = np.geomspace(curves.time_with_checkpoints(_NEARLY_SURE), last, DAY_POINTS)
    with drawn(path, (8, 5)) as figure:
        axes = figure.subplots()
        for count in parities:
            reached = curves.time_with_snapshots(probability, count)
            name = {0: "no parity", 1: "1 parity"}.get(count, f"{count} parities")
            label = f"snapshots, {name}: {_shown(reached)}"
            axes.plot(days, [curves.with_snapshots(float(day), count) for day in days], label=label)
        reached = curves.time_with_checkpoints(probability)
        label = f"checkpoints: {_shown(reached)}"
        axes.plot(days, [curves.with_checkpoints(float(day)) for day in days], "k--", label=label)
        axes.axhline(probability, color="black", linewidth=0.8, linestyle=":")
        groups = f"{curves.nodes} nodes in groups of {curves.group}"
        axes.set(
            xscale="log",
            xlabel="days without another save",
            ylabel="probability that the state survives",
            ylim=(0, 1.02),
            title=f"{groups}, Weibull shape {curves.shape:g}",
        )
        axes.legend(fontsize="small", title=f"down to {probability:g} after")


def _shown(days: float) -> str:
    return f"{days:.3g} days" if isfinite(days) else "never"

"""The plot of a plan: frequencies, failures and overhead over the error rate (Figure 10's axes)."""

from collections.abc import Callable
from math import sqrt
from pathlib import Path

import numpy as np

from holdfast.cli.plots import save
from holdfast.planner.attention import SECTIONS, CheckCosts
from holdfast.planner.frequencies import ErrorRates, FrequencyPlan

POINTS = 200
_DECADES_SHOWN = 2.0


def draw(
    path: Path,
    plan_at: Callable[[float], FrequencyPlan],
    rates: ErrorRates,
    costs: CheckCosts,
    limits: tuple[float, float],
) -> None:
    """Draw the plans around the rate at which checks set in, and at the rates asked about.

    Args:
        path: a file of a format that matplotlib writes.
        plan_at: the plan at so many times the rates.
        rates: those asked about, not all 0.
        costs: in which unit overhead is shown: of attention, else in seconds.
        limits: factors below which no checks are needed and above which none suffice.

    Raises:
        ConfigError: the file cannot be written, with the reason.
    """
    from matplotlib.figure import Figure

    factors = _factors(limits)
    plans = [plan_at(float(factor)) for factor in factors]
    per_1e25 = [factor * rates.total * 1e25 for factor in factors]
    figure = Figure(figsize=(7, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    for name in SECTIONS:
        top.plot(per_1e25, [plan.frequencies[name] for plan in plans], label=name)
    middle.plot(per_1e25, [plan.unchecked_failure for plan in plans], "C7--", label="no checks")
    middle.plot(per_1e25, [plan.failure for plan in plans], "C0", label="planned")
    middle.axhline(plans[0].target, color="black", linewidth=0.8, label="target")
    unit, text = (costs.attention / 100, "% of attention") if costs.attention else (1.0, "s")
    bottom.plot(per_1e25, [plan.cost / unit for plan in plans], "C0", label="planned")
    bottom.axhline(plans[0].full_cost / unit, color="C7", linestyle="--", label="all checks")
    for axes in (top, middle, bottom):
        axes.axvline(rates.total * 1e25, color="C3", linestyle=":", label="these rates")
        axes.legend(fontsize="small")
    top.set(ylabel="frequency", ylim=(-0.05, 1.05))
    middle.set(ylabel="failures an execution", yscale="log")
    bottom.set(ylabel=f"overhead, {text}", xscale="log", xlabel="errors per 1e25 flops, all types")
    save(figure, path)


def _factors(limits: tuple[float, float]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """From below the asked rates and the onset of checks to two decades above the latter."""
    onset = limits[0]
    low, high = min(1.0, onset) / sqrt(10), max(1.0, onset) * sqrt(10)
    return np.geomspace(low, max(high, onset * 10**_DECADES_SHOWN), POINTS)

"""The plot of survival over days: checkpoints, and snapshots by their parities (Figure 8)."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np

from holdfast.cli.plots import save
from holdfast.planner.survival import Survival

POINTS = 300
_NEARLY_SURE, _HARDLY = 0.999, 0.02


def draw(path: Path, curves: Survival, parities: Sequence[int], probability: float) -> None:
    """Draw a fleet's curves, from where the first begins to fall to where the last has fallen.

    Args:
        path: a file of a format that matplotlib writes.
        curves: of the fleet, in days.
        parities: a curve for each.
        probability: marked, with the day at which each curve reaches it.

    Raises:
        ConfigError: the file cannot be written, with the reason.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    days = _days(curves, parities)
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
    save(figure, path)


def _days(
    curves: Survival, parities: Sequence[int]
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    ends = [curves.time_with_snapshots(_HARDLY, count) for count in parities]
    last = max([end for end in ends if isfinite(end)], default=1.0)
    return np.geomspace(curves.time_with_checkpoints(_NEARLY_SURE), last, POINTS)


def _shown(days: float) -> str:
    return f"{days:.3g} days" if isfinite(days) else "never"

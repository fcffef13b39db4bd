"""The plot of a plan over fleets of 1 to 100,000 devices: hours lost, faults undetected."""

from pathlib import Path

from holdfast.cli.plots import save
from holdfast.planner.detection import Looks
from holdfast.planner.fleet import LadderQuestion
from holdfast.planner.ladder import plan_checkpoints, plan_ladder

DEVICES = (*(2**power for power in range(17)), 100_000)


def draw(path: Path, question: LadderQuestion, looks: Looks) -> None:
    """Draw the plan and checkpoints alone, for this fleet and for others of the same devices.

    Args:
        path: a file of a format that matplotlib writes.
        question: about a fleet; others have nodes and groups of at most its sizes.
        looks: of the detectors, which do not depend on the size of the fleet, as the target does
            not either.

    Raises:
        ConfigError: the file cannot be written, with the reason.
    """
    from matplotlib.figure import Figure

    fleets = [question.resized(count) for count in sorted({*DEVICES, question.fleet.devices})]
    devices = [fleet.fleet.devices for fleet in fleets]
    ladder = [plan_ladder(fleet, looks).month for fleet in fleets]
    running = [plan_ladder(fleet, Looks(0, 0, 0)).month for fleet in fleets]
    alone = [plan_checkpoints(fleet).month for fleet in fleets]
    figure = Figure(figsize=(7, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(devices, [month.lost_h for month in alone], "k--", label="checkpoints alone")
    top.plot(devices, [month.lost_h for month in ladder], "C0", label="ladder")
    top.plot(devices, [month.lost_h for month in running], "C0:", label="ladder, nothing detected")
    bottom.plot(devices, [month.undetected_faults for month in alone], "k--")
    bottom.plot(devices, [month.undetected_faults for month in ladder], "C0")
    for axes in (top, bottom):
        axes.axvline(question.fleet.devices, color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log")
    top.set(ylabel="hours lost in a month of 730", title="expected; the line marks this fleet")
    bottom.set(xlabel="devices", ylabel="undetected silent faults a month")
    top.legend(fontsize="small")
    save(figure, path)

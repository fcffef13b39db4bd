"""``sdc.gradients``: the noise of the gradients of a step on an unhealthy node (figure 5).

Parameters are synchronised: a healthy device and each node compute every step from the same
weights. The paper prints no frequencies for this setting, only that they are higher than in
lock-step. Here every node has at least one wrong value in a step, on average over its bursts. The
noise is measured twice: with errors bounded by the corrupted tensor's rms, and with errors in
proportion to the corrupted values, as large as the severities of table 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, isfinite

import torch

from holdfast import events
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import NODES, NodeProfile
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study, watched
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.subjects import DEEP, SMALL, TINY, Trainee, device_for, distance, norm

CURVES, NODE, ALL = "gradient noise, ‖g' − g‖₂", "worst noise-to-signal ratio", "all nodes"
WCNTS, LITERAL = "WCNTS", "WCNTS, errors in proportion"
PAPER_STEPS = 2500
WRONG_PER_STEP = 1.0


@dataclass
class Noise:
    """A node's device, and ‖g' − g‖₂ of each step; INF if a gradient is not finite."""

    device: UnhealthyDevice
    norms: list[float] = field(default_factory=list)

    def of_step(self, trainee: Trainee, step: int, healthy: list[torch.Tensor]) -> float:
        """Compute ‖g' − g‖₂ of a step, which is 0 if the device does not err in it."""
        if not self.device.due(step):
            return 0.0
        with self.device:
            trainee.gradients(step)
        return distance(trainee.grads(), healthy)

    def ratio(self, signal: list[float]) -> float:
        """Return the largest ratio of noise to signal of all steps."""
        pairs = zip(self.norms, signal, strict=True)
        return max(
            (noise / of if isfinite(noise) else inf) if noise else 0.0 for noise, of in pairs
        )


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size, steps = settings.choose(TINY, SMALL, DEEP), settings.choose(10, 60, PAPER_STEPS)
    trainee = Trainee(size, seed=settings.seed, data_seed=settings.seed)
    bounded = [_noise(trainee, node, steps, settings.seed, 1.0) for node in NODES]
    literal = [_noise(trainee, node, steps, settings.seed, None) for node in NODES]
    again: list[float] = []
    signal: list[float] = []
    for step in watched(range(steps), progress):
        trainee.gradients(step)
        healthy = trainee.grads()
        signal.append(norm(healthy))
        for noise in (*bounded, *literal):
            noise.norms.append(noise.of_step(trainee, step, healthy))
        trainee.gradients(step)
        again.append(distance(trainee.grads(), healthy))
        trainee.update()
    events.clear()
    yield from _curves(bounded, signal, settings.choose(5, 5, 50))
    rows = [_row(*pair, signal) for pair in zip(bounded, literal, strict=True)]
    yield from rows
    yield _all(rows, max(again))


def _noise(trainee: Trainee, node: int, steps: int, seed: int, bound_rms: float | None) -> Noise:
    device = device_for(
        trainee.model,
        trainee.size,
        node,
        seed,
        WRONG_PER_STEP,
        step_scale=steps / PAPER_STEPS,
        bound_rms=bound_rms,
    )
    return Noise(device)


def _curves(noises: list[Noise], signal: list[float], window: int) -> Iterator[Row]:
    """Yield the largest values of each window of steps."""
    for end in range(window, len(signal) + 1, window):
        measured = {"gradient, ‖g‖₂": max(signal[end - window : end])}
        for noise in noises:
            measured[f"node {noise.device.node}"] = max(noise.norms[end - window : end])
        yield Row(CURVES, {"steps": end}, measured)


def _row(bounded: Noise, literal: Noise, signal: list[float]) -> Row:
    device = bounded.device
    noisy = [step for step, noise in enumerate(bounded.norms) if noise]
    measured = {
        WCNTS: bounded.ratio(signal),
        LITERAL: literal.ratio(signal),
        "noisy steps, %": 100 * len(noisy) / len(signal),
    }
    published = {WCNTS: paper.wcnts(device.profile)}
    case: Case = {"node": device.node, "steps": len(signal)}
    note = f"{device.struck} wrong values, {_times(device.profile, device)}"
    return Row(NODE, case, measured, published, note)


def _times(profile: NodeProfile, device: UnhealthyDevice) -> str:
    of = " assumed" if profile.assumed_frequency else ""
    return f"{device.rate_scale:.3g} times the{of} frequency"


def _all(rows: list[Row], again: float) -> Row:
    measured = {
        "largest WCNTS": max(row.measured[WCNTS] for row in rows),
        "healthy beside healthy": again,
        "nodes beyond 1 with errors in proportion": float(
            sum(row.measured[LITERAL] > 1 for row in rows)
        ),
    }
    published = {
        "largest WCNTS": paper.WORST_NODE,
        "healthy beside healthy": paper.NO_MISMATCH,
    }
    return Row(ALL, {"nodes": len(rows)}, measured, published)


def _verdict(rows: list[Row]) -> str:
    """Check that healthy gradients are bit-equal and that those of unhealthy nodes differ."""
    for row in rows:
        if row.table == ALL and row.measured["healthy beside healthy"]:
            return "two healthy devices have different gradients"
        if row.table == NODE and not row.measured[WCNTS]:
            return f"node {row.case['node']} leaves no noise"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the gradient norms by step, and each node's ratio together with the paper's."""
    curves, worst = figure.subplots(1, 2)
    chosen = [row for row in rows if row.table == CURVES]
    for name in chosen[0].measured:
        style = "k-" if name.startswith("gradient") else "-"
        line(curves, chosen, "steps", name, style, linewidth=1)
    curves.set(xlabel="step", ylabel="L2 norm", yscale="symlog")
    curves.set_yscale("symlog", linthresh=1e-8)
    curves.legend(fontsize="xx-small", ncols=2)
    nodes = [row for row in rows if row.table == NODE]
    numbers = [int(row.case["node"]) for row in nodes]
    line(worst, nodes, "node", WCNTS, "C0o", label="measured")
    paper_values = [row.published[WCNTS].value for row in nodes]
    worst.plot(numbers, paper_values, "kx", label="the paper's")
    worst.set(xlabel="node", ylabel=WCNTS, yscale="log", ylim=(1e-6, None))
    worst.legend(fontsize="small")


STUDY = Study(
    name="sdc.gradients",
    paper="SDC study, figure 5",
    reproduces="the gradients of a step on an unhealthy node deviate little from the true ones: at "
    "worst by 5.1 % of their norm",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

"""``sdc.drift``: weights trained on unhealthy nodes drift apart, but the loss does not (figure 6).

Each node trains a model of its own, and nothing is synchronised. A healthy device also trains a
model on the data in another order, which shows how far apart two good models are. Nodes err as in
``sdc.gradients``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from statistics import quantiles
from typing import TYPE_CHECKING

from holdfast import events
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import NODES
from holdfast_lab.study.plots import line
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.subjects import DEEP, SMALL, TINY, Size, Trainee, device_for, distance

if TYPE_CHECKING:
    import torch

CURVES, LOSSES, NODE, ALL = "parameter difference", "loss", "after all steps", "all nodes"
HEALTHY, SEED = "healthy", "another seed"
PAPER_STEPS = 2500
WRONG_PER_STEP = 1.0
BEFORE, END, LOSS = "largest before the onset", "parameter difference", "loss off / another seed's"


@dataclass
class Run:
    """A training: its losses, and its distance from the healthy one's parameters at each step."""

    losses: list[float]
    distances: list[float]
    device: UnhealthyDevice | None = None

    def largest_before_onset(self) -> float:
        """Return the largest distance in the steps before the device's first fault."""
        assert self.device is not None
        return max(self.distances[: self.device.start_step], default=0.0)

    def loss_off(self, healthy: "Run") -> float:
        """Return the mean |loss − healthy loss| of the last quarter of the steps."""
        last = len(self.losses) // 4
        pairs = zip(self.losses[-last:], healthy.losses[-last:], strict=True)
        return sum(abs(a - b) for a, b in pairs) / last


class Experiment:
    """Trainings on unhealthy nodes or in other data orders, each compared with a healthy one.

    The seed determines weights, data and devices.
    """

    def __init__(self, size: Size, steps: int, seed: int) -> None:
        self._size, self._steps, self._seed = size, steps, seed
        trainee = Trainee(size, seed=seed, data_seed=seed)
        self._trajectory: list[list[torch.Tensor]] = []
        losses = []
        for step in range(steps):
            losses.append(trainee.train(step))
            self._trajectory.append(trainee.parameters())
        self.healthy = Run(losses, [0.0] * steps)

    def again(self) -> Run:
        """Train a second time without faults."""
        return self._compared(self._trainee(self._seed))

    def another_seed(self) -> Run:
        """Train from the same weights on the data in another order."""
        return self._compared(self._trainee(self._seed + 1))

    def on(self, node: int) -> Run:
        """Train on an emulated unhealthy node."""
        trainee = self._trainee(self._seed)
        model, step_scale = trainee.model, self._steps / PAPER_STEPS
        device = device_for(
            model, self._size, node, self._seed, WRONG_PER_STEP, step_scale=step_scale
        )
        with device:
            run = self._compared(trainee)
        run.device = device
        return run

    def _trainee(self, data_seed: int) -> Trainee:
        return Trainee(self._size, seed=self._seed, data_seed=data_seed)

    def _compared(self, trainee: Trainee) -> Run:
        run = Run([], [])
        for step, reference in enumerate(self._trajectory):
            run.losses.append(trainee.train(step))
            run.distances.append(distance(trainee.parameters(), reference))
        return run


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size, steps = settings.choose(TINY, SMALL, DEEP), settings.choose(12, 120, PAPER_STEPS)
    progress.begin(float(len(NODES) + 3))
    experiment = Experiment(size, steps, settings.seed)
    progress.advance(1)
    runs = {HEALTHY: experiment.again(), SEED: experiment.another_seed()}
    progress.advance(2)
    for node in NODES:
        runs[f"node {node}"] = experiment.on(node)
        progress.advance(1)
    events.clear()
    yield from _curves(runs, settings.choose(4, 10, 50))
    yield from (_row(run, experiment.healthy, runs[SEED]) for run in runs.values() if run.device)
    yield _all(runs)


def _curves(runs: dict[str, Run], window: int) -> Iterator[Row]:
    """Yield the parameter differences after each window of steps, then the mean losses."""
    steps = len(runs[SEED].losses)
    ends = range(window, steps + 1, window)
    for end in ends:
        measured = {name: run.distances[end - 1] for name, run in runs.items()}
        yield Row(CURVES, {"steps": end}, measured)
    for end in ends:
        means = {name: sum(run.losses[end - window : end]) / window for name, run in runs.items()}
        yield Row(LOSSES, {"steps": end}, means)


def _row(run: Run, healthy: Run, seed: Run) -> Row:
    device = run.device
    assert device is not None
    measured = {
        END: run.distances[-1],
        "% of another seed's": 100 * run.distances[-1] / seed.distances[-1],
        LOSS: run.loss_off(healthy) / seed.loss_off(healthy),
    }
    published = {END: paper.DRIFTS, LOSS: paper.SAME_LOSS}
    if device.start_step:
        measured[BEFORE] = run.largest_before_onset()
        published[BEFORE] = paper.CLEAN_BEFORE_ONSET
    first = next((step for step, off in enumerate(run.distances) if off), None)
    note = f"{device.struck} wrong values, {device.rate_scale:.3g} times as frequent"
    note += f", differs from step {first} on" if first is not None else ""
    note += f", errs from step {device.start_step} on" if device.start_step else ""
    case: Case = {"node": device.node, "steps": len(run.losses)}
    return Row(NODE, case, measured, published, note)


def _all(runs: dict[str, Run]) -> Row:
    """Compare the spread of the nodes' drifts with that of their numbers of wrong values."""
    devices = [(run, run.device) for run in runs.values() if run.device]
    drifts = quantiles([run.distances[-1] for run, _ in devices], n=4)
    struck = quantiles([float(device.struck) for _, device in devices], n=4)
    measured = {
        "drift, upper over lower quartile": drifts[2] / drifts[0] if drifts[0] else inf,
        "wrong values, upper over lower quartile": struck[2] / struck[0] if struck[0] else inf,
        "healthy beside healthy": runs[HEALTHY].distances[-1],
    }
    published = {
        "drift, upper over lower quartile": paper.SIMILAR_RATES,
        "healthy beside healthy": paper.NO_MISMATCH,
    }
    return Row(ALL, {"nodes": len(devices)}, measured, published)


def _verdict(rows: list[Row]) -> str:
    """Check that healthy runs are bit-equal, and unhealthy nodes too before their first error."""
    for row in rows:
        if row.measured.get("healthy beside healthy"):
            return "two healthy runs differ"
        if row.measured.get(BEFORE):
            return f"node {row.case['node']} errs before its onset"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    panels = figure.subplots(1, 2)
    for axes, table in zip(panels, (CURVES, LOSSES), strict=True):
        chosen = [row for row in rows if row.table == table]
        for name in chosen[0].measured:
            style = {SEED: "k--", HEALTHY: "k-"}.get(name, "-")
            line(axes, chosen, "steps", name, style, linewidth=1)
        axes.set(title=table, xlabel="step")
    panels[0].set_yscale("symlog", linthresh=1e-6)
    panels[1].legend(fontsize="xx-small", ncols=2)


STUDY = Study(
    name="sdc.drift",
    paper="SDC study, figure 6",
    reproduces="trained on an unhealthy node a model drifts away from the healthy one's weights, "
    "while its loss stays the same; node 13 only after its onset",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

"""``sdc.submodules``: frequency and severity of each node's errors (tables 1, 2, 6 to 9).

The trainer's GPT is trained on real text by healthy passes. Every node computes each step in
lock-step with them, so that the errors of each submodule are measured alone, by the measures of
``holdfast.replay``. The study measures the emulator of unhealthy devices: it should give what the
paper observed. Rare errors are made frequent by a factor, which is printed and by which results are
divided.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast import events
from holdfast.inject.statistics import Rate
from holdfast_lab.emulation.device import SPIKE_STEPS, UnhealthyDevice
from holdfast_lab.emulation.profile import (
    BURST_EVERY_STEPS,
    BURST_STEPS,
    LOCKSTEP,
    LOCKSTEP_STEPS,
    NODES,
    SUBMODULES,
    NodeProfile,
    node_profile,
)
from holdfast_lab.study.published import Published
from holdfast_lab.study.registry import (
    Case,
    Figure,
    Progress,
    Row,
    Settings,
    Study,
    watched,
)
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.lockstep import Found, Reference
from holdfast_lab.study.sdc.subjects import DEEP, FULL, TINY, Size, Trainee

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FREQUENCY, SEVERITY, FIRST = "mismatch frequency", "worst severity", "the first steps"
SPIKES, SPIKING_NODES = "spikes over time", (7, 14)
LAYER_FREQUENCY, LAYER_SEVERITY = "mismatch frequency by layer", "worst severity by layer"
TRIPLE = "the instrument"
WANTED = 60  # mismatches of the rarest kind that a run should see
LARGEST_SHARE = 0.5  # of a call's values that may be wrong


class Suspect:
    """A node whose submodules are compared with a healthy model's, and the mismatches found.

    The run has as many steps as it takes to see the rarest errors.
    """

    def __init__(self, trainee: Trainee, node: int, steps: int, seed: int) -> None:
        self.profile = node_profile(node)
        values = trainee.size.call_values * trainee.size.model.layers * steps
        self.rate_scale = _rate_scale(self.profile, values)
        self.device = UnhealthyDevice(
            trainee.model,
            node=node,
            seed=seed,
            setting=LOCKSTEP,
            rate_scale=self.rate_scale,
            step_scale=steps / LOCKSTEP_STEPS,
            inside=1.0,  # two errors of one value would count as one larger error
            bound_rms=None,
        )
        self.first: Found = {}
        self.rest: Found = {}
        self.steps = self.quiet_steps = 0  # those without a mismatch of the first submodule

    def step(self, trainee: Trainee, reference: Reference, step: int) -> None:
        """Compute a step on the node, comparing each submodule with the healthy pass."""
        found = self.first if self.profile.start_spike and step < SPIKE_STEPS else self.rest
        before = self.rate(found, SUBMODULES[0]).count
        with reference.compared(found), self.device:
            trainee.gradients(step)
        self.steps += 1
        self.quiet_steps += self.rate(found, SUBMODULES[0]).count == before

    def rate(self, found: Found, submodule: str, layer: int | None = None) -> Rate:
        """Return the share of mismatching values in one layer or in all layers."""
        chosen = [m for (of, name), m in found.items() if name == submodule and layer in (None, of)]
        return Rate(sum(m.mismatches for m in chosen), sum(m.elements for m in chosen))

    def severity(self, submodule: str, layer: int | None = None) -> float:
        """Return the severity of the worst call of all steps."""
        both = [*self.first.items(), *self.rest.items()]
        return max(
            m.severity for (of, name), m in both if name == submodule and layer in (None, of)
        )


def _rate_scale(profile: NodeProfile, values: int) -> float:
    """Return a rate factor at which rare errors occur and frequent ones remain distinct."""
    printed = [value for value in profile.mean_frequency.values() if value]
    if not printed:
        return 1.0
    burst = 1 if profile.steady else BURST_EVERY_STEPS / BURST_STEPS
    largest = LARGEST_SHARE / (max(printed) * burst)
    return max(1.0, min(WANTED / (values * min(printed)), largest))


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, DEEP, FULL)
    steps = BURST_EVERY_STEPS * settings.choose(1, 2, 10)
    trainee = Trainee(size, seed=settings.seed, data_seed=settings.seed)
    suspects = [Suspect(trainee, node, steps, settings.seed) for node in NODES]
    reference, healthy = Reference(trainee.model), _Healthy()
    for step in watched(range(steps), progress):
        for suspect in suspects:
            if suspect is suspects[0]:
                healthy.step(trainee, reference, step)
            suspect.step(trainee, reference, step)
        trainee.train(step)
    events.clear()
    yield healthy.row(steps)
    yield from _rows(suspects, size)


class _Healthy:
    """A recorded pass on a healthy device, with which another pass is compared."""

    def __init__(self) -> None:
        self.found: Found = {}

    def step(self, trainee: Trainee, reference: Reference, step: int) -> None:
        with reference.recorded():
            trainee.gradients(step)
        with reference.compared(self.found):
            trainee.gradients(step)

    def row(self, steps: int) -> Row:
        mismatches = float(sum(m.mismatches for m in self.found.values()))
        values = float(sum(m.elements for m in self.found.values()))
        case: Case = {"node": "healthy", "steps": steps}
        measured = {"values": values, "mismatches": mismatches}
        return Row(TRIPLE, case, measured, {"mismatches": paper.NO_MISMATCH})


def _rows(suspects: list[Suspect], size: Size) -> Iterator[Row]:
    for suspect in suspects:
        published = paper.mean_frequencies(suspect.profile)
        yield _frequency_row(FREQUENCY, suspect, None, published)
    for suspect in suspects:
        measured = {name: suspect.severity(name) for name in SUBMODULES}
        published = paper.worst_severities(suspect.profile)
        yield Row(SEVERITY, {"node": suspect.profile.node}, measured, published)
    for suspect in suspects:
        if suspect.profile.start_spike:
            yield _first_row(suspect)
        if suspect.profile.node in SPIKING_NODES:
            yield _spikes_row(suspect)
    for make in (_layer_frequency, _layer_severity):
        for suspect in suspects:
            if suspect.profile.frequency:
                for layer in range(size.model.layers):
                    yield make(suspect, layer, size.model.layers)


def _frequency_row(
    table: str, suspect: Suspect, layer: int | None, published: dict[str, Published]
) -> Row:
    case: dict[str, str | int] = {"node": suspect.profile.node}
    if layer is not None:
        case["layer"] = layer + 1
    scale = suspect.rate_scale
    rates = {name: suspect.rate(suspect.rest, name, layer) for name in SUBMODULES}
    measured = {name: rate.value / scale for name, rate in rates.items()}
    intervals = {
        name: (rate.interval[0] / scale, rate.interval[1] / scale)
        for name, rate in rates.items()
        if rate.count
    }
    counted = ", ".join(f"{rate.count}" for rate in rates.values())
    note = f"{counted} wrong values, {scale:.3g} times as frequent"
    trials = {name: rate.trials for name, rate in rates.items()}
    return Row(table, case, measured, published, note, intervals, trials)


def _first_row(suspect: Suspect) -> Row:
    name = SUBMODULES[0]
    first, later = (suspect.rate(found, name).value for found in (suspect.first, suspect.rest))
    measured = {f"{name}, first steps over later": first / later}
    case: Case = {"node": suspect.profile.node, "steps": SPIKE_STEPS}
    return Row(FIRST, case, measured, dict.fromkeys(measured, paper.FIRST_STEPS))


def _spikes_row(suspect: Suspect) -> Row:
    rates = {f"{SUBMODULES[0]}, steps without, %": Rate(suspect.quiet_steps, suspect.steps)}
    published = dict.fromkeys(rates, paper.MOSTLY_NONE)
    return Row.of_rates(SPIKES, {"node": suspect.profile.node}, rates, published)


def _layer_frequency(suspect: Suspect, layer: int, layers: int) -> Row:
    profile = suspect.profile
    expected = {name: profile.frequencies(name, layers, LOCKSTEP)[layer] for name in SUBMODULES}
    published = {name: paper.frequency(expected[name], _table(name, 6)) for name in SUBMODULES}
    return _frequency_row(LAYER_FREQUENCY, suspect, layer, published)


def _layer_severity(suspect: Suspect, layer: int, layers: int) -> Row:
    profile = suspect.profile
    worst = {name: profile.severities(name, layers)[layer] for name in SUBMODULES}
    published = {name: paper.severity(worst[name], _table(name, 8)) for name in SUBMODULES}
    measured = {name: suspect.severity(name, layer) for name in SUBMODULES}
    case: Case = {"node": profile.node, "layer": layer + 1}
    return Row(LAYER_SEVERITY, case, measured, published)


def _table(submodule: str, forward: int) -> str:
    return f"table {forward if submodule.startswith('forward') else forward + 1}"


def _verdict(rows: list[Row]) -> str:
    """Check that no healthy node is flagged and every node with errors is."""
    for row in rows:
        if row.table == TRIPLE and row.measured["mismatches"]:
            return "two healthy passes differ"
        if row.table == FREQUENCY:
            printed = any(value.value for value in row.published.values())
            if printed != any(row.measured.values()):
                return f"node {row.case['node']} {'is not seen' if printed else 'is not silent'}"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot measured over published values, one point for each node and submodule."""
    panels = figure.subplots(1, 2)
    for axes, table in zip(panels, (FREQUENCY, SEVERITY), strict=True):
        _points(axes, [row for row in rows if row.table == table])
        axes.set(title=table, xlabel="the paper's", ylabel="measured")
    panels[0].legend(fontsize="small")


def _points(axes: "Axes", rows: list[Row]) -> None:
    largest: list[float] = []
    for number, name in enumerate(SUBMODULES):
        pairs = [(row.published[name].value or 0.0, row.measured[name]) for row in rows]
        pairs = [pair for pair in pairs if pair[0]]
        axes.plot(*zip(*pairs, strict=True), f"C{number}o", label=name, markersize=4)
        largest += [pair[0] for pair in pairs]
    axes.plot([min(largest), max(largest)], [min(largest), max(largest)], "k-", linewidth=0.5)
    axes.set(xscale="log", yscale="log")


STUDY = Study(
    name="sdc.submodules",
    paper="SDC study, tables 1, 2 and 6 to 9, figures 3 and 4",
    reproduces="how often values of attention and FFN are wrong on each of fifteen unhealthy "
    "nodes, and how far, as the unhealthy-device emulator gives it",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

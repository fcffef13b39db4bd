"""``sdc.finetune``: answers of a model that was fine-tuned on an unhealthy node (tables 3 and 5).

A healthy device pre-trains a small GPT on real text. It is then fine-tuned on multiple choice from
the same weights by the healthy device, by the healthy device with the questions in another order,
and by every node. Nodes that agreed with the healthy one on a task are silent. All answers are
computed on a healthy device, so that differences come from the model.

Each task has a stand-in (``cloze``, ``multiple_choice``). Learning rates are table 4's times the
ratio of the widths, numbers of questions table 4's divided by one number. Figure 7: ``spikes``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf, isfinite

import torch
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast.inject.statistics import Rate
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import NODES, node_profile
from holdfast_lab.study.plots import line
from holdfast_lab.study.published import Published, percent_interval
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study
from holdfast_lab.study.sdc import paper_tasks as paper
from holdfast_lab.study.sdc.cloze import Questions, questions
from holdfast_lab.study.sdc.multiple_choice import multiple_choice
from holdfast_lab.study.sdc.paper_tasks import COSMOS, TASKS, Task
from holdfast_lab.study.sdc.spikes import END, FINITE, Spike, SpikingDevice, reported
from holdfast_lab.study.sdc.subjects import DEEP, SMALL, TINY, Size, Trainee, device_for, distance
from holdfast_lab.trainer.gpt import GPT

TABLE, ALL, LOSSES = "after fine-tuning", "all nodes", "losses of fine-tuning (figure 7)"
TA, DP, TA_CHANGE = "accuracy, %", "disagreement, %", "accuracy less the healthy one's, points"
BASE, HEALTHY, SEED = "without fine-tuning", "healthy", "healthy, another order"
SMALLER = "node 6, a finite spike near the end"
CHOICE_BYTES = 12
LARGEST_NORM = 0.3  # of the gradients: appendix E.4
WRONG_PER_STEP = 1.0
APART, OVER_SEED = "parameter difference", "over another order's"
SPIKE = "largest loss difference, over another order's"
LAST = "loss difference at the end, over another order's"
LEAST = "least accuracy over that without fine-tuning, points"
CURVE_STEPS = 4  # each point of figure 7 is the largest loss of so many


@dataclass(frozen=True)
class Plan:
    """The amounts of training and of questions.

    ``share`` is the number of the paper's sequences for each question, of which at most ``most``
    count. ``batch`` is the number of questions in a step, and ``asked`` that of the test. ``size``
    has the number of sequences in a batch of pre-training.
    """

    size: Size
    pretrain: int
    share: int
    batch: int
    asked: int
    most: int = 30_000


@dataclass
class Outcome:
    """A fine-tuned model: its answers, the losses of its training, and its parameters."""

    predictions: torch.Tensor
    losses: list[float]
    parameters: list[torch.Tensor]
    device: UnhealthyDevice | None = None
    spikes: list[Spike] = field(default_factory=list)
    struck: int = 0


class Experiment:
    """A pre-trained model with a task's questions for fine-tuning and for testing."""

    def __init__(self, model: GPT, plan: Plan, task: Task, seed: int) -> None:
        self._pretrained, self._seed = model, seed
        self.plan, self.task = plan, task
        self.context = model.config.context * task.tokens // paper.TOKENS
        self.rate_factor = paper.WIDTH // model.config.width
        self.count = max(1, min(task.sequences, plan.most) // plan.share)
        self.steps = -(-self.count // plan.batch)
        self._train = self._questions(self.count, "train", seed)
        self.test = self._questions(plan.asked, "test", seed + 1)

    def _questions(self, count: int, part: str, seed: int) -> Questions:
        if self.task == COSMOS:
            return questions(count, self.context, CHOICE_BYTES, part=part, seed=seed)
        return multiple_choice(self.task.name, count, self.context, part=part, seed=seed)

    def base(self) -> Outcome:
        """Return the outcome of the pre-trained model."""
        return self._outcome(self._pretrained, [])

    def healthy(self, order: int = 0) -> Outcome:
        """Fine-tune on a healthy device, with the questions in one of many orders."""
        model = deepcopy(self._pretrained)
        return self._outcome(model, self._tune(model, order))

    def on(self, node: int, spikes: list[Spike] | None = None) -> Outcome:
        """Fine-tune on an emulated unhealthy node, with the reported spikes or with others."""
        model = deepcopy(self._pretrained)
        if spikes is None:
            spikes = reported(node_profile(node), self.task, self.steps)
        size = Size(replace(model.config, context=self.context), self.plan.batch)
        task = self.task.name
        device = device_for(model, size, node, self._seed, WRONG_PER_STEP, setting=task)
        spiking = [SpikingDevice(model, node, self._seed, spike) for spike in spikes]
        outcome = self._outcome(model, self._tune(model, 0, *spiking, device))
        outcome.device, outcome.spikes = device, spikes
        outcome.struck = sum(one.struck for one in (*spiking, device))
        return outcome

    def _tune(self, model: GPT, order: int, *devices: UnhealthyDevice) -> list[float]:
        rate = self.task.rate * self.rate_factor
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.001)
        draw = torch.Generator().manual_seed(self._seed + order)
        shuffled = torch.randperm(len(self._train), generator=draw)
        losses = []
        for step, which in enumerate(shuffled.split(self.plan.batch)):
            events.set_step(step)
            optimizer.zero_grad(set_to_none=True)
            # Steps without errors are computed without the device, with the same bits but faster.
            with next((device for device in devices if device.due(step)), nullcontext()):
                loss = self._train.some(which).loss(model)
                torch.autograd.backward(loss)
            clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            events.set_step(-1)
            losses.append(float(loss.detach()))
        return losses

    def _outcome(self, model: GPT, losses: list[float]) -> Outcome:
        parameters = [p.detach().clone() for p in model.parameters()]
        return Outcome(self.test.predictions(model), losses, parameters)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    plan = settings.choose(
        Plan(TINY, pretrain=2, share=3000, batch=1, asked=16),
        Plan(replace(SMALL, batch=8), pretrain=1000, share=40, batch=8, asked=300),
        Plan(replace(DEEP, batch=16), pretrain=5000, share=4, batch=16, asked=4000, most=90_000),
    )
    progress.begin(float(len(TASKS) * (len(NODES) + 3) + 1))
    longer = replace(plan.size, model=replace(plan.size.model, context=128))
    trainee = Trainee(longer, seed=settings.seed, data_seed=settings.seed)
    for step in range(plan.pretrain):
        trainee.train(step)
    progress.advance(1)
    for task in TASKS:
        yield from _rows(Experiment(trainee.model, plan, task, settings.seed), progress)


def _rows(experiment: Experiment, progress: Progress) -> Iterator[Row]:
    outcomes = {BASE: experiment.base(), HEALTHY: experiment.healthy()}
    progress.advance(2)
    outcomes[SEED] = experiment.healthy(order=1)
    progress.advance(1)
    for node in NODES:
        outcomes[f"node {node}"] = experiment.on(node)
        progress.advance(1)
    rows = [_row(name, outcomes, experiment) for name in outcomes]
    yield from rows
    yield _all(rows, outcomes, experiment)
    if experiment.task == COSMOS:
        spikes = [Spike(int(END * experiment.steps), FINITE)]
        outcomes[SMALLER] = experiment.on(6, spikes)
        yield _row(SMALLER, outcomes, experiment)
        yield from _curves(outcomes, experiment.steps)
    events.clear()


def _row(name: str, outcomes: dict[str, Outcome], experiment: Experiment) -> Row:
    outcome, healthy, test = outcomes[name], outcomes[HEALTHY], experiment.test
    right, differ = _right(outcome, test), _differing(outcome, healthy)
    change = 100 * (right.value - _right(healthy, test).value)
    apart = distance(outcome.parameters, healthy.parameters)
    measured = {TA: 100 * right.value, DP: 100 * differ.value, TA_CHANGE: change}
    measured[APART] = apart if isfinite(apart) else inf
    if outcome.device:
        away, others = _away(outcome, healthy), _away(outcomes[SEED], healthy)
        measured[SPIKE] = _over(max(away), max(others))
        last = -max(1, len(away) // 10)
        measured[LAST] = _over(sum(away[last:]), sum(others[last:]))
    intervals = {
        one: percent_interval(rate) for one, rate in ((TA, right), (DP, differ)) if differ.count
    }
    room = paper.change_room(differ)
    intervals[TA_CHANGE] = change - room, change + room
    trials = dict.fromkeys((TA, DP, TA_CHANGE), differ.trials)
    published = _judged(_published(name, outcome, experiment.task), outcomes)
    case = _case(name, experiment)
    return Row(TABLE, case, measured, published, _note(outcome), intervals, trials)


def _judged(found: dict[str, Published], outcomes: dict[str, Outcome]) -> dict[str, Published]:
    """Return the values of a task; answers that no training changes cannot differ."""
    if _differing(outcomes[BASE], outcomes[HEALTHY]).count:
        return found
    certain = (DP, TA_CHANGE, OVER_SEED)
    return {one: replace(v, kind="certain") if one in certain else v for one, v in found.items()}


def _right(outcome: Outcome, test: Questions) -> Rate:
    return Rate(int((outcome.predictions == test.answers).sum()), len(test))


def _differing(one: Outcome, other: Outcome) -> Rate:
    return Rate(int((one.predictions != other.predictions).sum()), len(other.predictions))


def _away(outcome: Outcome, healthy: Outcome) -> list[float]:
    """List the differences of the losses of each step; infinite where one is not finite."""
    pairs = zip(outcome.losses, healthy.losses, strict=True)
    return [abs(a - b) if isfinite(a) else inf for a, b in pairs]


def _over(value: float, other: float) -> float:
    return value / other if other else inf if value else 0.0


def _case(name: str, experiment: Experiment) -> Case:
    task = experiment.task
    return {
        "task": task.title,
        "trained": name,
        "asked": experiment.plan.asked,
        "questions": f"{experiment.count:,} for {task.sequences:,}",
        "bytes": f"{experiment.context} for {task.tokens:,} tokens",
        "learning rate": f"{task.rate:.0e} × {experiment.rate_factor}",
    }


def _note(outcome: Outcome) -> str:
    if not outcome.device:
        return ""
    if outcome.device.profile.silent(outcome.device.setting):
        return "silent"
    scale = f"{outcome.device.rate_scale:.3g} times as frequent"
    spikes = [
        f"; from step {one.first} up to {one.size:.0e} times a value" for one in outcome.spikes
    ]
    return f"{outcome.struck} wrong values, {scale}{''.join(spikes)}"


def _published(name: str, outcome: Outcome, task: Task) -> dict[str, Published]:
    if name in (BASE, SEED):
        return {DP: paper.other(task, "base" if name == BASE else "another_seed")}
    if not outcome.device or name == SMALLER:
        return {}
    profile = outcome.device.profile
    ruined = paper.ruined(profile, task)
    found = dict(zip((DP, TA if ruined else TA_CHANGE), paper.values(profile, task), strict=True))
    if curve := paper.curve(profile, task):
        found[SPIKE] = curve
    if outcome.spikes and not ruined:
        found[LAST] = paper.STABILISED
    return found


def _all(rows: list[Row], outcomes: dict[str, Outcome], experiment: Experiment) -> Row:
    """Make the row of all nodes, without those whose models the paper has as ruined."""
    chosen = {
        str(row.case["trained"]): row
        for row in rows
        if (device := outcomes[str(row.case["trained"])].device)
        and not paper.ruined(device.profile, experiment.task)
    }
    seed = next(row for row in rows if row.case["trained"] == SEED)
    base, test = outcomes[BASE], experiment.test
    largest = max(row.measured[DP] for row in chosen.values())
    worst = min(chosen, key=lambda name: chosen[name].measured[TA])
    gain = 100 * (_right(outcomes[worst], test).value - _right(base, test).value)
    room = paper.change_room(_differing(outcomes[worst], base))
    measured = {
        "largest disagreement of a node, %": largest,
        OVER_SEED: _over(largest, seed.measured[DP]),
        LEAST: gain,
    }
    published = _judged({OVER_SEED: paper.BELOW_SEED, LEAST: paper.IMPROVED}, outcomes)
    case: Case = {"task": experiment.task.title, "nodes": len(chosen), "asked": len(test)}
    return Row(ALL, case, measured, published, intervals={LEAST: (gain - room, gain + room)})


def _curves(outcomes: dict[str, Outcome], steps: int) -> Iterator[Row]:
    shown = {
        name: one.losses for name, one in outcomes.items() if one.spikes or name in (HEALTHY, SEED)
    }
    for start in range(0, steps, CURVE_STEPS):
        parts = {name: losses[start : start + CURVE_STEPS] for name, losses in shown.items()}
        finite = {name: max(part) for name, part in parts.items() if all(map(isfinite, part))}
        yield Row(LOSSES, {"step": start}, finite)


def _verdict(rows: list[Row]) -> str:
    """Check that nodes without errors end bit-equal to the healthy one and that others differ."""
    for row in rows:
        if row.table == TABLE and str(row.case["trained"]).startswith("node"):
            name = f"{row.case['trained']}, {row.case['task']},"
            if row.note == "silent" and row.measured[APART]:
                return f"{name} is silent, and its weights differ"
            if row.note != "silent" and not row.measured[APART]:
                return f"{name} errs, and its weights do not differ"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot each node's disagreement by task, CosmosQA's accuracy, and the losses of figure 7."""
    *disagreements, accuracy, losses = figure.subplots(2, 4).flat
    for task, axes in zip((*TASKS, COSMOS), (*disagreements, accuracy), strict=True):
        name = TA if axes is accuracy else DP
        titled = (row for row in rows if row.table == TABLE and row.case["task"] == task.title)
        chosen = {str(row.case["trained"]): row for row in titled}
        nodes = {node: chosen[f"node {node}"] for node in range(1, 16) if f"node {node}" in chosen}
        axes.plot(list(nodes), [row.measured[name] for row in nodes.values()], "C0o", label="ours")
        if name == DP:
            printed = [row.published[name].value or 0.0 for row in nodes.values()]
            axes.plot(list(nodes), printed, "kx", label="the paper's")
        for other, colour, style in ((BASE, "C3", ":"), (SEED, "k", "--"), (HEALTHY, "k", "-")):
            axes.axhline(chosen[other].measured[name], c=colour, ls=style, label=other)
        axes.set(xlabel="node", ylabel=name, title=task.title)
        axes.legend(fontsize="x-small")
    curves = [row for row in rows if row.table == LOSSES]
    for name in curves[0].measured:
        line(losses, curves, "step", name, "-", label=name)
    losses.set(xlabel="step", ylabel="loss, nats a byte")
    losses.legend(fontsize="x-small")


STUDY = Study(
    name="sdc.finetune",
    paper="SDC study, tables 3 and 5, figure 7",
    reproduces="a model fine-tuned on an unhealthy node answers about as well as the healthy one, "
    "and differently no more often than one fine-tuned on the data in another order; loss spikes",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

"""``sdc.finetune``: answers of a model that was fine-tuned on an unhealthy node (tables 3 and 5).

A healthy device pre-trains a small GPT on real text. It is then fine-tuned on multiple choice
(``cloze``) from the same weights by the healthy device, by the healthy device with the questions in
another order, and by every node. Nodes that agreed with the healthy one on CosmosQA are silent. All
answers are computed on a healthy device, so that differences come from the model.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf

import torch
from torch.nn.utils import clip_grad_norm_

from holdfast import events
from holdfast.inject.statistics import Rate
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import NODES
from holdfast_lab.study.published import Published, percent_interval
from holdfast_lab.study.registry import (
    Case,
    Figure,
    Progress,
    Row,
    Settings,
    Study,
)
from holdfast_lab.study.sdc import paper
from holdfast_lab.study.sdc.cloze import CHOICES, Questions, questions
from holdfast_lab.study.sdc.subjects import DEEP, SMALL, TINY, Size, Trainee, device_for, distance
from holdfast_lab.trainer.gpt import GPT

TABLE, ALL = "after fine-tuning", "all nodes"
TA, DP, TA_CHANGE = "accuracy, %", "disagreement, %", "accuracy less the healthy one's, points"
BASE, HEALTHY, SEED = "without fine-tuning", "healthy", "healthy, another order"
CHOICE_BYTES = 12
LEARNING_RATE, LARGEST_NORM = 1e-4, 0.3  # of the gradients: appendix E.4
WRONG_PER_STEP = 1.0
LARGEST_LOSS, APART = "largest loss difference", "parameter difference"


@dataclass(frozen=True)
class Plan:
    """The amounts of training and of questions.

    ``batch`` is the number of questions in a step, and ``asked`` that of the test. ``size`` has the
    number of sequences in a batch of pre-training.
    """

    size: Size
    pretrain: int
    steps: int
    batch: int
    asked: int


@dataclass
class Outcome:
    """A fine-tuned model: its answers, the losses of its training, and its parameters."""

    predictions: torch.Tensor
    losses: list[float]
    parameters: list[torch.Tensor]
    device: UnhealthyDevice | None = None


class Experiment:
    """A pre-trained model with its questions for fine-tuning and for testing."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        context = plan.size.model.context
        count = plan.steps * plan.batch
        self._train = questions(count, context, CHOICE_BYTES, part="train", seed=seed)
        self.test = questions(plan.asked, context, CHOICE_BYTES, part="test", seed=seed + 1)
        trainee = Trainee(plan.size, seed=seed, data_seed=seed)
        for step in range(plan.pretrain):
            trainee.train(step)
        self._pretrained = trainee.model

    def base(self) -> Outcome:
        """Return the outcome of the pre-trained model."""
        return self._outcome(self._pretrained, [])

    def healthy(self, order: int = 0) -> Outcome:
        """Fine-tune on a healthy device, with the questions in one of many orders."""
        model = deepcopy(self._pretrained)
        return self._outcome(model, self._tune(model, order))

    def on(self, node: int) -> Outcome:
        """Fine-tune on an emulated unhealthy node."""
        model = deepcopy(self._pretrained)
        size = replace(self._plan.size, batch=CHOICES * self._plan.batch)
        device = device_for(model, size, node, self._seed, WRONG_PER_STEP, setting=paper.TASK)
        outcome = self._outcome(model, self._tune(model, 0, device))
        outcome.device = device
        return outcome

    def _tune(self, model: GPT, order: int, device: UnhealthyDevice | None = None) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.001)
        draw = torch.Generator().manual_seed(self._seed + order)
        shuffled = torch.randperm(len(self._train), generator=draw)
        losses = []
        for step, which in enumerate(shuffled.split(self._plan.batch)):
            events.set_step(step)
            optimizer.zero_grad(set_to_none=True)
            # Steps without errors are computed without the device, with the same bits but faster.
            with device if device and device.due(step) else nullcontext():
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
        Plan(TINY, pretrain=2, steps=8, batch=1, asked=16),
        Plan(replace(SMALL, batch=8), pretrain=250, steps=30, batch=8, asked=300),
        Plan(replace(DEEP, batch=16), pretrain=5000, steps=400, batch=16, asked=4000),
    )
    progress.begin(float(len(NODES) + 4))
    experiment = Experiment(plan, settings.seed)
    progress.advance(1)
    outcomes = {BASE: experiment.base(), HEALTHY: experiment.healthy()}
    progress.advance(2)
    outcomes[SEED] = experiment.healthy(order=1)
    progress.advance(1)
    for node in NODES:
        outcomes[f"node {node}"] = experiment.on(node)
        progress.advance(1)
    events.clear()
    rows = [_row(name, outcomes, experiment.test) for name in outcomes]
    yield from rows
    yield _all(rows, outcomes)


def _row(name: str, outcomes: dict[str, Outcome], test: Questions) -> Row:
    outcome, healthy = outcomes[name], outcomes[HEALTHY]
    right, reference = (
        Rate(int((one.predictions == test.answers).sum()), len(test)) for one in (outcome, healthy)
    )
    differ = Rate(int((outcome.predictions != healthy.predictions).sum()), len(test))
    measured = {
        TA: 100 * right.value,
        DP: 100 * differ.value,
        TA_CHANGE: 100 * (right.value - reference.value),
        APART: distance(outcome.parameters, healthy.parameters),
    }
    if outcome.losses:
        pairs = zip(outcome.losses, healthy.losses, strict=True)
        measured[LARGEST_LOSS] = max(abs(a - b) for a, b in pairs)
    rates = {TA: right, DP: differ}
    intervals = {name: percent_interval(rate) for name, rate in rates.items() if differ.count}
    room = paper.change_room(differ.value, differ.trials)
    intervals[TA_CHANGE] = measured[TA_CHANGE] - room, measured[TA_CHANGE] + room
    trials = dict.fromkeys((TA, DP, TA_CHANGE), differ.trials)
    published, note = _published(name, outcome), ""
    if outcome.device:
        silent = outcome.device.profile.silent(paper.TASK)
        scale = f"{outcome.device.rate_scale:.3g} times as frequent"
        note = "silent" if silent else f"{outcome.device.struck} wrong values, {scale}"
    case: Case = {"trained": name, "asked": len(test)}
    return Row(TABLE, case, measured, published, note, intervals, trials)


def _published(name: str, outcome: Outcome) -> dict[str, Published]:
    if outcome.device:
        profile = outcome.device.profile
        return {
            DP: paper.disagreement(profile),
            TA_CHANGE: paper.accuracy_change(profile),
        }
    return {DP: paper.SEED_DISAGREEMENT} if name == SEED else {}


def _all(rows: list[Row], outcomes: dict[str, Outcome]) -> Row:
    nodes = [row for row in rows if outcomes[str(row.case["trained"])].device]
    seed = next(row for row in rows if row.case["trained"] == SEED)
    largest = max(row.measured[DP] for row in nodes)
    share = largest / seed.measured[DP] if seed.measured[DP] else inf if largest else 0.0
    measured = {
        "largest disagreement of a node, %": largest,
        "over another order's": share,
        "nodes whose weights differ": float(sum(row.measured[APART] > 0 for row in nodes)),
        "nodes whose answers differ": float(sum(row.measured[DP] > 0 for row in nodes)),
    }
    published = {"over another order's": paper.BELOW_SEED}
    return Row(ALL, {"nodes": len(nodes)}, measured, published)


def _verdict(rows: list[Row]) -> str:
    """Check that nodes without errors end bit-equal to the healthy one and that others differ."""
    for row in rows:
        if row.table == TABLE and str(row.case["trained"]).startswith("node"):
            if row.note == "silent" and row.measured[APART]:
                return f"{row.case['trained']} is silent, and its weights differ"
            if row.note != "silent" and not row.measured[APART]:
                return f"{row.case['trained']} errs, and its weights do not differ"
    return ""


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot each node's accuracy and disagreement, with a healthy run and another data order."""
    chosen = {str(row.case["trained"]): row for row in rows if row.table == TABLE}
    nodes = [name for name in chosen if name.startswith("node")]
    numbers = [int(name.removeprefix("node ")) for name in nodes]
    for axes, name in zip(figure.subplots(1, 2), (TA, DP), strict=True):
        axes.plot(numbers, [chosen[node].measured[name] for node in nodes], "C0o", label="ours")
        axes.axhline(chosen[SEED].measured[name], color="k", linestyle="--", label=SEED)
        axes.set(xlabel="node", ylabel=name)
        if name == TA:
            axes.axhline(chosen[HEALTHY].measured[name], color="k", label=HEALTHY)
            axes.axhline(chosen[BASE].measured[name], color="C3", linestyle=":", label=BASE)
        else:
            printed = [chosen[node].published[name].value for node in nodes]
            axes.plot(numbers, printed, "kx", label="the paper's, CosmosQA")
        axes.legend(fontsize="x-small")


STUDY = Study(
    name="sdc.finetune",
    paper="SDC study, tables 3 and 5",
    reproduces="a model fine-tuned on an unhealthy node answers about as well as the healthy one, "
    "and differently no more often than one fine-tuned on the data in another order",
    run=_run,
    plot=_plot,
    verdict=_verdict,
)

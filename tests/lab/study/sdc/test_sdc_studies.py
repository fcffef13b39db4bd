"""Unhealthy nodes: equal seeds agree to the last bit, and faulty ones differ where they must."""

import builtins
import re
import sys
from dataclasses import replace
from keyword import iskeyword

import pytest
import torch
from case_loops import for_each
from torch.nn import functional

from holdfast import events
from holdfast_lab.emulation.device import UnhealthyDevice
from holdfast_lab.emulation.profile import SUBMODULES, Rhythm, node_profile
from holdfast_lab.study.sdc import drift, finetune
from holdfast_lab.study.sdc.cloze import CHOICES, questions
from holdfast_lab.study.sdc.lockstep import Found, Reference
from holdfast_lab.study.sdc.multiple_choice import MAKERS, MARKS, TOPICS, multiple_choice
from holdfast_lab.study.sdc.paper_tasks import BELOW_SEED, COSMOS, TASKS, Task
from holdfast_lab.study.sdc.spikes import FINITE, OVERFLOWS, Spike
from holdfast_lab.study.sdc.subjects import TINY, Trainee, distance, rate_scale, text

pytestmark = pytest.mark.study

ALWAYS = Rhythm(1, 1)


@pytest.fixture
def trainee() -> Trainee:
    return Trainee(TINY)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_equal_seeds_give_the_same_bits_and_other_data_other_ones(trainee: Trainee) -> None:
    again, other = Trainee(TINY), Trainee(TINY, data_seed=1)
    assert trainee.train(0) == again.train(0)
    assert trainee.train(1) == again.train(1)
    assert same(trainee.parameters(), again.parameters())
    assert distance(trainee.parameters(), again.parameters()) == 0
    other.train(0)
    assert not same(trainee.parameters(), other.parameters())
    assert distance(trainee.parameters(), other.parameters()) > 0
    assert events.current_step() == -1


def test_lockstep_finds_what_was_struck_and_no_more_and_puts_it_right(trainee: Trainee) -> None:
    reference = Reference(trainee.model)
    with reference.recorded():
        healthy = trainee.gradients(0)
    clean: Found = {}
    with reference.compared(clean):
        trainee.gradients(0)
    assert len(clean) == TINY.model.layers * len(SUBMODULES)
    assert sum(found.mismatches for found in clean.values()) == 0
    options = {"node": 11, "setting": "lockstep", "inside": 1.0, "bound_rms": None}
    device = UnhealthyDevice(trainee.model, rhythm=ALWAYS, **options)
    found: Found = {}
    with reference.compared(found), device:
        assert trainee.gradients(0) == healthy
    assert device.struck > 0
    for (layer, name), mismatches in found.items():
        direction, part = name.split(".")
        tally = device.tallies[layer, direction, part]
        assert mismatches.mismatches == tally.struck
        assert mismatches.elements == tally.values
        assert mismatches.severity == pytest.approx(tally.severity, rel=1e-5)
    with device:  # without the instrument the same device changes the loss
        assert trainee.gradients(0) != healthy


def test_rare_errors_are_made_frequent_enough_and_frequent_ones_left_alone() -> None:
    rare, frequent = node_profile(4), node_profile(11)
    scale = rate_scale(rare, TINY, "training", 2.0)
    layers = TINY.model.layers
    total = sum(sum(rare.frequencies(name, layers, "training")) for name in SUBMODULES)
    assert scale * total * TINY.call_values == pytest.approx(2.0)
    assert rate_scale(frequent, TINY, "training", 2.0) == 1.0
    assert rate_scale(node_profile(2), TINY, "lockstep", 2.0) == 1.0


def test_two_healthy_runs_end_alike_and_node_13_drifts_after_its_onset_only() -> None:
    experiment = drift.Experiment(TINY, 20, seed=0)
    assert experiment.again().distances == [0.0] * 20
    run = experiment.on(13)
    assert run.device is not None
    onset = run.device.start_step
    assert onset == round(450 * 20 / drift.PAPER_STEPS)
    assert run.distances[:onset] == [0.0] * onset
    assert run.largest_before_onset() == 0.0
    assert experiment.on(11).distances[-1] > 0
    assert experiment.another_seed().distances[0] > 0


def test_a_question_is_the_text_with_one_true_continuation() -> None:
    asked = questions(20, 32, 8, part="test", seed=3)
    assert asked.tokens.shape == (20, CHOICES, 33)
    content = bytes(text().data[3 * len(text()) // 4 :].tolist())
    for number, answer in enumerate(asked.answers.tolist()):
        before = asked.tokens[number, :, :-8]
        assert (before == before[:1]).all()
        assert bytes(asked.tokens[number, answer].tolist()) in content
    train = questions(20, 32, 8, part="train", seed=3)
    assert not torch.equal(train.tokens, asked.tokens)
    assert torch.equal(asked.tokens, questions(20, 32, 8, part="test", seed=3).tokens)


def test_a_choice_scores_the_log_likelihood_of_its_bytes(trainee: Trainee) -> None:
    asked = questions(3, TINY.model.context, 8, part="test", seed=0)
    scores = asked.scores(trainee.model)
    one = asked.tokens[2, 1]
    logits = trainee.model(one[None, :-1])[0]
    expected = -functional.cross_entropy(logits[-8:], one[-8:], reduction="sum")
    assert scores[2, 1].item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.equal(asked.predictions(trainee.model, batch=2), scores.argmax(-1))


PLAN = finetune.Plan(replace(TINY, batch=4), pretrain=2, share=1000, batch=1, asked=8)


def test_a_silent_node_fine_tunes_to_the_healthy_bits_and_another_does_not(
    trainee: Trainee,
) -> None:
    experiment = finetune.Experiment(trainee.model, PLAN, COSMOS, 0)
    healthy, silent, erring = experiment.healthy(), experiment.on(2), experiment.on(10)
    assert same(silent.parameters, healthy.parameters)
    assert silent.losses == healthy.losses
    assert not same(erring.parameters, healthy.parameters)
    assert not same(experiment.healthy(order=1).parameters, healthy.parameters)
    assert not same(experiment.base().parameters, healthy.parameters)


def test_clipping_bounds_a_finite_spike_and_spreads_one_that_overflows(trainee: Trainee) -> None:
    experiment = finetune.Experiment(trainee.model, PLAN, COSMOS, 0)
    healthy, none = experiment.healthy(), experiment.on(6, [])
    finite, ruined = (experiment.on(6, [Spike(10, size)]) for size in (FINITE, OVERFLOWS))
    assert finite.losses[:10] == ruined.losses[:10] == none.losses[:10]
    apart = [abs(a - b) for a, b in zip(finite.losses, healthy.losses, strict=True)]
    assert max(apart) == max(apart[10:14]) > 10 * max(apart[:10])
    assert all(p.isfinite().all() for p in finite.parameters)
    assert not any(p.isfinite().any() for p in ruined.parameters)
    assert ruined.predictions.tolist() == [-1] * 8


def test_answers_that_no_training_changes_are_no_proof() -> None:
    base, other = (finetune.Outcome(torch.tensor(given), [], []) for given in ([1, 1], [1, 0]))
    found = {finetune.DP: BELOW_SEED, finetune.LEAST: BELOW_SEED}
    for healthy, kind in ((other, "measured"), (base, "certain")):
        judged = finetune._judged(found, {finetune.BASE: base, finetune.HEALTHY: healthy})
        assert (judged[finetune.DP].kind, judged[finetune.LEAST].kind) == (kind, "measured")


KINDS = {
    "error": lambda name: name[0].isupper() and not iskeyword(name),
    "keyword": iskeyword,
    "function": lambda name: hasattr(builtins, name) and name.islower(),
    "module": lambda name: name in sys.stdlib_module_names,
}


def holds(task: Task, asked: str, choice: str) -> bool:
    """Whether a choice answers what is asked."""
    passage, _, last = asked.rpartition("\n")
    if task.name == "mathqa":
        one, verb, other = re.findall(r"\d+|gets|loses", last)
        return int(choice) == int(one) + int(other) * (1 if verb == "gets" else -1)
    if task.name == "boolq":
        mark = MARKS[last.removeprefix("Has it ").removesuffix("? ")]
        return (re.search(mark, passage) is not None) == (choice == "yes")
    if task.name == "race":
        return TOPICS[choice] in passage
    return KINDS[choice](last.removesuffix(" is a "))


@for_each("task", TASKS[1:])
def test_one_choice_of_a_question_is_right(task: Task) -> None:
    drawn = [
        multiple_choice(task.name, 40, task.tokens // 32, part=part, seed=3)
        for part in ("test", "test", "train")
    ]
    width = MAKERS[task.name][1]
    for data, answer in zip(drawn[0].tokens.tolist(), drawn[0].answers.tolist(), strict=True):
        texts = [bytes(one).decode("latin-1") for one in data]
        assert len({one[:-width] for one in texts}) == 1
        right = [holds(task, one[:-width], one[-width:].rstrip()) for one in texts]
        assert [place for place, one in enumerate(right) if one] == [answer]
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)
    assert not torch.equal(drawn[0].tokens, drawn[2].tokens)
    assert len(set(drawn[0].answers.tolist())) == drawn[0].tokens.shape[1]

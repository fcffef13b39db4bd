"""The studies that train: faults are fatal where they should be, and repaired leave no trace."""

from contextlib import closing
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path

import pytest
import torch
from case_loops import for_each
from study_runs import rows_of

from holdfast.digest.tensors import state_digest, tensors_digest
from holdfast.inject.journal import Journal
from holdfast.inject.statistics import Rate
from holdfast.planner.vulnerability import parse
from holdfast.protection import protect
from holdfast_lab.study import Settings, Unwatched
from holdfast_lab.study.attnchecker import loss, recovery, vulnerability
from holdfast_lab.study.attnchecker.docstrings import Task
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, TINY
from holdfast_lab.study.attnchecker.overhead import attention_call
from holdfast_lab.study.attnchecker.probe import STRUCK, TYPES, Strike

pytestmark = pytest.mark.study

pytest.importorskip("transformers", "5.23", reason="the extra 'models' is not installed")

STEPS = 4


@pytest.fixture(scope="module")
def task() -> Task:
    return task_for(TINY, 24, 0)


def strike(matrix: str, kind: str) -> Strike:
    return Strike(matrix, kind, torch.Generator().manual_seed(0))


def test_a_trainer_repeats_itself_and_returns_to_a_state(task: Task) -> None:
    first, again = (Trainer("gpt2", TINY, task, dropout=0.2, seed=3) for _ in range(2))
    untrained = tensors_digest(first.model.parameters())
    assert first.train(STEPS) == again.train(STEPS)
    assert tensors_digest(first.model.parameters()) == tensors_digest(again.model.parameters())
    assert tensors_digest(first.model.parameters()) != untrained
    state, digest = first.state(), state_digest(first.state())
    for _ in range(2):  # a state may be used more than once
        first.train(2)
        assert state_digest(first.state()) != digest
        first.restore(state)
        assert state_digest(first.state()) == digest


@for_each("name", PAPER_MODELS)
def test_nan_is_fatal_and_what_the_mask_removes_is_not(name: str, task: Task) -> None:
    patient = vulnerability.Patient(Trainer(name, TINY, task), steps=2)
    for matrix in ("Q", "K", "V", "CL"):
        assert patient.rate(strike(matrix, "nan"), 3).value == 1
    scores = patient.rate(strike("AS", "nan"), 24)
    # GPT-Neo overwrites what its mask hides, a NaN under it included.
    assert (scores.value < 1) == (name == "gpt-neo")


def test_near_infinity_is_fatal_in_the_context_through_torchs_layer_norm_alone(task: Task) -> None:
    trainer = Trainer("bert", TINY, task)
    patient = vulnerability.Patient(trainer, steps=2)
    fatal = patient.rate(strike("CL", "near_inf"), 6, vulnerability.torchs_own)
    harmless = patient.rate(strike("CL", "near_inf"), 6, vulnerability.by_formula)
    assert (fatal.value, harmless.value) == (1, 0)


@for_each("name", PAPER_MODELS)
def test_faults_tried_together_do_what_each_does_alone(
    name: str, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, trials, settings = replace(TINY, batch=4), 5, Settings("tiny")
    monkeypatch.setattr(vulnerability, "GROUP", 3)  # two groups, of which one is smaller
    trainers = [Trainer(name, size, task), Trainer(name, size, task)]
    vulnerability.enlarge(trainers[1].subject)
    patients = [vulnerability.Patient(trainer, steps=2) for trainer in trainers]
    found, expected = [], []
    norms = (vulnerability.torchs_own, vulnerability.by_formula)
    for matrix, kind, which in product(STRUCK, TYPES, (0, 1)):
        strikes = [Strike(matrix, kind, settings.generator(matrix, kind)) for _ in range(2)]
        found += patients[which].outcomes(strikes[0], trials, norms[which])
        with protect(trainers[which].model, verify=False), norms[which](trainers[which].model):
            expected += [patients[which].non_trainable(strikes[1]) for _ in range(trials)]
    assert found == expected
    assert {*expected} == {True, False}


class Interrupted(Unwatched):
    """Interrupts a study in its second model."""

    left = CELLS = 33

    def advance(self, amount: float) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_where_it_stopped_and_ends_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = vulnerability.STUDY.run, tmp_path / "cells.jsonl"
    with closing(Journal(path, {})) as journal, pytest.raises(KeyboardInterrupt):
        list(run(Settings("tiny"), Interrupted(), journal))
    with path.open("a") as file:
        file.write('{"cell": "the cell in which it was')
    tried, draw = [], Strike.effect
    monkeypatch.setattr(Strike, "effect", lambda *args: tried.append(args[0]) or draw(*args))
    with closing(Journal(path, {})) as journal:
        rows = list(run(Settings("tiny"), Unwatched(), journal))
    assert len(tried) == len(rows) - Interrupted.CELLS
    assert rows == rows_of("attnchecker.vulnerability")


def test_the_planner_reads_what_is_exported() -> None:
    rows = [
        vulnerability.row(model, matrix, kind, Rate(n, 10))
        for n, model in ((0, "bert"), (10, "roberta"))
        for matrix in STRUCK
        for kind in TYPES
    ]
    rows.append(vulnerability.row("bert", "Q", "nan", Rate(10, 10), table=vulnerability.BY_FORMULA))
    rows.append(vulnerability.row("bert", "K", "nan", Rate(10, 10), width=768))
    document = vulnerability.export(rows)
    table = parse(document, "bert-base")
    assert table["K"]["nan"] == 1  # at the width where it is larger
    assert 0 < table["Q"]["nan"] == Rate(0, 10).interval[1] < 0.5
    assert parse(document, "roberta")["O"]["near_inf"] == 1


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_repaired_training_leaves_no_trace_and_unprotected_it_ends(name: str, task: Task) -> None:
    options = {"seed": 1, "every_steps": 1}
    calm = loss.fine_tune(name, TINY, task, 6, seed=1)
    bare = loss.fine_tune(name, TINY, task, 6, **options)
    repaired = loss.fine_tune(name, TINY, task, 6, correction="recompute", **options)
    corrected = loss.fine_tune(name, TINY, task, 6, correction="checksum", **options)
    assert bare.losses[:2] == calm.losses[:2]  # nothing strikes in the first third
    assert isnan(bare.losses[-1])
    assert bare.repairs == calm.repairs == 0
    assert repaired == replace(calm, repairs=4)
    assert corrected.repairs == 4
    other = loss.fine_tune(name, TINY, task, 6, seed=2)
    noise = max(abs(a - b) for a, b in zip(other.losses, calm.losses, strict=True))
    assert max(abs(a - b) for a, b in zip(corrected.losses, calm.losses, strict=True)) < noise


def test_a_correction_that_is_not_made_is_an_error(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer("bert", TINY, task)
    case = replace(trainer.subject, batch=next(trainer.batches(1)))
    _, forward = attention_call(case)
    monkeypatch.setattr(recovery, "protect", lambda model, correction: protect(model, verify=False))
    with pytest.raises(AssertionError, match="2 faults in Q were missed"):
        recovery.correction_s(case, forward, strike("Q", "nan"), "recompute", 2)

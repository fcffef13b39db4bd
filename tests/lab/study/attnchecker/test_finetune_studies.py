"""The studies that train: faults are fatal where they should be, and repaired leave no trace."""

from dataclasses import replace
from math import isnan

import pytest
import torch
from case_loops import for_each

from holdfast.digest.tensors import state_digest, tensors_digest
from holdfast.inject.statistics import Rate
from holdfast.planner.vulnerability import parse
from holdfast.protection import protect
from holdfast_lab.study.attnchecker import loss, recovery, vulnerability
from holdfast_lab.study.attnchecker.docstrings import Task
from holdfast_lab.study.attnchecker.finetune import Trainer, task_for
from holdfast_lab.study.attnchecker.models import PAPER_MODELS, TINY
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


def test_the_planner_reads_what_is_exported() -> None:
    rows = [
        vulnerability.row(model, matrix, kind, Rate(n, 10))
        for n, model in ((0, "bert"), (10, "roberta"))
        for matrix in STRUCK
        for kind in TYPES
    ]
    rows.append(vulnerability.row("bert", "Q", "nan", Rate(10, 10), table=vulnerability.BY_FORMULA))
    document = vulnerability.export(rows)
    table = parse(document, "bert-base")
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
    batch = next(trainer.batches(1))
    monkeypatch.setattr(recovery, "protect", lambda model, correction: protect(model, verify=False))
    with pytest.raises(AssertionError, match="2 faults in Q were missed"):
        recovery.correction_s(trainer, batch, strike("Q", "nan"), "recompute", 2)

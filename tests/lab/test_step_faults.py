"""The campaign on everything that a step computes: what is struck, and what becomes of it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from case_loops import for_each
from torch import nn
from torch.nn import functional

from bench.rows import RESULTS
from holdfast import native
from holdfast.inject.worker_pool import WorkerFailed
from holdfast_lab.step_faults import collectives
from holdfast_lab.step_faults.calls import INTERMITTENT, PERMANENT, TRANSIENT, Call, Fault
from holdfast_lab.step_faults.damage import KINDS, damage
from holdfast_lab.step_faults.judge import Judge, round_anew
from holdfast_lab.step_faults.operators import DATA, OPTIMIZER
from holdfast_lab.step_faults.summary import summaries, table
from holdfast_lab.step_faults.training import Batch, Subject
from holdfast_lab.step_faults.trials import NO_FAULT, Trials, in_fork

pytestmark = pytest.mark.skipif(native.core is None, reason="attention is verified natively only")
WORDS, WIDTH = 32, 16


class Small(nn.Module):
    """Embedding, norm, attention, convolution, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WORDS)
        self.conv, self.drop = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.drop(self.embed(tokens))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + functional.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's loss on the tokens themselves."""
    tokens = batch["tokens"]
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def subject() -> Subject:
    """A small model in training, always the same."""
    torch.manual_seed(0)
    model, batches = Small(), [{"tokens": torch.randint(WORDS, (2, 8))} for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Subject("small", model, optimizer, batches, loss_of)


@pytest.fixture
def prepared(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Trials]]:
    """Make trials of a mode, with less measuring than in a campaign."""
    monkeypatch.setattr("holdfast_lab.step_faults.trials.NOISE_RUNS", 2)
    with ExitStack() as stack:
        yield lambda mode: stack.enter_context(closing(Trials(subject(), mode)))


def outcome(trials: Trials, call: Call, kind: str = "zeros", duration: str = TRANSIENT) -> str:
    """What becomes of one fault."""
    found: str = in_fork(partial(trials.run, Fault(call, kind, duration, "test")))["outcome"]
    return found


def harmful(trials: Trials, kind: str) -> Call:
    """The middle call of a class: the first ones write zeros and ones, which stay as they are."""
    calls = [call for call in trials.classes[kind] if "ones_like" not in call.op]
    return calls[len(calls) // 2]


def outcomes(trials: Trials) -> dict[str, str]:
    """What becomes of a transient fault in each class."""
    return {kind: outcome(trials, harmful(trials, kind)) for kind in trials.classes}


def test_every_call_is_listed_and_repaired_when_all_is_audited(
    prepared: Callable[[str], Trials],
) -> None:
    trials = prepared("strict")
    calls = [call for those in trials.classes.values() for call in those]
    listed = {(call.op.split(".")[1], call.direction) for call in calls if call.kind != DATA}
    assert {("native_layer_norm", "forward"), ("native_layer_norm_backward", "backward")} <= listed
    assert {("gelu", "forward"), ("mm", "backward"), ("addcdiv_", "")} <= listed
    updates = [call for call in trials.classes[OPTIMIZER] if call.op.startswith("aten.addcdiv_")]
    assert len(updates) == len(list(trials.subject.model.parameters()))
    assert {call.kind for call in calls if call.visits} == {"matmul", "attention", "convolution"}
    # Views compute nothing.
    assert not {"view", "t", "transpose", "permute", "expand"} & {op for op, _ in listed}

    found = outcomes(trials)
    assert len(found) >= 10
    # There is no loader that could make the batch again.
    assert found == dict.fromkeys(found, "corrected") | {DATA: "detected"}
    assert outcome(trials, harmful(trials, "matmul"), duration=PERMANENT) == "corrected"
    assert outcome(trials, harmful(trials, "normalisation"), duration=PERMANENT) == "silent"

    before = trials.subject.state([])
    rows = [trials(number) for number in (0, 0, 5)]
    assert rows[0] == rows[1]
    assert rows[2]["class"] != rows[0]["class"]
    assert all(torch.equal(each, before[name]) for name, each in trials.subject.state([]).items())


def test_the_same_faults_do_silent_harm_without_a_guard(
    prepared: Callable[[str], Trials],
) -> None:
    found = outcomes(prepared("bare"))
    assert found == dict.fromkeys(found, "silent")


def test_the_default_repairs_products_and_names_an_update_that_errs_each_time(
    prepared: Callable[[str], Trials],
) -> None:
    trials = prepared("default")
    assert outcome(trials, harmful(trials, "matmul")) == "corrected"
    assert outcome(trials, harmful(trials, "attention")) == "corrected"
    fault = Fault(harmful(trials, OPTIMIZER), "stuck", INTERMITTENT, "test")
    found = in_fork(partial(trials.run, fault))
    assert found["outcome"] == "detected"
    assert 1 <= found["named"] <= 66
    assert "optimizer_fault" in found["events"]


@for_each(
    "values",
    [
        torch.randn(3, 5).T,
        torch.randn(15).bfloat16(),
        torch.arange(15).view(5, 3),
        torch.tensor([True, False] * 8),
        torch.tensor(1.5),
    ],
)
def test_each_kind_of_damage_changes_what_it_says(values: torch.Tensor) -> None:
    right = values.clone(memory_format=torch.preserve_format)
    bits = {kind: values.clone() for kind in KINDS}
    for kind, each in bits.items():
        old = torch.full_like(each, 7) if each.dtype is not torch.bool else ~each
        changed = [damage(each, kind, Random(seed), old) for seed in range(8)]
        assert any(changed)
    assert torch.equal(values, right)
    assert bool((bits["stale"] != right).any())
    flipped, wrong = values.clone(), 0
    for seed in range(8):
        wrong += damage(flipped, "flip", Random(seed), None)
    assert wrong == 8  # a flip always changes a bit, and the same one twice puts it back
    for seed in range(8):
        damage(flipped, "flip", Random(seed), None)
    assert torch.equal(flipped, right)
    assert not damage(flipped, "stale", Random(0), None)


def test_rounding_is_no_harm_and_more_than_it_or_nan_is() -> None:
    model = nn.Linear(4, 4)
    losses = torch.zeros(1)
    clean = {"w": model.weight.detach().clone(), "losses": losses}
    round_anew(model, 1)
    other = {"w": model.weight.detach(), "losses": losses}
    assert not torch.equal(other["w"], clean["w"])
    judge = Judge(clean, [other])
    assert not judge.is_harmful(other)
    assert not judge.is_equal(other)
    assert judge.is_equal(clean)
    for wrong in (1.001, float("nan"), float("inf")):
        assert judge.is_harmful({"w": clean["w"] * wrong, "losses": losses})


def test_a_fork_that_dies_or_raises_is_told() -> None:
    assert in_fork(os.getpid) != os.getpid()
    with pytest.raises(WorkerFailed, match="exit code 3"):
        in_fork(lambda: os._exit(3))
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        in_fork(lambda: 1 / 0)


def test_counts_leave_out_what_was_no_fault_and_the_table_shows_the_newest() -> None:
    row = {"mode": "strict", "duration": TRANSIENT, "model": "m", "class": "matmul"}
    row |= {"damage": "flip", "named": 1}
    rows = [row | {"outcome": each} for each in ("corrected", "silent", NO_FAULT)]
    (found,) = summaries(rows)
    assert (found["all"]["n"], found["all"]["silent"]) == (2, 1)
    assert found["classes"]["matmul"]["damage"]["flip"]["corrected"] == 1
    assert found["all"]["named_step"]["median"] == 1
    assert "| matmul | 2: 1 / 0 / 0 / 0 / 1 / 0 (9.5% to 90.5%) |" in table([{}, found][1:])
    (better,) = summaries(rows[:1])
    assert "| all but data | 1: 1 / 0 / 0 / 0 / 0 / 0 (≤ 100.00%) |" in table([found, better])


def test_the_tables_of_the_documentation_are_those_of_the_rows() -> None:
    rows = (RESULTS / "step_faults.jsonl").read_text().splitlines()
    docs = Path(__file__).parents[2] / "docs" / "step_faults.md"
    assert docs.read_text().endswith(f"--table -->\n{table(map(json.loads, rows))}")


@pytest.mark.processes
def test_a_collective_that_errs_is_found_when_it_is_checked_and_not_by_default() -> None:
    rows = list(collectives.rows(range(18), subject, seed=0))
    outcomes = {
        mode: {r["outcome"] for r in rows if r["mode"] == mode} for mode in collectives.MODES
    }
    assert "silent" in outcomes["default"]
    assert not {"silent"} & outcomes["strict"]
    assert {"corrected"} <= outcomes["strict"]

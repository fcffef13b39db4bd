"""The record of a run's steps: what it says, that it stays small, and that it never fails."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Guard, events
from holdfast.events import steps
from holdfast.events.ledger import STEPS_NAME
from holdfast.events.steps import StepLog
from holdfast.report import sources
from holdfast.report.run import gather_run


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepLog:
    """A log that writes each step at once, beside an open ledger."""
    monkeypatch.setattr(steps, "FLUSH_S", 0.0)
    monkeypatch.setattr(steps, "LINE_S", 0.0)
    events.open_ledger(tmp_path)
    yield StepLog()
    events.close_ledger()


def _read(run_dir: Path) -> list[sources.StepLine]:
    return list(sources.MetricsTail(run_dir).read())


def test_a_guard_records_its_steps_and_the_report_draws_them(tmp_path):
    events.open_ledger(tmp_path)
    model = nn.Linear(4, 1)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)) as guard:
        losses = [float(guard.step(forward_backward, torch.ones(2, 4))) for _ in range(5)]
    events.close_ledger()
    lines = _read(tmp_path)
    assert sum(line.steps for line in lines) == 5
    assert max(line.loss for line in lines) == losses[0]
    report = gather_run(tmp_path)
    assert (report.steps_done, report.pace.steps) == (5, 5)
    assert report.pace.total_s > 0


def test_short_steps_share_a_line_with_the_worst_of_them(tmp_path, log, monkeypatch):
    monkeypatch.setattr(steps, "LINE_S", 1000.0)
    monkeypatch.setattr(steps, "FLUSH_S", 1000.0)
    for step, loss in enumerate([1.0, 3.0, math.nan, 2.0], 1):
        log.add(step, loss, loss)
    log.add(3, 7.0, 7.0)  # rolled back
    assert _read(tmp_path) == []
    log.flush()
    merged, again = _read(tmp_path)
    assert (merged.step, merged.steps, again.step, again.steps) == (4, 4, 3, 1)
    assert math.isnan(merged.loss)
    metrics = sources.Metrics()
    metrics.take([merged, again])
    assert (metrics.steps_done, metrics.repeated) == (4, 1)


def test_the_file_stays_small_and_no_step_is_lost(tmp_path, log, monkeypatch):
    monkeypatch.setattr(steps, "LIMIT_BYTES", 20_000)
    monkeypatch.setattr(steps, "KEPT_LINES", 50)
    tail, seen = sources.MetricsTail(tmp_path), 0
    for step in range(1, 2001):
        log.add(step, 9.0 if step == 777 else 1.0, 1.0)
        if step % 100 == 0:
            seen += sum(line.steps for line in tail.read())
    assert (tmp_path / STEPS_NAME).stat().st_size < 21_000
    lines = _read(tmp_path)
    assert sum(line.steps for line in lines) == 2000
    assert [line.loss for line in lines].count(9.0) == 1
    assert max(line.steps for line in lines) <= 2000 / 50
    assert seen >= 2000


@pytest.mark.filterwarnings("ignore")
def test_trouble_with_the_file_costs_the_record_and_is_said_once(tmp_path, log, caplog):
    (tmp_path / STEPS_NAME).mkdir()
    for step in range(1, 4):
        log.add(step, 1.0, 1.0)
    assert len([m for m in caplog.messages if "cannot be recorded" in m]) == 1
    (tmp_path / STEPS_NAME).rmdir()
    (tmp_path / STEPS_NAME).write_text('{"step": 3, "lo')
    log.add(4, 1.0, 1.0)
    assert [line.step for line in _read(tmp_path)] == [4]


def test_other_ranks_and_runs_without_a_ledger_record_nothing(tmp_path, log, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    log.add(1, 1.0, 1.0)
    monkeypatch.delenv("RANK")
    events.close_ledger()
    log.add(2, 1.0, 1.0)
    assert not (tmp_path / STEPS_NAME).exists()


def test_the_trainers_metrics_are_read_where_there_are_both(tmp_path, log):
    log.add(1, 1.0, 1.0)
    line = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "seconds": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert [line.loss for line in _read(tmp_path)] == [2.0]

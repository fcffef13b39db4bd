"""A run that goes on: each look continues where the last one ended."""

import json
from pathlib import Path

import pytest
import torch
from report_runs import corrected, struck
from torch import nn

from holdfast import Guard, events, protect
from holdfast.errors import ConfigError
from holdfast.events import LEDGER_NAME, Ledger
from holdfast.report.live import LiveRun
from holdfast.report.run import gather_run
from holdfast.report.sources import read_summaries
from holdfast.step import summary


def _summarized(run_dir: Path, rank: int, step: int, time_s: float) -> None:
    record = {"rank": rank, "host": "node-a", "time_s": time_s, "step": step, "steps": step}
    path = run_dir / f"guard.{rank}.json"
    path.write_text(json.dumps(record | {"seconds": {"passes": 2.0 * step, "guard": 0.1 * step}}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of a script with four steps done."""
    lines = [
        {"step": n, "loss": 4.0 - n, "grad_norm": 1.0, "seconds": 0.5, "time_s": float(n)}
        for n in range(1, 5)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_look_shows_progress_faults_and_ranks_and_the_next_one_what_is_new(run_dir):
    _summarized(run_dir, 0, 4, 100.0)
    _summarized(run_dir, 1, 4, 101.0)
    run = LiveRun(run_dir)
    first = run.read()
    assert (first.step, first.loss, first.step_s, first.statuses) == (4, 0.0, 0.5, {})
    assert [(rank.rank, rank.pass_s, rank.behind) for rank in first.ranks] == [
        (0, 2.0, False),
        (1, 2.0, False),
    ]
    ledger = Ledger(run_dir / LEDGER_NAME)
    ledger.append(struck(1.0), corrected(2.0))
    with (run_dir / "steps.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 7.5, "grad_norm": 1.0, "seconds": 0.5, "time_s": 5.0}\n')
    second = run.read()
    assert (second.step, second.loss, second.injected) == (5, 7.5, 1)
    assert second.statuses == {"answered": 1}
    assert [event.kind for event in second.fresh] == ["injected", "gemm_fault"]
    assert run.read().fresh == []
    ledger.close()


def test_the_rank_that_no_longer_steps_is_behind(run_dir):
    _summarized(run_dir, 0, 90, 200.0)
    _summarized(run_dir, 1, 60, 120.0)
    _summarized(run_dir, 2, 89, 196.0)
    assert [rank.behind for rank in LiveRun(run_dir).read().ranks] == [False, True, False]


def test_damaged_summaries_are_passed_over(run_dir):
    _summarized(run_dir, 0, 4, 100.0)
    (run_dir / "guard.1.json").write_text('{"rank": 1, "host": "node-')
    (run_dir / "guard.2.json").write_text('{"rank": "2"}')
    assert [each["rank"] for each in read_summaries(run_dir)] == [0]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        LiveRun(tmp_path / "none")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a protected, guarded run of a script, some steps of which are repeated."""
    monkeypatch.setattr(summary, "EVERY_S", 0.0)
    events.open_ledger(tmp_path)
    model = nn.Linear(16, 4)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(model), Guard(model, optimizer, audit=1.0) as guard:
        for _ in range(3):
            guard.step(forward_backward, torch.ones(8, 16))
    events.close_ledger()
    return tmp_path


def test_a_guard_of_a_script_tells_its_coverage_and_where_its_time_went(trained):
    (told,) = read_summaries(trained)
    assert (told["step"], told["steps"]) == (3, 3)
    assert all(told["seconds"][part] > 0 for part in ("guard", "passes", "repeats", "optimizer"))
    report = gather_run(trained)
    assert report.coverage is not None
    assert all(site["covered"] for site in report.coverage["sites"])
    total_s = sum(told["seconds"].values())
    assert total_s <= report.pace.total_s * 1.01 + 1e-3  # the parts do not overlap


def test_a_summary_that_cannot_be_written_costs_one_warning_and_no_step(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(summary, "EVERY_S", 0.0)
    events.open_ledger(tmp_path)
    (tmp_path / "guard.0.json").mkdir()
    model = nn.Linear(2, 1)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).sum()
        loss.backward()
        return loss

    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)) as guard:
        for _ in range(3):
            guard.step(forward_backward, torch.ones(1, 2))
    events.close_ledger()
    assert guard.steps_done == 3
    assert sum("no summary for reports" in record.message for record in caplog.records) == 1

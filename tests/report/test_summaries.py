"""What the Guard of each rank writes for reports: coverage, and where its time went."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Guard, events, protect
from holdfast.report.run import gather_run
from holdfast.report.sources import read_summaries
from holdfast.step import summary


def test_damaged_summaries_are_passed_over(tmp_path: Path) -> None:
    record = {"rank": 0, "host": "node-a", "time_s": 1.0, "step": 4, "steps": 4, "seconds": {}}
    (tmp_path / "guard.0.json").write_text(json.dumps(record))
    (tmp_path / "guard.1.json").write_text('{"rank": 1, "host": "node-')
    (tmp_path / "guard.2.json").write_text('{"rank": "2"}')
    assert [each["rank"] for each in read_summaries(tmp_path)] == [0]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, float]:
    """The directory of a protected and audited run of a script, and the seconds that it took."""
    monkeypatch.setattr(summary, "EVERY_S", 0.0)
    events.open_ledger(tmp_path)
    model = nn.Linear(16, 4)

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began_s = time.perf_counter()
    with protect(model), Guard(model, optimizer, audit=1.0) as guard:
        for _ in range(3):
            guard.step(forward_backward, torch.ones(8, 16))
    took_s = time.perf_counter() - began_s
    events.close_ledger()
    return tmp_path, took_s


def test_a_guard_of_a_script_tells_its_coverage_and_where_its_time_went(trained):
    run_dir, took_s = trained
    (told,) = read_summaries(run_dir)
    assert (told["step"], told["steps"]) == (3, 3)
    assert all(told["seconds"][part] > 0 for part in ("guard", "passes", "repeats", "optimizer"))
    report = gather_run(run_dir)
    assert report.coverage is not None
    assert all(site["covered"] for site in report.coverage["sites"])
    assert sum(told["seconds"].values()) <= took_s  # the parts do not overlap


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

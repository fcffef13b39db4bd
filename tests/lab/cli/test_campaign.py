"""``holdfast campaign``: options, exit codes, what is printed, kept and written."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.main import EXIT_INTERRUPTED, main
from holdfast_lab.campaign import runner, trials
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.end_to_end import Outcome
from holdfast_lab.campaign.journal import JOURNAL_NAME

TINY = (
    "--operator mm --dtype bf16 --site output --shape 4x16x12 --distribution n01 "
    "--trials 6 --end-to-end 1 --workers 1"
)


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def call(out: Path, more: str = "") -> int:
    return main(["campaign", "--out", str(out), *TINY.split(), *more.split()])


def test_a_campaign_ends_with_tables_files_and_its_verdict(tmp_path, capsys):
    out, summary = tmp_path / "out", tmp_path / "summary.json"
    assert call(out, f"--fault inf flip --json {summary}") == 0
    printed = capsys.readouterr().out
    for words in ("33 cells of 6 faults", "flip exponent", "below rounding", "holds in every cell"):
        assert words in printed
    found = {path.name for path in out.iterdir()}
    assert found == {JOURNAL_NAME, "results.csv", "results.parquet", "bits-output.png"}
    data = json.loads(summary.read_text())
    assert data["holds"] is True
    assert data["cells"] == 33
    groups = {group["fault"]: group for group in data["groups"]}
    assert groups["inf"]["detected"] == groups["inf"]["trials"] == 6
    assert groups["inf"]["replayed_corrected"] == 6
    assert data["total"]["trials"] == sum(group["trials"] for group in data["groups"])


def test_the_same_command_continues_and_says_the_same(tmp_path, capsys):
    first = [call(tmp_path, "--fault inf"), capsys.readouterr().out.splitlines()[-1]]
    journal = (tmp_path / JOURNAL_NAME).read_bytes()
    second = [call(tmp_path, "--fault inf"), capsys.readouterr().out.splitlines()[-1]]
    assert first == second
    assert (tmp_path / JOURNAL_NAME).read_bytes() == journal


@pytest.mark.parametrize(
    ("module", "name", "outcome", "words"),
    [
        (trials, "clean_run", Counts(clean_rows=4, false_alarms=1), "1 false alarms"),
        (trials, "replay", Outcome(detected=True, corrected=False), "6 reported faults not rep"),
    ],
)
def test_exit_code_1_if_the_fault_model_is_contradicted(
    tmp_path, capsys, monkeypatch, module, name, outcome, words
):
    monkeypatch.setattr(module, name, lambda *_, **__: outcome)
    assert call(tmp_path, "--fault inf") == 1
    printed = capsys.readouterr().out
    assert words in printed
    assert "CONTRADICTED in 1 cells" in printed


def test_an_undetected_extreme_value_is_exit_code_1(tmp_path, capsys, monkeypatch):
    """With the detector off, the same faults are not found and do harm."""
    blind = lambda problem, c, a=None: c.new_zeros(c.shape[:2]).bool()  # noqa: E731
    monkeypatch.setattr("holdfast_lab.campaign.workload.Problem.suspects", blind)
    assert call(tmp_path, "--fault inf --json " + str(tmp_path / "s.json")) == 1
    assert "6 extreme values not found" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())["total"]["harmful"] == 6


def test_ctrl_c_keeps_what_is_done(tmp_path, capsys, monkeypatch):
    run, ran = runner.run_cell, []

    def interrupted(plan, cell):
        if len(ran) == runner.CELLS_A_JOB + 3:
            raise KeyboardInterrupt
        ran.append(cell)
        return run(plan, cell)

    monkeypatch.setattr(runner, "run_cell", interrupted)
    assert call(tmp_path, "--fault flip") == EXIT_INTERRUPTED
    captured = capsys.readouterr()
    assert f"stopped after {runner.CELLS_A_JOB} cells" in captured.out
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + runner.CELLS_A_JOB
    monkeypatch.setattr(runner, "run_cell", run)
    assert call(tmp_path, "--fault flip") == 0
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + 32


def test_parquet_is_left_out_on_request_and_without_pyarrow_or_refused(
    tmp_path, capsys, monkeypatch
):
    assert call(tmp_path / "c", "--fault inf --no-parquet") == 0
    assert not (tmp_path / "c" / "results.parquet").exists()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert call(tmp_path / "a", "--fault inf") == 0
    assert ".parquet" not in capsys.readouterr().out
    assert (tmp_path / "a" / "results.csv").exists()
    assert not (tmp_path / "a" / "results.parquet").exists()
    assert call(tmp_path / "b", "--fault inf --parquet") == 2
    assert "pip install 'torch-holdfast[lab]'" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()

"""``holdfast watch``: what is shown of a run, on a terminal and elsewhere."""

import io
import json

import pytest
from report_runs import corrected, event, write_run
from rich.console import Console, Group

from holdfast.cli import watch
from holdfast.cli.main import main
from holdfast.report.live import LiveRun


def test_a_finished_run_is_shown_once(tmp_path, capsys, document):
    run = write_run(tmp_path / "run", [corrected(1.0)])
    told = document("watch", run)
    assert (told["state"], told["statuses"]) == ("finished", {"answered": 1})
    assert "finished · step" in capsys.readouterr().out


def test_a_failed_run_is_a_failure(tmp_path, capsys):
    run = write_run(tmp_path / "run", [])
    for path in run.glob("result-*.json"):
        path.unlink()
    (run / "fatal.txt").write_text("rank 1 ended with 9")
    assert main(["watch", str(run)]) == 1


@pytest.mark.parametrize("width", [40, 120])
def test_every_line_fits_the_terminal_and_controls_nothing(tmp_path, width):
    run = write_run(tmp_path / "run", [corrected(1.0), event("evict\x1b[31m", 2.0, rank=1)])
    record = {"rank": 0, "host": "node-a" * 9, "time_s": 1.0, "step": 3, "steps": 3}
    seconds = {"passes": 1.0, "guard": 0.1}
    (run / "guard.0.json").write_text(json.dumps(record | {"seconds": seconds}))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(Group(*watch._parts(LiveRun(run).read(), width)))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    assert "loss" in shown


def test_a_directory_without_a_run_is_bad_input(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "give the directory of a run that has begun" in capsys.readouterr().err

"""``holdfast watch``: what is shown of a run, on a terminal and elsewhere."""

import io
import json
from pathlib import Path

import pytest
from report_runs import corrected, event, struck, write_run
from rich.console import Console, Group

from holdfast.cli import watch
from holdfast.cli.main import main, make_parser
from holdfast.cli.watch import ranks_of
from holdfast.events import LEDGER_NAME, Ledger


def _summary(rank: int, step: int, time_s: float) -> dict[str, object]:
    seconds = {"passes": 2.0 * step, "guard": 0.1 * step}
    place = {"rank": rank, "host": "node-a" * 9, "time_s": time_s}
    return place | {"step": step, "steps": step, "seconds": seconds}


def _looks(run: Path, *words: str):
    return watch._looks(watch_arguments(run, *words))


def watch_arguments(run: Path, *words: str):
    return make_parser("watch").parse_args(["watch", str(run), "--every", "0.1", *words])


def test_a_finished_run_is_shown_once(tmp_path, capsys, document):
    run = write_run(tmp_path / "run", [corrected(1.0)])
    told = document("watch", run)
    assert (told["state"]["kind"], told["statuses"]) == ("finished", {"answered": 1})
    assert "finished · step" in capsys.readouterr().out


def test_a_failed_run_is_a_failure(tmp_path):
    run = write_run(tmp_path / "run", [])
    for path in run.glob("result-*.json"):
        path.unlink()
    (run / "fatal.txt").write_text("rank 1 ended with 9")
    assert main(["watch", str(run)]) == 1


def test_each_look_has_what_is_new_since_the_last_one(tmp_path):
    path = tmp_path / "steps.jsonl"
    line = {"step": 4, "loss": 1.5, "grad_norm": 1.0, "seconds": 0.5, "time_s": 1.0}
    path.write_text(json.dumps(line) + "\n")
    looks = _looks(tmp_path)
    first = next(looks)
    assert (first.report.steps_done, first.fresh) == (4, [])
    ledger = Ledger(tmp_path / LEDGER_NAME)
    ledger.append(struck(1.0), corrected(2.0))
    with path.open("a") as file:
        file.write(json.dumps(line | {"step": 5, "loss": 7.5, "time_s": 2.0}) + "\n")
    second = next(looks)
    assert second.report.curve.loss == [1.5, 7.5]
    assert [event.kind for event in second.fresh] == ["injected", "gemm_fault"]
    third = next(looks)
    assert (third.fresh, len(third.latest)) == ([], 2)
    ledger.close()


def test_the_rank_that_no_longer_steps_is_behind_and_listed_first():
    guards = [_summary(0, 90, 200.0), _summary(1, 60, 120.0), _summary(2, 89, 196.0)]
    first, *others = ranks_of(guards, [0.5])
    assert (first["rank"], first["late"]) == (1, True)
    assert not any(rank["late"] for rank in others)
    assert not any(rank["late"] for rank in ranks_of(guards, [30.0]))  # steps that take so long


@pytest.mark.parametrize("width", [40, 120])
def test_every_line_fits_the_terminal_and_controls_nothing(tmp_path, width):
    run = write_run(tmp_path / "run", [corrected(1.0), event("evict\x1b[31m", 2.0, rank=1)])
    (run / "guard.0.json").write_text(json.dumps(_summary(0, 3, 1.0)))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(Group(*watch._parts(next(_looks(run)), width)))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    assert "loss" in shown


def test_a_directory_without_a_run_is_bad_input(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err

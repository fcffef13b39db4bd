"""Log lines: at the start, on a restore and on each fault; shown where a user looks for them."""

import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast
from holdfast import logs
from holdfast.cli.main import main
from holdfast.events import LEDGER_NAME, Event, Ledger

SCRIPT = """
import logging, sys, torch
from torch import nn
import holdfast
from holdfast.events import EventKind
if "configured" in sys.argv:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
holdfast.protect(nn.Linear(4, 4)).remove()
holdfast.events.record(EventKind.GEMM_FAULT)
"""


def _shown(*arguments: str, **environment: str) -> tuple[list[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=os.environ | environment,
        timeout=100,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_protect_says_what_it_does_not_cover(caplog):
    caplog.set_level(logging.INFO, "holdfast")
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Bilinear(1, 1, 1) for _ in range(5)))
    holdfast.protect(model).remove()
    (line,) = caplog.messages
    assert caplog.records[0].name == "holdfast.protection"
    assert line.startswith("protecting Sequential: matrix products are verified in a share of 1")
    assert line.endswith("not covered: 1, 2, 3, …")


def test_a_guard_says_where_it_starts(caplog):
    caplog.set_level(logging.INFO, "holdfast")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for shadow in (0.0, holdfast.replay.Shadow(0.25, spare=True)):
        with holdfast.Guard(model, optimizer, audit=0.5, shadow=shadow):
            pass
    assert {record.name for record in caplog.records} == {"holdfast.guard"}
    first, second = (record.getMessage() for record in caplog.records)
    assert "guarding Linear (audit 0.5, shadow 0); without snapshots" in first
    assert "guarding Linear (audit 0.5, shadow 0.25); without snapshots" in second


def test_the_environment_shows_lines_of_rank_0_and_faults_of_all():
    assert _shown() == ([], [])
    protection, fault = "INFO holdfast.protection", "WARNING holdfast.events"
    for rank, sources in (("0", [protection, fault]), ("3", [fault])):
        _, lines = _shown(HOLDFAST_LOG="INFO", RANK=rank)
        assert [line.split(":")[0] for line in lines] == sources


@pytest.mark.processes
def test_an_application_that_shows_logs_itself_gets_each_line_once():
    out, err = _shown("configured", HOLDFAST_LOG="INFO")
    assert len(out) == 2
    assert err == []


def test_a_verb_shows_lines_while_it_runs_and_leaves_nothing_behind(capsys, monkeypatch):
    logger = logging.getLogger("holdfast")
    before = (logger.level, list(logger.handlers))

    def run(args: object) -> int:
        logging.getLogger("holdfast.snapshot").info("from step %d", 4)
        return 0

    monkeypatch.setattr("holdfast.cli.events.run", run)
    assert main(["events", "anywhere"]) == 0
    assert capsys.readouterr().err == "INFO holdfast.snapshot: from step 4\n"
    assert (logger.level, list(logger.handlers)) == before
    with logs.shown():
        assert len(logger.handlers) == len(before[1]) + 1
        with logs.shown():  # as where HOLDFAST_LOG shows them already: no line comes twice
            assert len(logger.handlers) == len(before[1]) + 1


EVIL = "\x1b]0;owned\x07\x1b[2J\r\u202e\ud800\nnext"


def test_no_text_from_a_ledger_or_a_path_writes_to_the_terminal(tmp_path, capfd):
    events = [Event("gemm_fault", op=EVIL, detector=EVIL, detail={EVIL: EVIL}, host=EVIL)]
    ledger = Ledger(tmp_path / LEDGER_NAME)
    ledger.append(*(replace(each, op="a\x1b[2J", detector="b\x1b[2J", host="") for each in events))
    ledger.close()
    assert main(["events", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert main(["events", f"none{EVIL}"]) == 2
    out, err = capfd.readouterr()
    for text in (out + err, (tmp_path / "report.html").read_text(), str(events[0])):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "a\\x1b[2J" in out
    assert len(err.splitlines()) == 1


def test_log_lines_are_escaped(capsys, monkeypatch):
    # pytest would keep the record, and xdist cannot send its text.
    monkeypatch.setattr(logging.getLogger("holdfast"), "propagate", False)
    with logs.shown():
        logging.getLogger("holdfast.test").warning("from %s", EVIL)
    (line,) = capsys.readouterr().err.splitlines()
    assert "\x1b" not in line
    assert line.startswith("WARNING holdfast.test: from \\x1b]0;owned")

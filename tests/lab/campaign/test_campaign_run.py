"""A campaign runs to the same counts however it is cut up, killed, continued or spread."""

import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import psutil
import pytest

from holdfast import config, native, sites
from holdfast.errors import ConfigError
from holdfast.inject import journal as journal_module
from holdfast.inject.worker_pool import WorkerFailed
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.journal import JOURNAL_NAME, open_journal
from holdfast_lab.campaign.plan import QUICK, Filters, Plan, make_plan
from holdfast_lab.campaign.runner import (
    CELLS_A_JOB,
    CellResult,
    finished,
    run_campaign,
    run_or_fail,
)

SMALL = Filters(
    operators=["mm", "linear"],
    dtypes=["fp32"],
    sites=["output", "operand_b", "checksum"],
    faults=["inf", "flip-30", "flip-2", "column"],
    shapes=[(4, 16, 12)],
    distributions=["n01"],
)


def plan_of(**changes: object) -> Plan:
    return make_plan(QUICK, replace(SMALL, **changes), trials=8, end_to_end=1, seed=2)


def counts_of(results: list[CellResult]) -> dict[str, Counts]:
    """The counts by cell, without the time they took."""
    return {result.cell.key: replace(result.counts, seconds=0.0) for result in results}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    return counts_of(run_campaign(plan_of(), tmp_path_factory.mktemp("whole"), workers=1))


def test_every_cell_counts_every_fault(uninterrupted):
    plan = plan_of()
    assert list(uninterrupted) == [cell.key for cell in plan.cells]
    for cell in plan.cells:
        counts = uninterrupted[cell.key]
        missed = counts.masked + counts.below_rounding + counts.harmless + counts.harmful
        assert counts.trials == 8 or (cell.fault.startswith("flip") and counts.trials < 8), cell
        assert counts.detected + missed == counts.trials
        assert counts.replayed == min(counts.trials, plan.end_to_end_of(cell))
        assert counts.clean_rows >= 4
        assert counts.clean_suspects == counts.false_alarms == counts.disagreements == 0
        if cell.fault == "inf":
            assert counts.detected == counts.trials
            assert counts.replayed_detected == counts.replayed
            repaired = 0 if cell.site == "operand_b" else counts.replayed
            assert counts.replayed_corrected == repaired
    assert not sites.armed()


@pytest.mark.representative
@pytest.mark.processes
def test_two_workers_count_the_same(uninterrupted, tmp_path):
    seen = []
    results = run_campaign(plan_of(), tmp_path, workers=2, watch=lambda *at: seen.append(at))
    assert counts_of(results) == uninterrupted
    total = len(uninterrupted)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert multiprocessing.active_children() == []


class Stopped(Exception):
    pass


def _stop(done: int, cells: int) -> None:
    """Stops a campaign after its first job."""
    if done:
        raise Stopped


def test_an_interrupted_campaign_continues_where_it_was(uninterrupted, tmp_path):
    plan = plan_of()
    assert len(plan.cells) > CELLS_A_JOB
    with pytest.raises(Stopped):
        run_campaign(plan, tmp_path, workers=1, watch=_stop)
    kept = finished(plan, tmp_path)
    assert 0 < len(kept) < len(plan.cells)
    with (tmp_path / JOURNAL_NAME).open("a") as file:
        file.write('{"cell": "mm/fp32/4x16')  # a line that a kill has torn
    seen = []
    results = run_campaign(plan, tmp_path, workers=1, watch=lambda *at: seen.append(at[0]))
    assert seen[0] == len(kept)
    assert counts_of(results) == uninterrupted
    again = run_campaign(plan, tmp_path, workers=1, watch=lambda *at: seen.append(at))
    assert again == results
    assert seen[-1] == (len(plan.cells), len(plan.cells))


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_a_killed_campaign_continues_where_it_was(uninterrupted, tmp_path):
    """SIGKILL of the whole process, workers included, once it has written some cells."""
    program = (
        "from pathlib import Path\n"
        "from holdfast_lab.campaign.plan import *\n"
        "from holdfast_lab.campaign.runner import run_campaign\n"
        "if __name__ == '__main__':\n"
        f"    filters = {SMALL!r}\n"
        "    plan = make_plan(QUICK, filters, trials=8, end_to_end=1, seed=2)\n"
        f"    run_campaign(plan, Path({str(tmp_path)!r}), workers=2)\n"
    )
    script = tmp_path / "campaign.py"
    script.write_text(program)
    core = {} if native.core else {native.DISABLE_VARIABLE: "1"}  # the same as here
    process = subprocess.Popen([sys.executable, str(script)], env=os.environ | core)
    workers = []
    path, deadline = tmp_path / JOURNAL_NAME, time.monotonic() + 60
    while not (path.exists() and len(path.read_text().splitlines()) > 1):
        assert time.monotonic() < deadline
        assert process.poll() in (None, 0)
        workers = psutil.Process(process.pid).children(recursive=True) or workers
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []  # workers end when their parent is gone
    assert finished(plan_of(), tmp_path)
    assert counts_of(run_campaign(plan_of(), tmp_path, workers=1)) == uninterrupted


def test_another_plan_or_environment_is_refused(tmp_path, monkeypatch):
    plan = plan_of(faults=["inf"])
    run_campaign(plan, tmp_path, workers=1)
    before = (tmp_path / JOURNAL_NAME).read_bytes()
    with pytest.raises(
        ConfigError, match=r"of another campaign or study: plan was .*name another pl"
    ):
        run_campaign(plan_of(faults=["nan"]), tmp_path, workers=1)
    with pytest.raises(ConfigError, match="of another campaign"):
        run_campaign(replace(plan, seed=9), tmp_path, workers=1)
    changed = {**journal_module.environment(), "torch": "0.1"}
    monkeypatch.setattr(journal_module, "environment", lambda: changed)
    with pytest.raises(ConfigError, match=r"torch was .*, now it is 0\.1"):
        run_campaign(plan, tmp_path, workers=1)
    assert (tmp_path / JOURNAL_NAME).read_bytes() == before


def test_a_directory_serves_one_campaign_at_a_time(tmp_path):
    plan = plan_of()
    another = pytest.raises(ConfigError, match="another campaign or study is writing")
    with closing(open_journal(tmp_path, plan)), another:
        open_journal(tmp_path, plan)
    open_journal(tmp_path, plan).close()


@pytest.mark.parametrize("line", ["garbage\n", '{"seen": 3}\n'])
def test_a_damaged_journal_is_refused(tmp_path, line):
    plan = plan_of()
    open_journal(tmp_path, plan).close()
    with (tmp_path / JOURNAL_NAME).open("a") as file:
        file.write(line)
    before = (tmp_path / JOURNAL_NAME).read_bytes()
    with pytest.raises(ConfigError, match="is damaged"):
        open_journal(tmp_path, plan)
    assert (tmp_path / JOURNAL_NAME).read_bytes() == before


@pytest.mark.parametrize("text", ['{"precious": 1}', "a line\nand another"])
def test_a_file_of_the_users_is_left_as_it_is(tmp_path, text):
    (tmp_path / JOURNAL_NAME).write_text(text)
    with pytest.raises(ConfigError, match="is no journal"):
        open_journal(tmp_path, plan_of())
    assert (tmp_path / JOURNAL_NAME).read_text() == text


def test_a_journal_that_was_killed_at_its_first_line_begins_anew(tmp_path):
    open_journal(tmp_path, plan_of()).close()
    whole = (tmp_path / JOURNAL_NAME).read_bytes()
    (tmp_path / JOURNAL_NAME).write_bytes(whole[:20])
    open_journal(tmp_path, plan_of()).close()
    assert (tmp_path / JOURNAL_NAME).read_bytes() == whole


def test_an_unwritable_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        run_campaign(plan_of(), tmp_path / "file", workers=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("work", "jobs", "said"),
    [
        (os._exit, [3, 3], r"died \(exit code 3\)"),
        (partial(operator.truediv, 1), [1, 0, 1], "ZeroDivisionError"),
        (time.sleep, [600.0, 600.0], r"did not end a job within 3 s"),
    ],
    ids=["dies", "raises", "hangs"],
)
def test_a_worker_that_fails_is_told_of_and_leaves_nothing(monkeypatch, work, jobs, said):
    if work is time.sleep:
        monkeypatch.setenv(config.TIMEOUT_VARIABLE, "0.3")
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match=said):
        list(run_or_fail(work, jobs, workers=2))
    assert time.monotonic() - started < 60
    assert multiprocessing.active_children() == []

"""Recording never fails the training: whatever happens to the ledger, to subscribers, to logs."""

import logging
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import events
from holdfast.cli.main import main
from holdfast.errors import ConfigError
from holdfast.events import LEDGER_NAME, Event, EventKind, Ledger, read_ledger, recorder
from holdfast.events.kinds import kinds_table

DOCS = Path(__file__).parents[1] / "docs" / "events.md"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(recorder, "PATIENCE_S", 0.1)


@contextmanager
def _locked(run_dir: Path):
    """Hold a lock on the ledger from another connection, which has to be warned of."""
    other = sqlite3.connect(run_dir / LEDGER_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.warns(RuntimeWarning, match="locked"):
        yield
    other.execute("COMMIT")
    other.close()


def _stored(run_dir: Path) -> list[str]:
    return [event.kind for _, event in read_ledger(run_dir / LEDGER_NAME)]


def _record(count: int, **detail: object) -> None:
    for step in range(count):
        events.set_step(step)
        events.record(EventKind.RERUN, detail=detail)


def test_a_full_ledger_keeps_events_in_memory_and_takes_them_later(tmp_path, caplog):
    events.open_ledger(tmp_path)
    connection = recorder._process.outbox._ledger._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.warns(RuntimeWarning, match="full") as said:
        _record(50, text="x" * 1000)
    assert len(said) == 1
    assert len([each for each in caplog.records if "full" in each.getMessage()]) == 1
    assert len(_stored(tmp_path)) < 50
    assert len(events.recent()) == 50
    connection.execute("PRAGMA max_page_count = 1000000")
    events.set_step(50)
    assert len(_stored(tmp_path)) < 50, "the ledger is left alone for a while after a failure"
    assert events.flush()
    assert [event.step for _, event in read_ledger(tmp_path / LEDGER_NAME)] == list(range(50))


def test_a_held_lock_delays_an_event_by_no_more_than_the_patience(tmp_path, monkeypatch):
    events.open_ledger(tmp_path)
    started_s = time.monotonic()
    with _locked(tmp_path):
        _record(100)
        assert time.monotonic() - started_s < 2.0
    monkeypatch.setattr(recorder._process.outbox, "_retry_at_s", 0.0)
    events.set_step(1)
    assert _stored(tmp_path) == ["rerun"] * 100


def test_who_must_know_that_an_event_is_stored_can_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "0.2")
    assert events.flush(), "without a ledger there is nothing to wait for"
    events.open_ledger(tmp_path)
    with _locked(tmp_path):
        _record(1)
        assert not events.flush()
    assert events.flush()
    assert _stored(tmp_path) == ["rerun"]


def test_garbage_instead_of_a_ledger_is_said_once_and_left_alone(tmp_path):
    garbage = b"this is not a database, and it is long enough to show it" * 100
    (tmp_path / LEDGER_NAME).write_bytes(garbage)
    events.ensure_ledger(tmp_path)
    with pytest.warns(RuntimeWarning, match="not a database") as said:
        events.claim_ledger("run")
    _record(3)
    assert len(said) == 1
    assert (tmp_path / LEDGER_NAME).read_bytes() == garbage
    with pytest.raises(ConfigError, match="not a database"):
        Ledger(tmp_path / LEDGER_NAME)


def test_a_run_directory_that_cannot_be_made_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="Not a directory"):
        events.open_ledger(tmp_path / "file" / "run")
    events.record(EventKind.RERUN)
    with pytest.raises(ValueError, match="unheard_of"):
        events.record("unheard_of")
    assert [event.kind for event in events.recent()] == ["rerun"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events.open_ledger(tmp_path / "file" / "run")


def test_what_is_dropped_is_counted_in_the_ledger_and_in_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "KEPT", 5)
    events.open_ledger(tmp_path)
    with _locked(tmp_path):
        _record(12)
        assert events.dropped() == 7
    monkeypatch.setattr(recorder._process.outbox, "_retry_at_s", 0.0)
    events.set_step(12)
    assert events.dropped() == 0
    *kept, count = [event for _, event in read_ledger(tmp_path / LEDGER_NAME)]
    assert [event.step for event in kept] == [7, 8, 9, 10, 11]
    assert (count.kind, count.detail) == ("events_dropped", {"count": 7})
    for verb, said in (("events", "count=7"), ("report", "7 events are missing")):
        assert main([verb, str(tmp_path)]) == 0
        assert said in capsys.readouterr().out


def test_an_event_that_no_ledger_can_hold_is_dropped_alone(tmp_path):
    circular: dict[str, object] = {}
    circular["self"] = circular
    events.open_ledger(tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot be stored"):
        events.record(EventKind.RERUN, detail=circular)
    events.record(EventKind.EVICT, detail={"path": tmp_path, "set": {1}})
    assert _stored(tmp_path) == ["events_dropped", "evict"]


def test_what_waits_is_written_at_exit(tmp_path):
    script = (
        "import sqlite3, sys; from pathlib import Path; from holdfast import events; "
        "from holdfast.events import EventKind; folder = Path(sys.argv[1]); "
        "events.open_ledger(folder); "
        "other = sqlite3.connect(folder / events.LEDGER_NAME, isolation_level=None); "
        "other.execute('BEGIN EXCLUSIVE'); events.record(EventKind.RERUN); other.execute('COMMIT')"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(words, timeout=60, check=True, capture_output=True, text=True)
    assert "locked" in done.stderr
    assert _stored(tmp_path) == ["rerun"]


def test_subscribers_see_each_event_until_they_end_their_subscription(tmp_path):
    events.open_ledger(tmp_path)
    seen: list[tuple[Event, int]] = []
    unsubscribe = events.subscribe(lambda event: seen.append((event, len(_stored(tmp_path)))))
    first = events.record(EventKind.RERUN)
    second = events.record(EventKind.EVICT, rank=2)
    unsubscribe()
    unsubscribe()
    events.record(EventKind.RERUN)
    assert seen == [(first, 1), (second, 2)]


def test_a_subscriber_that_raises_is_reported_once_and_breaks_nothing(caplog):
    calls, seen = [], []

    def broken(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("out of order")

    ends = [events.subscribe(broken), events.subscribe(seen.append)]
    try:
        for _ in range(3):
            events.record(EventKind.RESTORED)
    finally:
        for end in ends:
            end()
    assert len(calls) == len(seen) == 3
    (said,) = [each for each in caplog.records if each.exc_info]
    assert said.name == "holdfast.events"
    assert "out of order" in str(said.exc_info[1])


def test_a_log_handler_that_raises_breaks_nothing():
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no space for logs")

    handler, logger = Broken(), logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        assert events.record(EventKind.RERUN) == events.recent()[-1]
    finally:
        logger.removeHandler(handler)


def test_faults_are_warnings_and_routine_events_are_not(caplog):
    caplog.set_level(logging.INFO, "holdfast")
    events.set_step(3)
    events.record(EventKind.GEMM_FAULT, op="head/mm", detector="checksum", rung="correct", rank=1)
    events.record(EventKind.RESTORED, detail={"source": "disk"})
    fault, restored = caplog.records
    assert (fault.name, fault.levelname) == ("holdfast.events", "WARNING")
    assert fault.getMessage() == (
        "wrong matrix product (gemm_fault): step 3, rank 1, head/mm, seen by checksum, "
        "answered by correct"
    )
    assert restored.levelname == "INFO"
    assert "source=disk" in restored.getMessage()


def test_ledgers_with_kinds_of_other_releases_stay_readable(tmp_path, capsys):
    ledger = Ledger(tmp_path / LEDGER_NAME)
    ledger.append(Event("of_another_release", time_s=1.0), Event("new_fault", step=1, time_s=2.0))
    ledger.close()
    assert _stored(tmp_path) == ["of_another_release", "new_fault"]
    assert main(["events", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert "of_another_release" in capsys.readouterr().out


@pytest.mark.parametrize("kind", EventKind)
def test_every_kind_is_explained_in_whole_sentences(kind):
    for sentence in (kind.happened, kind.done, kind.advice):
        assert sentence[0].isupper() or sentence[0] == "`"
        assert sentence.endswith(".")
    assert kind.summary
    assert kind.__doc__ == f"{kind.happened} {kind.done} {kind.advice}"


def test_the_table_in_the_documentation_is_the_one_in_the_code():
    remedy = "paste what `python -m holdfast.events` prints at the end of docs/events.md"
    assert DOCS.read_text().endswith(kinds_table()), remedy

"""The ledger under real processes: concurrent writers, killed writers, readers meanwhile."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import events
from holdfast.errors import ConfigError
from holdfast.events import LEDGER_NAME, Event, Ledger, read_ledger

pytestmark = pytest.mark.timeout(60)
WAIT_S = 30.0

WRITER = """
import sys, time
from pathlib import Path
from holdfast import events
folder, count, gate = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
print("ready", flush=True)
deadline = time.monotonic() + 30
while not gate.exists():
    assert time.monotonic() < deadline, "nobody opened the gate"
events.open_ledger(folder)
for number in range(count):
    events.set_step(number)
    events.record("persisted", op="head/mm/forward", detail={"number": number})
    print(number, flush=True)
"""


@contextmanager
def _writer(folder: Path, count: int, gate: Path, rank: int = 0):
    """Start a process that records ``count`` events once the gate is there; kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, (folder, count, gate))],
        env=os.environ | {"RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def _numbers(ledger: Path, **filters: object) -> list[int]:
    return [event.detail["number"] for _, event in read_ledger(ledger, **filters)]


def test_two_processes_write_at_once(tmp_path):
    count, gate = 100, tmp_path / "gate"
    with _writer(tmp_path, count, gate) as one, _writer(tmp_path, count, gate, rank=1) as other:
        assert [each.stdout.readline() for each in (one, other)] == ["ready\n"] * 2
        gate.touch()
        outputs = [each.communicate(timeout=WAIT_S) for each in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], outputs
    ledger = tmp_path / LEDGER_NAME
    for rank in range(2):
        assert _numbers(ledger, rank=rank) == list(range(count))
    identifiers = [identifier for identifier, _ in read_ledger(ledger)]
    assert identifiers == list(range(1, 2 * count + 1))


def test_a_killed_writer_loses_nothing_it_reported_and_its_ledger_takes_new_events(tmp_path):
    with _writer(tmp_path, 100_000, tmp_path) as writer:
        lines = [writer.stdout.readline() for _ in range(30)]
        writer.kill()
        lines += writer.communicate(timeout=WAIT_S)[0].splitlines()
    reported = [int(line) for line in lines[1:] if line.strip()]
    stored = _numbers(tmp_path / LEDGER_NAME)
    assert len(reported) >= 29
    assert writer.returncode == -signal.SIGKILL
    assert stored == list(range(len(stored)))
    # The kill can fall between storing and reporting, and tear the last reported line.
    assert len(stored) >= len(reported) - 1
    events.open_ledger(tmp_path)
    events.record("persisted", detail={"number": len(stored)})
    assert _numbers(tmp_path / LEDGER_NAME) == list(range(len(stored) + 1))


def test_reading_while_another_process_writes(tmp_path):
    seen: list[int] = []
    last, grew = 0, 0
    deadline = time.monotonic() + WAIT_S
    with _writer(tmp_path, 400, tmp_path) as writer:
        assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "0\n"]
        while len(seen) < 400 and time.monotonic() < deadline:
            fresh = list(read_ledger(tmp_path / LEDGER_NAME, after_id=last))
            seen += [event.detail["number"] for _, event in fresh]
            grew += bool(fresh)
            last = fresh[-1][0] if fresh else last
        writer.communicate(timeout=WAIT_S)
    assert writer.returncode == 0
    assert seen == list(range(400))
    assert grew > 1


def test_filters(tmp_path):
    ledger = Ledger(tmp_path / LEDGER_NAME)
    for number in range(12):
        kind, op = (
            "gemm_fault" if number % 2 else "injected",
            f"blocks.{number % 3}.attn/bmm#2/grad_a",
        )
        place = {"step": number // 4, "rank": number % 4}
        ledger.append(Event(kind=kind, op=op, detail={"number": number}, **place))
    ledger.close()
    for filters, found in [
        ({}, list(range(12))),
        ({"step": 1}, [4, 5, 6, 7]),
        ({"step": 0, "rank": 0}, [0]),
        ({"rank": 2}, [2, 6, 10]),
        ({"kind": "injected"}, [0, 2, 4, 6, 8, 10]),
        ({"op": "blocks.1"}, [1, 4, 7, 10]),
        ({"op": "#2/grad", "kind": "gemm_fault", "step": 2}, [9, 11]),
        ({"op": "%"}, []),
        ({"op": "' OR 1=1 --"}, []),
        ({"after_id": 10}, [10, 11]),
    ]:
        assert _numbers(ledger.path, **filters) == found, filters


def test_a_stored_event_is_read_back_equal(tmp_path):
    events.open_ledger(tmp_path)
    events.set_step(17)
    detail = {"index": [3, 4], "true": 0.1 + 0.2, "new": float("inf"), "note": "naïve ✓"}
    recorded = events.record(
        "gemm_fault", op="head/mm/forward", detector="abft", rung="correct", detail=detail
    )
    ((_, stored),) = read_ledger(tmp_path / LEDGER_NAME)
    assert stored == recorded
    assert recorded.step == 17
    assert recorded.time_s == pytest.approx(time.time(), abs=WAIT_S)


def test_without_a_ledger_events_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    events.set_step(2)
    first = events.record("injected", rank=3)
    second = events.record("rerun", step=9)
    assert events.recent() == [first, second]
    assert (first.step, first.rank, second.step) == (2, 3, 9)
    assert list(tmp_path.iterdir()) == []
    events.clear()
    assert events.recent() == []
    with pytest.raises(AssertionError, match="steps"):
        events.record("injected", steps=3)


def test_a_closed_ledger_gets_nothing_more(tmp_path):
    events.open_ledger(tmp_path)
    events.record("rerun")
    events.close_ledger()
    events.record("rollback")
    assert [event.kind for _, event in read_ledger(tmp_path / LEDGER_NAME)] == ["rerun"]
    assert [event.kind for event in events.recent()] == ["rerun", "rollback"]


def test_a_forked_child_does_not_write_through_the_parents_connection(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from holdfast import events; "
        "events.open_ledger(Path(sys.argv[1])); events.record('rerun'); child = os.fork(); "
        "events.record('evict' if child == 0 else 'rerun'); "
        "child == 0 and os._exit(0); os.waitpid(child, 0)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=WAIT_S, check=True)
    assert [event.kind for _, event in read_ledger(tmp_path / LEDGER_NAME)] == ["rerun"] * 2


def test_unusable_ledgers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no event ledger at"):
        list(read_ledger(tmp_path / LEDGER_NAME))
    (tmp_path / "text").write_text("this is not a database, and it is long enough to show it")
    with pytest.raises(ConfigError, match="cannot read the event ledger"):
        list(read_ledger(tmp_path / "text"))
    with pytest.raises(ConfigError, match="cannot use the event ledger"):
        Ledger(tmp_path / "missing" / LEDGER_NAME)

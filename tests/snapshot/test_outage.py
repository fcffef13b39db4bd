"""Snapshots that fail cost protection, which is said, and never the training."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from snapshot_trainer import Tiny, kinds
from snapshot_waits import until

from holdfast import config, events
from holdfast.errors import SmpUnavailable, SnapshotError
from holdfast.snapshot.client import outage
from holdfast.snapshot.client.outage import Outage
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.node.session import NotEnoughMemory

SHORT_S = 0.5


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon what does not answer."""
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(SHORT_S))
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.1)


@contextmanager
def stopped(snapshots: Snapshots) -> Iterator[int]:
    """Stop the SMP, which then holds its memory and answers nothing, and let it go on."""
    pid = int(snapshots.status()["pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.processes
@pytest.mark.representative
def test_a_stopped_smp_does_not_stop_the_training_and_snapshots_come_back(
    run: Tiny, run_dir: Path, impatient: None
) -> None:
    with run.snapshots(run_dir) as snapshots:
        run.train(range(1, 3), snapshots)
        assert snapshots.wait_committed() == 2
        with stopped(snapshots) as pid:
            with pytest.warns(RuntimeWarning, match="without new snapshots: no answer") as said:
                run.train(range(3, 6), snapshots)
            started_s = time.monotonic()
            run.train(range(6, 12), snapshots)
            assert time.monotonic() - started_s < SHORT_S, "nothing waits for it any more"
            assert (len(said), snapshots.suspended) == (1, True)
            with pytest.raises(SnapshotError):
                snapshots.rollback()
        digests: dict[int, str] = {}

        def protected_again() -> bool:
            digests.update(run.train(range(12 + len(digests), 13 + len(digests)), snapshots))
            return not snapshots.suspended

        until(protected_again, "snapshots come back")
        assert kinds().count("snapshots_suspended") == kinds().count("snapshots_resumed") == 1
        assert snapshots.status()["pid"] == pid
        step = snapshots.wait_committed()
        assert step is not None
        run.train(range(step + 1, step + 2))
        assert run.digest() != digests[step]
        assert snapshots.rollback() == step
        assert run.digest() == digests[step]


@pytest.mark.processes
def test_whoever_wants_errors_gets_them(run: Tiny, run_dir: Path, impatient: None) -> None:
    snapshots = run.snapshots(run_dir, strict=True)
    run.train(range(1, 3), snapshots)
    snapshots.wait_committed()
    with stopped(snapshots), pytest.raises(SmpUnavailable, match="no answer"):
        run.train(range(3, 6), snapshots)
    snapshots.close(finished=False)


@pytest.mark.processes
def test_closing_never_fails_a_finished_run(run: Tiny, run_dir: Path, impatient: None) -> None:
    snapshots = run.snapshots(run_dir)
    digests = run.train(range(1, 3), snapshots)
    with stopped(snapshots), pytest.warns(RuntimeWarning, match="without new snapshots"):
        snapshots.close(finished=True)
    assert run.digest() == digests[2]
    assert "snapshots_suspended" in kinds()


@pytest.mark.processes
def test_garbage_in_the_place_of_the_ledger_stops_neither_training_nor_checkpoints(
    run: Tiny, run_dir: Path, tmp_path: Path
) -> None:
    run_dir.mkdir()
    garbage = b"no database" * 1000
    (run_dir / events.LEDGER_NAME).write_bytes(garbage)
    with pytest.warns(RuntimeWarning, match="not a database"):
        events.open_ledger(run_dir)
    try:
        with run.snapshots(run_dir, persist_dir=tmp_path / "disk") as snapshots:
            digests = run.train(range(1, 3), snapshots)
            assert snapshots.persist().name == "step-2"
            run.train(range(3, 4))
            assert snapshots.rollback() == 2
            assert run.digest() == digests[2]
    finally:
        events.close_ledger()
    assert (run_dir / events.LEDGER_NAME).read_bytes() == garbage


def no_connection() -> Future[None]:
    raise AssertionError("there is nothing to connect to")


def connecting(error: Exception | None) -> Any:
    def connect() -> Future[None]:
        done: Future[None] = Future()
        done.set_exception(error) if error else done.set_result(None)
        return done

    return connect


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the time by the first item of a list."""
    now = [1000.0]
    monkeypatch.setattr(outage.time, "monotonic", lambda: now[0])
    return now


def due(calls: int, each_s: float, clock: list[float], commits: int = 0) -> bool:
    """Return whether it was said that so many snapshots in a row were not committed."""
    watched = Outage(Path("run"), strict=False)
    for _ in range(calls):
        clock[0] += each_s
        watched.watch(commits, "")
    return bool(watched.reason)


@pytest.mark.filterwarnings("ignore:training goes on")
def test_a_run_that_commits_nothing_is_told_so_by_number_and_time(clock: list[float]) -> None:
    timeout_s = config.timeout_s()
    assert not due(outage.MANY_UNCOMMITTED, 1.0, clock), "too few"
    assert not due(1000, 0.001, clock), "too soon: the other nodes may be as fast"
    assert due(12, 1.0 * timeout_s / 60, clock)
    assert not due(2, timeout_s, clock)
    assert due(3, timeout_s + 1, clock), (
        "a snapshot every hour is missed after two, not after eight"
    )


@pytest.mark.filterwarnings("ignore:training goes on")
def test_snapshots_that_are_committed_late_or_now_and_then_are_no_outage(
    clock: list[float],
) -> None:
    watched = Outage(Path("run"), strict=False)
    for call in range(1000):
        clock[0] += 2.0
        watched.watch(call // 4, "")
    assert not watched.reason
    assert kinds() == []


@pytest.mark.filterwarnings("ignore:training goes on")
def test_pauses_grow_and_begin_again_after_a_commit(clock: list[float]) -> None:
    broken = Outage(Path("run"), strict=False)
    pauses = []
    for _ in range(12):
        with broken.tolerated():
            raise NotEnoughMemory("a slot needs 3 bytes and 2 are available")
        started_s = clock[0]
        while not broken.may_begin(no_connection):
            clock[0] += 0.5
        pauses.append(clock[0] - started_s)
    assert pauses == [min(2.0**n, outage.LONGEST_PAUSE_S) for n in range(12)]
    assert kinds() == ["snapshots_suspended"]
    broken.watch(1, "")
    assert kinds() == ["snapshots_suspended", "snapshots_resumed"]
    with broken.tolerated():
        raise NotEnoughMemory("again")
    clock[0] += outage.FIRST_PAUSE_S
    assert broken.may_begin(no_connection)


@pytest.mark.filterwarnings("ignore:training goes on")
def test_a_lost_connection_is_made_again_before_the_next_snapshot(clock: list[float]) -> None:
    broken = Outage(Path("run"), strict=False)
    with broken.tolerated():
        raise SmpUnavailable("no answer")
    clock[0] += 1.0
    assert not broken.may_begin(connecting(SmpUnavailable("still none")))
    clock[0] += 1.5
    assert not broken.may_begin(no_connection), "the pause has grown"
    clock[0] += 1.0
    assert broken.may_begin(connecting(None))
    assert not broken.broken


def test_errors_that_are_no_trouble_with_snapshots_are_raised() -> None:
    for error in (ZeroDivisionError(), RuntimeError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)), Outage(Path("run"), strict=False).tolerated():
            raise error

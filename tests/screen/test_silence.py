"""What a worker is said to do that says nothing: hang, wait for its turn, or stand still."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from holdfast.screen import worker_handle
from holdfast.screen.messages import Trouble
from holdfast.screen.units import Unit
from holdfast.screen.worker_handle import WorkerHandle

pytestmark = [pytest.mark.processes, pytest.mark.representative]
PATIENCE_S, LIMIT_S = 1.0, 30.0


def _spin() -> None:
    while True:
        pass


def _wait() -> None:
    time.sleep(10 * LIMIT_S)


@contextmanager
def member(work: Callable[[], None]) -> Iterator[WorkerHandle]:
    """A worker that does this and says nothing, heard of just now."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=work, daemon=True)
    process.start()
    ours, _theirs = context.Pipe()
    found = WorkerHandle(Unit("core 0", 0), process, ours)
    try:
        yield found
    finally:
        process.kill()
        found.end()


def told(silent: WorkerHandle) -> Trouble:
    """What is said of it once patience is lost, and that nothing is said before."""
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + LIMIT_S:
        trouble = silent.silence(PATIENCE_S)
        if trouble is not None:
            assert time.monotonic() - silent.heard_s > PATIENCE_S
            return trouble
        time.sleep(0.05)
    raise AssertionError(f"nothing was said in {LIMIT_S:g} s")


def test_a_worker_that_computes_and_ends_nothing_hangs_and_makes_its_core_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with member(_spin) as spinning:
        spinning.last_op = "gemm.fp32"
        before = worker_handle._state(spinning.pid)[1]
        # As on a machine where nothing else runs, whatever runs beside the tests.
        monkeypatch.setattr(worker_handle, "_state", lambda pid: ("R", time.monotonic()))
        trouble = told(spinning)
        monkeypatch.undo()
        assert worker_handle._state(spinning.pid)[1] > before
    assert (trouble.unit, trouble.suspicious) == ("core 0", True)
    assert "hangs after gemm.fp32: it computes and ends nothing" in trouble.what


def test_a_worker_that_gets_no_time_makes_nobody_suspect() -> None:
    with member(_wait) as waiting:
        trouble = told(waiting)
    assert not trouble.suspicious
    assert "said nothing" in trouble.what
    assert "raise HOLDFAST_TIMEOUT_S" in trouble.what


def test_whoever_was_heard_of_is_not_silent() -> None:
    with member(_spin) as speaking:
        for _ in range(5):
            time.sleep(PATIENCE_S / 4)
            speaking.heard_s = time.monotonic()
            assert speaking.silence(PATIENCE_S) is None

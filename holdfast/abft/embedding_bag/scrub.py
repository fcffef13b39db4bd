"""Scrubbing, which checks all rows of a table, also those that no lookup reads."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast import config, events
from holdfast.abft.embedding_bag.suspects import repair_row
from holdfast.abft.embedding_bag.table import Table
from holdfast.errors import ConfigError, HoldfastError, UncorrectableFault
from holdfast.events import EventKind

_CHUNK_ROWS = 4096
_TICKS_PER_S = 20  # pieces per second of a slow scrub, so that it can be stopped
_LEAST_PASS_S = 0.1  # shortest time from one pass to the next, for small tables
KEPT_REPORTS = 100


@dataclass
class ScrubReport:
    """The result of a pass over a table: rows checked, damaged rows, those not repaired."""

    rows: int = 0
    rotten: list[int] = field(default_factory=list)
    unrepaired: list[int] = field(default_factory=list)
    duration_s: float = 0.0

    @property
    def healthy(self) -> bool:
        """True if every damaged row was repaired."""
        return not self.unrepaired


def scrub(
    table: Table,
    rows_per_second: float | None = None,
    *,
    repair: bool = True,
    progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
    known: dict[int, bytes] | None = None,
) -> ScrubReport:
    """Check every row of a table once.

    Args:
        table: The table, which other threads may read meanwhile.
        rows_per_second: Largest rate of checks; None for no limit.
        repair: Repairs rows with one wrong byte, and restores others from the table's source. A
            source that raises leaves its row damaged; a ``scrub_failed`` says why, once.
        progress: Called with the number of rows checked so far.
        stop: Ends the pass early when set.
        known: Bytes of rows that stayed damaged in earlier passes, by number; updated in place.
            Such rows are reported, but recorded as an event again only if their bytes change.

    Returns:
        The rows that were damaged and those that still are. Each is recorded as a ``row_fault``.

    Raises:
        ConfigError: The rate is not positive.
    """
    _check_rate(rows_per_second)
    stop, known = stop or threading.Event(), {} if known is None else known
    report, started_s = ScrubReport(), time.monotonic()
    chunk = _CHUNK_ROWS
    if rows_per_second is not None:
        chunk = max(1, min(chunk, int(rows_per_second / _TICKS_PER_S)))
    while report.rows < len(table) and not stop.is_set():
        count = min(chunk, len(table) - report.rows)
        found = table.rotten(report.rows, count)
        report.rotten += found
        report.unrepaired += [row for row in found if not _settled(table, row, repair, known)]
        report.rows += count
        if progress is not None:
            progress(report.rows)
        if rows_per_second is not None:
            due_s = started_s + report.rows / rows_per_second
            stop.wait(max(0.0, due_s - time.monotonic()))
    if report.rows == len(table):
        for row in known.keys() - set(report.unrepaired):  # another thread has repaired the row
            del known[row]
    report.duration_s = time.monotonic() - started_s
    return report


def _check_rate(rows_per_second: float | None) -> None:
    if rows_per_second is not None and not 0 < rows_per_second < float("inf"):
        raise ConfigError(f"rows_per_second = {rows_per_second} must be positive and finite")


def _settled(table: Table, row: int, repair: bool, known: dict[int, bytes]) -> bool:
    """Repair a damaged row if asked to; return whether it is repaired now."""
    stored = table.data[row].cpu().numpy().tobytes()
    if known.get(row) == stored and not (repair and table.source):
        return False
    before, known[row] = known.get(row), stored
    if not repair:
        events.record(EventKind.ROW_FAULT, op=table.name, detector="scrub", detail={"row": row})
        return False
    try:
        repair_row(table, row)
    except UncorrectableFault:
        return False
    except Exception as error:  # of the source: the other rows are checked nevertheless
        if before != stored:
            _report_failure(table, error, {"row": row})
        return False
    del known[row]
    return True


def _report_failure(table: Table, error: BaseException, detail: dict[str, object]) -> None:
    reason = f"{type(error).__name__}: {error}"
    detail = {"reason": reason, **detail}
    events.record(EventKind.SCRUB_FAILED, op=table.name, detector="scrub", detail=detail)


class Scrubber:
    """Background thread that checks all rows of a table repeatedly.

    A pass takes at least 0.1 s. A row that stays damaged is recorded as an event once, not in each
    pass. ``reports`` holds the results of the last ``KEPT_REPORTS`` passes. A pass that fails is
    recorded as ``scrub_failed`` (once for the same error after another), and the next one is tried;
    ``error`` is that of the latest pass, None if it succeeded.

    Args:
        table, rows_per_second, repair: As for :func:`scrub`.
        passes: Number of passes; None repeats until stopped.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`.
    """

    def __init__(
        self,
        table: Table,
        rows_per_second: float,
        *,
        repair: bool = True,
        passes: int | None = None,
    ) -> None:
        _check_rate(rows_per_second)
        self._table, self._rate, self._repair = table, rows_per_second, repair
        self._passes = passes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-scrub", daemon=True)
        self._done = 0
        self._reports: deque[ScrubReport] = deque(maxlen=KEPT_REPORTS)
        self._known: dict[int, bytes] = {}
        self.error: BaseException | None = None

    @property
    def reports(self) -> list[ScrubReport]:
        """Reports of the latest passes, the last one last."""
        return list(self._reports)

    @property
    def progress(self) -> float:
        """Share of the present pass that is done, 0 to 1."""
        return self._done / len(self._table)

    @property
    def running(self) -> bool:
        """True while the thread is alive."""
        return self._thread.is_alive()

    def start(self) -> "Scrubber":
        """Start the thread; it can be started once."""
        self._thread.start()
        return self

    def stop(self, timeout_s: float | None = None) -> list[ScrubReport]:
        """End the pass and wait for the thread, at most ``timeout_s`` (``HOLDFAST_TIMEOUT_S``).

        Returns:
            The reports so far; the last pass may be unfinished.

        Raises:
            HoldfastError: The thread does not end in time. If the latest pass failed, its error.
        """
        self._stop.set()
        return self.join(timeout_s)

    def join(self, timeout_s: float | None = None) -> list[ScrubReport]:
        """Wait until all passes are done; returns and raises what :meth:`stop` does."""
        patience_s = config.timeout_s() if timeout_s is None else timeout_s
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise HoldfastError(f"the scrubber of {self._table.name} runs after {patience_s:g} s")
        if self.error is not None:
            raise self.error
        return self.reports

    def _run(self) -> None:
        done = 0
        while not self._stop.is_set() and self._passes != done:
            started_s = time.monotonic()
            try:
                self._pass()
                self.error = None
            except BaseException as error:  # the thread outlives whatever a pass meets
                if repr(error) != repr(self.error):
                    _report_failure(self._table, error, {"pass": done})
                self.error = error
            done += 1
            if done != self._passes:
                self._stop.wait(max(0.0, started_s + _LEAST_PASS_S - time.monotonic()))

    def _pass(self) -> None:
        report = scrub(
            self._table,
            self._rate,
            repair=self._repair,
            progress=self._count,
            stop=self._stop,
            known=self._known,
        )
        self._reports.append(report)

    def _count(self, rows: int) -> None:
        self._done = rows

    def __enter__(self) -> "Scrubber":
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

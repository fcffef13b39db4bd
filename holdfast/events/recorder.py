"""Recording of events: they are kept in memory and given to subscribers and to the run's ledger.

Recording never fails the training. What the ledger does not take at once (a full disk, a lock that
another process holds, a damaged file) waits in memory and is tried again later. If too much waits,
the oldest events are dropped and counted.
"""

import atexit
import logging
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import Any

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.events.kinds import EventKind
from holdfast.events.ledger import FIELDS, LEDGER_NAME, Event, Ledger

DISCARDED = -2  # the step in a pass whose result nobody uses: no fault is injected
KEPT = 10_000  # events kept in memory, and events that may wait for the ledger
PATIENCE_S = 1.0  # the longest that recording an event waits for the ledger
RETRY_S = 30.0  # after a failure the ledger is left alone for so long
BATCH = 500  # events per transaction, within SQLite's limit of values

Callback = Callable[[Event], None]

_logger = logging.getLogger("holdfast.events")


def _complain(message: str, *, trace: bool = False) -> None:
    """Log a failure to record events; exceptions of the application's log handlers are ignored."""
    with suppress(Exception):
        _logger.warning(message, exc_info=trace)


class _Outbox:
    """Queue of events that are to be written to a ledger.

    Attributes:
        run_id: Id of the run to which the ledger must belong; empty for whichever is there, None
            while it is not known, in which case the events wait.
    """

    def __init__(self, path: Path, run_id: str | None = "") -> None:
        self.path, self.run_id, self.retired = path, run_id, False
        self.waiting: deque[Event] = deque()
        self.dropped = 0
        self._ledger: Ledger | None = None
        self._retry_at_s = 0.0
        self._said = False

    def put(self, event: Event) -> None:
        """Add an event, and write the queued events to the ledger if it accepts them."""
        if len(self.waiting) == KEPT:
            self.waiting.popleft()
            self.dropped += 1
        self.waiting.append(event)
        self.flush()

    def flush(self, *, now: bool = False) -> bool:
        """Write the queued events; return True if none is left.

        With ``now`` it also tries shortly after a failure.
        """
        if self.run_id is None or (not now and time.monotonic() < self._retry_at_s):
            return not self.waiting
        batch: list[Event] = []
        try:
            if self._ledger is not None and not self._ledger.is_in_place():
                self._ledger.close()
                self._ledger = None
            if self._ledger is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._ledger = Ledger(self.path, PATIENCE_S, self.run_id)
            while batch := list(islice(self.waiting, BATCH)):
                self._ledger.append(*batch)
                self._forget(len(batch))
        except (ConfigError, OSError) as error:
            self._retry_at_s = time.monotonic() + RETRY_S
            self._say(f"{error} (events wait in memory meanwhile, and training goes on)")
            return False
        except Exception as error:  # values that no ledger can hold
            self._forget(len(batch))
            self.dropped += len(batch)
            self._say(f"an event cannot be stored and was dropped: {error!r}")
        return not self.waiting

    def close(self) -> None:
        """Write the queued events if possible without waiting, and close the ledger."""
        if self.waiting and not self.flush(now=True):
            _complain(f"{len(self.waiting)} events were not stored in {self.path}")
        if self._ledger is not None:
            self._ledger.close()

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self.waiting.popleft()

    def _say(self, message: str) -> None:
        if not self._said:
            self._said = True
            _complain(message)
            with suppress(Warning):  # where warnings are errors
                warnings.warn(message, RuntimeWarning, stacklevel=2)


@dataclass(eq=False)
class _Subscription:
    callback: Callback
    failed: bool = False

    def publish(self, event: Event) -> None:
        try:
            self.callback(event)
        except Exception:
            if not self.failed:
                self.failed = True
                _complain("a subscriber to events raised, which is not said again", trace=True)


@dataclass
class _Process:
    """The events, subscriptions, ledger and present step of this process."""

    recent: deque[Event] = field(default_factory=lambda: deque(maxlen=KEPT))
    subscriptions: list[_Subscription] = field(default_factory=list)
    outbox: _Outbox | None = None
    step: int = -1
    lock: RLock = field(default_factory=RLock)


_process = _Process()


def open_ledger(run_dir: Path) -> None:
    """Send this process's events to the ledger of a run, from now on.

    If the ledger cannot be opened, one warning is logged and opening is tried again later.
    """
    close_ledger()
    with _process.lock:
        _process.outbox = _Outbox(run_dir / LEDGER_NAME)
        _process.outbox.flush()


def ensure_ledger(run_dir: Path) -> None:
    """Keep events for the ledger of a run until ``claim_ledger``, unless one is in use already."""
    with _process.lock:
        held = _process.outbox
        if held is None or held.run_id is None or held.retired:
            if held is not None:
                held.close()
            _process.outbox = _Outbox(run_dir / LEDGER_NAME, None)


def retire_ledger(run_dir: Path) -> None:
    """Let the next run of this process have its own ledger; until then this one takes events."""
    with _process.lock:
        held = _process.outbox
        if held is not None and held.run_id and held.path.parent == run_dir:
            held.retired = True


def claim_ledger(run_id: str) -> None:
    """Write to the ledger that ``ensure_ledger`` chose, as the run with this id.

    The ledger of another run that is there is set aside (``Ledger``).
    """
    with _process.lock:
        if _process.outbox is not None and _process.outbox.run_id is None:
            _process.outbox.run_id = run_id
            _process.outbox.flush()


def ledger_dir() -> Path | None:
    """Return the directory of the run whose ledger takes this process's events; None without."""
    outbox = _process.outbox
    return None if outbox is None else outbox.path.parent


def close_ledger() -> None:
    """Stop writing to the ledger; events are still kept in memory."""
    with _process.lock:
        outbox, _process.outbox = _process.outbox, None
        if outbox is not None:
            outbox.close()


def flush() -> bool:
    """Write the events that wait for the ledger, and wait for it up to ``config.timeout_s()``.

    Returns:
        True if every event is stored or no ledger is open.
    """
    deadline_s: float | None = None
    while True:
        with _process.lock:
            if _process.outbox is None or _process.outbox.flush(now=True):
                return True
        if deadline_s is None:
            deadline_s = time.monotonic() + config.timeout_s()
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)


def dropped() -> int:
    """Return the number of dropped events that the ledger does not yet report as dropped."""
    return 0 if _process.outbox is None else _process.outbox.dropped


def set_step(step: int) -> None:
    """Set the training step that the following events are attributed to.

    It is negative outside a step: -1, or ``DISCARDED`` in a pass whose result nobody uses.
    """
    _process.step = step
    if _process.outbox is not None and _process.outbox.waiting:
        _store(None)


def current_step() -> int:
    """Return the training step that events are attributed to; negative outside a step."""
    return _process.step


def record(kind: EventKind, **values: Any) -> Event:
    """Make an event, keep it in memory, and store it in the ledger if one is open.

    Args:
        kind: Kind of the event.
        values: Fields of ``Event``; step, rank, host and time are those of this process if they are
            not given.
    """
    assert values.keys() <= FIELDS, values.keys() - FIELDS
    if "rank" not in values:
        values["rank"] = config.rank()
    values.setdefault("step", _process.step)
    values.setdefault("host", socket.gethostname())
    values.setdefault("time_s", time.time())
    event = Event(kind=EventKind(kind), **values)
    _process.recent.append(event)
    if _process.outbox is not None:
        _store(event)
    for subscription in tuple(_process.subscriptions):
        subscription.publish(event)
    return event


def _store(event: Event | None) -> None:
    lost = 0
    with _process.lock:
        outbox = _process.outbox
        if outbox is None:
            return
        if event is not None:
            outbox.put(event)
        if (event is None and outbox.flush()) or not outbox.waiting:
            lost, outbox.dropped = outbox.dropped, 0
    if lost:
        record(EventKind.EVENTS_DROPPED, rank=-1, detail={"count": lost})


def record_config() -> None:
    """Record which values of a config file are in force in this process, if there is one."""
    if found := config.used():
        record(EventKind.CONFIG_IN_FORCE, detail=found)


def recent() -> list[Event]:
    """Return the events of this process, oldest first (the latest 10,000)."""
    return list(_process.recent)


def clear() -> None:
    """Forget the events kept in memory (the ledger keeps its own)."""
    _process.recent.clear()


def subscribe(callback: Callback) -> Callable[[], None]:
    """Call a function with each event that this process records from now on.

    It is called in the thread that records, after the event was stored. An exception is logged
    once, and neither training nor other subscribers notice it.

    Args:
        callback: Function of the event.

    Returns:
        A function that ends the subscription; a second call does nothing.
    """
    subscription = _Subscription(callback)
    _process.subscriptions.append(subscription)

    def unsubscribe() -> None:
        with suppress(ValueError):
            _process.subscriptions.remove(subscription)

    return unsubscribe


def _log(event: Event) -> None:
    """Log an event; no other function logs faults."""
    _logger.log(EventKind(event.kind).level, "%s", event)


def _after_fork() -> None:
    # An SQLite connection must not cross a fork, and a lock may be held by a thread that did not.
    _process.outbox, _process.lock = None, RLock()


subscribe(_log)
atexit.register(close_ledger)
os.register_at_fork(after_in_child=_after_fork)

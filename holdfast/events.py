"""The fault-event record and the ledger it is kept in.

Every decision of every rung is one :class:`Event`. A process keeps its recent events in memory;
once :func:`open_ledger` was called they also go to the run's SQLite ledger (WAL), which several
processes write and anyone may read while the run goes on. A healthy step writes nothing.
"""

import fcntl
import json
import os
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast import config
from holdfast.errors import ConfigError

LEDGER_NAME = "events.sqlite"
RUNGS = ("", "correct", "recompute", "rollback", "rebuild", "reload")

_COLUMNS = "time_s, kind, step, rank, host, device, op, detector, rung, duration_s, detail"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, time_s REAL, kind TEXT, step INTEGER, rank INTEGER, host TEXT,
    device TEXT, op TEXT, detector TEXT, rung TEXT, duration_s REAL, detail TEXT);
CREATE INDEX IF NOT EXISTS events_by_step ON events (step, rank);
"""


@dataclass(frozen=True)
class Event:
    """One thing that happened to a run.

    ``kind`` says what (``injected``, ``gemm_fault``, ``nonfinite_input``, ``rerun``, ``restored``
    …); ``op`` where (a matmul site, a module or empty); ``detector`` what saw it; ``rung`` which
    rung of the ladder answered (one of ``RUNGS``); ``duration_s`` how long the answer took.
    """

    kind: str
    op: str = ""
    detector: str = ""
    rung: str = ""
    duration_s: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
    step: int = -1
    rank: int = -1
    host: str = ""
    device: str = "cpu"
    time_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The event as plain JSON-ready values."""
        return asdict(self)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's advisory lock: one process at a time opens a new ledger."""
    descriptor = os.open(directory, os.O_RDONLY)
    deadline_s = time.monotonic() + config.timeout_s()
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"{directory} was locked for {config.timeout_s():g} s: end the process that "
                    "holds it, or give another run directory"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _unusable(path: Path, error: sqlite3.Error) -> ConfigError:
    return ConfigError(
        f"cannot use the event ledger {path}: {error}; free the disk, make it writable, or give "
        "another run directory"
    )


class Ledger:
    """The SQLite file that holds a run's events; opened anew by each process.

    Raises:
        ConfigError: the file cannot be created or written, with the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._connection = sqlite3.connect(
                path, timeout=config.timeout_s(), isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise _unusable(path, error) from error
        try:
            with locked(path.parent):  # switching to WAL ignores SQLite's own busy timeout
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self._connection.close()
            raise _unusable(path, error) from error

    def append(self, event: Event) -> None:
        """Store one event durably against a SIGKILL of the writer (one transaction)."""
        row = event.as_dict() | {"detail": json.dumps(event.detail)}
        names = _COLUMNS.split(", ")
        marks = ", ".join("?" for _ in names)
        try:
            self._connection.execute(
                f"INSERT INTO events ({_COLUMNS}) VALUES ({marks})", [row[name] for name in names]
            )
        except sqlite3.Error as error:
            raise _unusable(self.path, error) from error

    def close(self) -> None:
        """Close the connection; the file stays."""
        self._connection.close()


def read_ledger(
    path: Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    kind: str | None = None,
    op: str | None = None,
    after_id: int = 0,
) -> Iterator[tuple[int, Event]]:
    """Stored events with their ids, oldest first; ``op`` matches any part of the name.

    Raises:
        ConfigError: there is no ledger at ``path``, or it cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"no event ledger at {path}: give the directory of a holdfast run")
    exact = {"step": step, "rank": rank, "kind": kind}
    wanted = {name: value for name, value in exact.items() if value is not None}
    where = ["id > ?", *(f"{name} = ?" for name in wanted), *(["instr(op, ?)"] if op else [])]
    values = [after_id, *wanted.values(), *([op] if op else [])]
    query = f"SELECT id, {_COLUMNS} FROM events WHERE {' AND '.join(where)} ORDER BY id"
    try:
        with closing(sqlite3.connect(path, timeout=config.timeout_s())) as connection:
            rows = connection.execute(query, values).fetchall()
    except (sqlite3.Error, OverflowError) as error:
        raise ConfigError(f"cannot read the event ledger {path}: {error}") from error
    names = _COLUMNS.split(", ")
    for identifier, *columns in rows:
        record: dict[str, Any] = dict(zip(names, columns, strict=True))
        yield identifier, Event(**record | {"detail": json.loads(record["detail"])})


class _Process:
    """What this process knows about itself and its latest events."""

    def __init__(self) -> None:
        self.recent: deque[Event] = deque(maxlen=10_000)
        self.ledger: Ledger | None = None
        self.step = -1


_process = _Process()


def open_ledger(run_dir: Path) -> None:
    """Send this process's events to the ledger of a run, from now on."""
    close_ledger()
    run_dir.mkdir(parents=True, exist_ok=True)
    _process.ledger = Ledger(run_dir / LEDGER_NAME)


def ensure_ledger(run_dir: Path) -> None:
    """As :func:`open_ledger`, unless events go to a ledger already."""
    if _process.ledger is None:
        open_ledger(run_dir)


def close_ledger() -> None:
    """Stop writing to the ledger; events are still kept in memory."""
    if _process.ledger is not None:
        _process.ledger.close()
    _process.ledger = None


def set_step(step: int) -> None:
    """Say which training step the following events belong to."""
    _process.step = step


def current_step() -> int:
    """The training step events are attributed to; −1 outside a step."""
    return _process.step


def record(kind: str, **values: Any) -> Event:
    """Make an event of here and now, keep it, store it in the ledger if one is open."""
    known = {item.name for item in fields(Event)}
    assert values.keys() <= known, values.keys() - known
    here: dict[str, Any] = {
        "step": _process.step,
        "rank": config.rank(),
        "host": socket.gethostname(),
        "time_s": time.time(),
    }
    event = Event(kind=kind, **here | values)
    _process.recent.append(event)
    if _process.ledger is not None:
        _process.ledger.append(event)
    return event


def record_config() -> None:
    """Say which values of a config file are in force in this process, if there is one."""
    if found := config.used():
        record("config_in_force", detail=found)


def recent() -> list[Event]:
    """The events of this process, oldest first (the latest 10,000)."""
    return list(_process.recent)


def clear() -> None:
    """Forget the events kept in memory (the ledger keeps its own)."""
    _process.recent.clear()


def _after_fork() -> None:
    # An SQLite connection must not cross a fork.
    _process.ledger = None


os.register_at_fork(after_in_child=_after_fork)

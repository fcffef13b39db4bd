"""The ledger: one SQLite file (WAL) for each run, which several processes write and others read.

It holds the id of its run. Where a run finds the ledger of another one in its run directory, that
one is renamed, so that neither reads nor writes what is the other's.
"""

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.events.kinds import EventKind
from holdfast.logs import printable
from holdfast.text_files import UNPARSABLE

# The name of the ledger in the directory of a run.
LEDGER_NAME = "events.sqlite"
STEPS_NAME = "steps.jsonl"  # of ``holdfast.events.steps``
SUMMARY_NAME = "guard.{rank}.json"  # of ``holdfast.events.steps``
DETAIL_LENGTH = 300  # in characters, of an event as it is logged
# The rungs that an event may have been answered by, from the cheapest on; "" for none.
RUNGS = ("", "correct", "recompute", "rollback", "rebuild", "reload")

_COLUMNS = "time_s, kind, step, rank, host, device, op, detector, rung, duration_s, detail"
_NAMES = _COLUMNS.split(", ")
_TYPES = {
    **dict.fromkeys(("time_s", "duration_s"), float | int),
    **dict.fromkeys(("kind", "host", "device", "op", "detector", "rung"), str),
    **dict.fromkeys(("step", "rank"), int),
    "detail": dict,
}
_MARKS = f"({', '.join('?' for _ in _NAMES)})"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, time_s REAL, kind TEXT, step INTEGER, rank INTEGER, host TEXT,
    device TEXT, op TEXT, detector TEXT, rung TEXT, duration_s REAL, detail TEXT);
CREATE INDEX IF NOT EXISTS events_by_step ON events (step, rank);
CREATE TABLE IF NOT EXISTS run (id TEXT);
"""


@dataclass(frozen=True)
class Event:
    """One thing that happened to a run.

    Attributes:
        kind: An ``EventKind``, or a plain string if another release of holdfast wrote the event.
        op: Place of the event: a site such as a matrix product, a module, or empty.
        detector: Name of the detector that found it.
        rung: Rung of the ladder that answered, one of ``RUNGS``.
        duration_s: Duration of the answer, in seconds.
        detail: Further values, by name.
        step: Training step; -1 outside a step.
        rank: Number of the rank; -1 for processes that belong to no rank.
        host: Name of the host.
        device: Name of the device in torch.
        time_s: Time when it was recorded, in seconds since 1970.
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

    def as_dict(self) -> dict[str, object]:
        """Return the event as plain JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        """Describe the event in one line, as it is logged."""
        parts = [f"step {self.step}"] if self.step >= 0 else []
        parts += [f"rank {self.rank}"] if self.rank >= 0 else []
        parts += [self.op] if self.op else []
        parts += [f"seen by {self.detector}"] if self.detector else []
        parts += [f"answered by {self.rung}"] if self.rung else []
        detail = ", ".join(f"{name}={value}" for name, value in self.detail.items())
        if len(detail) > DETAIL_LENGTH:
            detail = f"{detail[:DETAIL_LENGTH]}…"
        text = f"{EventKind.summary_of(self.kind)} ({self.kind}): {', '.join(parts)}"
        return printable(" ".join(f"{text}; {detail}".split()) if detail else text)


FIELDS = frozenset(item.name for item in fields(Event))


@contextmanager
def locked(directory: Path, patience_s: float | None = None) -> Iterator[None]:
    """Hold the advisory lock of a directory, so that one process at a time opens a new ledger.

    Args:
        directory: An existing directory.
        patience_s: Longest wait for the lock; by default ``config.timeout_s()``.

    Raises:
        ConfigError: Another process held the lock all the time.
    """
    patience_s = config.timeout_s() if patience_s is None else patience_s
    descriptor = os.open(directory, os.O_RDONLY)
    deadline_s = time.monotonic() + patience_s
    try:
        while not try_lock(descriptor):
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"{directory} was locked for {patience_s:g} s: end the process that holds it, "
                    "or give another run directory"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the advisory lock of an open file; return False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Ledger:
    """The SQLite file that holds a run's events; each process opens it separately.

    Args:
        path: Path of the file, which is made if it does not exist, in an existing directory.
        patience_s: Longest wait for a lock that another process holds, when opening and in each
            ``append``; by default ``config.timeout_s()``.
        run_id: Id of the run; a ledger without one gets it, and that of another run is renamed to
            ``events-<its id>.sqlite``. Empty to use the ledger that is there.

    Raises:
        ConfigError: The file cannot be created or written; the message says why.
    """

    def __init__(self, path: Path, patience_s: float | None = None, run_id: str = "") -> None:
        self.path = path
        self._patience_s = config.timeout_s() if patience_s is None else patience_s
        self._connect()
        try:
            # Switching to WAL ignores SQLite's own busy timeout.
            with self._reasons(), locked(path.parent, self._patience_s):
                self._set_up()
                if run_id:
                    self._claim(run_id)
        except BaseException:
            self.close()
            raise
        self._inode = _inode(path)

    def _connect(self) -> None:
        with self._reasons():
            self._connection = sqlite3.connect(
                self.path, timeout=self._patience_s, isolation_level=None, check_same_thread=False
            )

    def _set_up(self) -> None:
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.executescript(_SCHEMA)

    def _claim(self, run_id: str) -> None:
        owner = self._connection.execute("SELECT id FROM run").fetchone()
        if owner is not None and owner[0] != run_id:
            self.close()
            _rename(self.path, "", str(owner[0]))
            _rename(self.path, run_id, "")  # if it was set aside before
            self._connect()
            self._set_up()
            owner = self._connection.execute("SELECT id FROM run").fetchone()
        if owner is None:
            self._connection.execute("INSERT INTO run VALUES (?)", [run_id])

    def is_in_place(self) -> bool:
        """Return whether the file is still the one at ``path``, and was not renamed or removed."""
        return _inode(self.path) == self._inode

    def append(self, *events: Event) -> None:
        """Store events in one transaction, durably against a SIGKILL of the writer.

        Raises:
            ConfigError: The file cannot be written; none of the events was stored.
        """
        rows = [
            event.as_dict() | {"detail": json.dumps(event.detail, default=str)} for event in events
        ]
        places = ", ".join(_MARKS for _ in rows)
        with self._reasons():
            self._connection.execute(
                f"INSERT INTO events ({_COLUMNS}) VALUES {places}",
                [row[name] for row in rows for name in _NAMES],
            )

    def close(self) -> None:
        """Close the connection; the file stays."""
        self._connection.close()

    @contextmanager
    def _reasons(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ConfigError(
                f"cannot use the event ledger {self.path}: {error}; free the disk, make it "
                "writable, or give another run directory"
            ) from error


def _rename(path: Path, before: str, after: str) -> None:
    """Rename a ledger and what Guards wrote beside it; the names contain a run's id, or none."""
    names = [*(path.name + suffix for suffix in ("", "-wal", "-shm")), STEPS_NAME]
    stem, _, _ = SUMMARY_NAME.partition(".")
    summaries = path.parent.glob(_labelled(SUMMARY_NAME.format(rank="*"), before))
    names += [f"{stem}.{found.name.partition('.')[2]}" for found in summaries]
    for name in names:
        with suppress(FileNotFoundError):
            path.with_name(_labelled(name, before)).replace(path.with_name(_labelled(name, after)))


def _labelled(name: str, run_id: str) -> str:
    stem, dot, rest = name.partition(".")
    label = "".join(character if character.isalnum() else "_" for character in run_id)
    return f"{stem}-{label}{dot}{rest}" if run_id else name


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def read_ledger(
    path: Path,
    *,
    step: int | None = None,
    rank: int | None = None,
    kind: str | None = None,
    op: str | None = None,
    after_id: int = 0,
) -> Iterator[tuple[int, Event]]:
    """Read stored events with their ids, oldest first; ``op`` matches any part of the name.

    Raises:
        ConfigError: There is no ledger at ``path``, or it cannot be read.
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
    except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
        raise ConfigError(f"cannot read the event ledger {path}: {error}") from error
    for identifier, *columns in rows:
        yield identifier, _event(path, identifier, dict(zip(_NAMES, columns, strict=True)))


def _event(path: Path, identifier: int, record: dict[str, Any]) -> Event:
    """Make an event of a row, which a damaged or edited ledger may hold with other types."""
    try:
        event = Event(**record | {"detail": json.loads(record["detail"])})
    except (*UNPARSABLE, TypeError) as error:
        raise ConfigError(f"event {identifier} of {path} is damaged: {error}") from error
    for name, kind in _TYPES.items():
        if not isinstance(getattr(event, name), kind):
            raise ConfigError(
                f"event {identifier} of {path} is damaged: its {name} is {getattr(event, name)!r}"
            )
    return event

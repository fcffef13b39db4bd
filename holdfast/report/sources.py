"""What a run directory holds, read as it grows: metrics, ledgers, results, state and snapshots."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.events import LEDGER_NAME, Event, read_ledger
from holdfast.report.run_files import FATAL_NAME, LOCK_NAME, METRICS_NAME, SETTINGS_NAME
from holdfast.snapshot import launch, supervisor
from holdfast.snapshot.persist import Checkpoints

MARKS = (SETTINGS_NAME, LEDGER_NAME, METRICS_NAME)


def is_run(path: Path) -> bool:
    """Whether a directory holds a training run, of ``holdfast train`` or of a Guard."""
    return any((path / name).is_file() for name in MARKS)


def places(run_dir: Path) -> list[Path]:
    """The run directory, and those in it that hold what its other hosts wrote."""
    inner = (path for path in sorted(run_dir.iterdir()) if path.is_dir())
    hosts = [path for path in inner if is_run(path) and not (path / SETTINGS_NAME).exists()]
    return [run_dir, *hosts]


@dataclass(frozen=True)
class StepLine:
    """One line of ``metrics.jsonl``; ``step`` counts from 1."""

    step: int
    loss: float
    grad_norm: float
    seconds: float


class MetricsTail:
    """The lines of ``metrics.jsonl``: each is handed out once, when it is complete."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}

    def read(self) -> Iterator[StepLine]:
        """The lines since the last call.

        Raises:
            ConfigError: a line is not what the trainer writes; it is named, and passed over by
                the next call.
        """
        for path in (place / METRICS_NAME for place in places(self._run_dir)):
            for line in self._fresh(path):
                yield _parse(line, path)

    def _fresh(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; make it readable") from error
        self._offsets[path] = offset + len(complete) + len(newline)
        return complete.splitlines()


def _parse(line: bytes, path: Path) -> StepLine:
    try:
        values = json.loads(line)
        numbers = (float(values[name]) for name in ("loss", "grad_norm", "seconds"))
        return StepLine(int(values["step"]), *numbers)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged: {line[:60]!r} is no line of metrics; remove that line"
        ) from error


@dataclass
class Metrics:
    """What the lines of ``metrics.jsonl`` add up to; of a step done twice the later counts."""

    loss: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    repeated: int = 0  # steps done again after a restart
    repeated_s: float = 0.0

    def take(self, lines: Iterable[StepLine]) -> None:
        """Add lines, in the order in which they were written."""
        for line in lines:
            if line.step in self.loss:
                self.repeated += 1
                self.repeated_s += line.seconds
            self.loss[line.step], self.seconds[line.step] = line.loss, line.seconds

    @property
    def steps_done(self) -> int:
        """The newest step; 0 before the first."""
        return max(self.loss, default=0)


class Ledgers:
    """The events of a run, of all its hosts; each is handed out once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._last: dict[Path, int] = {}

    def read(self) -> Iterator[Event]:
        """The events since the last call, by time within a host; raises ConfigError."""
        for place in places(self._run_dir):
            path = place / LEDGER_NAME
            if not path.is_file():
                continue
            for identifier, event in read_ledger(path, after_id=self._last.get(path, 0)):
                self._last[path] = identifier
                yield event


def read_json(path: Path) -> Any:
    """A JSON file's value; raises ConfigError if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give another run directory") from error


def read_settings(run_dir: Path) -> dict[str, Any]:
    """The run's settings as they were written; empty for a Guard in a script of one's own."""
    path = run_dir / SETTINGS_NAME
    values = read_json(path) if path.exists() else {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not the record of a run: give another run directory")
    return values


def read_results(run_dir: Path) -> list[dict[str, Any]]:
    """What the ranks that finished left behind, by rank."""
    paths = [path for place in places(run_dir) for path in place.glob("result-*.json")]
    return [read_json(path) for path in sorted(paths, key=lambda path: (len(path.name), path))]


def read_smps(run_dir: Path) -> list[dict[str, Any]]:
    """The status of each living SMP and its ``node``; with ``error`` for one that is silent."""
    found = []
    for place in places(run_dir):
        try:
            status = launch.smp_status(place)
        except SmpUnavailable as error:
            status = {"error": str(error)}
        if status is not None:
            cluster = status.get("cluster") or {}
            folder = "0" if place == run_dir else place.name
            found.append({"node": str(cluster.get("node", folder)), **status})
    return found


def read_checkpoints(run_dir: Path) -> list[int]:
    """The steps that were persisted by this run and are still there."""
    steps: set[int] = set()
    for place in places(run_dir):
        told = supervisor.read_settings(place)
        steps |= set(Checkpoints(Path(told.directory)).steps()) if told is not None else set()
    return sorted(steps)


def read_fatal(run_dir: Path) -> str:
    """Why the run cannot go on; empty if it can."""
    path = run_dir / FATAL_NAME
    return path.read_text(errors="replace").strip() if path.exists() else ""


def is_locked(run_dir: Path) -> bool:
    """Whether a launcher holds the directory: the kernel is asked, the lock is not touched."""
    with suppress(OSError):
        inode = f":{(run_dir / LOCK_NAME).stat().st_ino}"
        return any(word.endswith(inode) for word in Path("/proc/locks").read_text().split())
    return False


def last_sign_s(run_dir: Path) -> float:
    """When the run last wrote anything, in seconds since 1970; 0 if it never did."""
    paths = [place / name for place in places(run_dir) for name in (METRICS_NAME, LEDGER_NAME)]
    paths += [path.with_name(f"{path.name}-wal") for path in paths]
    return max((os.stat(path).st_mtime for path in paths if path.exists()), default=0.0)

"""Readers of the files of a run directory, which may still grow."""

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
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.node import launch, supervisor

Record = dict[str, Any]  # an object of a JSON file, or the status of an SMP
MARKS = (SETTINGS_NAME, LEDGER_NAME, METRICS_NAME)


def is_run(path: Path) -> bool:
    """Return whether a directory holds a run of ``holdfast train`` or of a Guard."""
    return any((path / name).is_file() for name in MARKS)


def places(run_dir: Path) -> list[Path]:
    """List the run directory and the directories in it that its other hosts wrote."""
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
    """Reader of a growing ``metrics.jsonl`` that returns each line once, when it is complete."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}

    def read(self) -> Iterator[StepLine]:
        """Yield the lines since the last call.

        A line that is not what the trainer writes raises ConfigError; the next call passes over it.
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
    """Loss and seconds by step; if a step was repeated, its later line counts."""

    loss: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    repeated: int = 0  # steps done again after a restart
    repeated_s: float = 0.0

    def take(self, lines: Iterable[StepLine]) -> None:
        """Add lines of ``metrics.jsonl``, in the order in which they were written."""
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
    """The events of all hosts of a run; each is returned once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._last: dict[Path, int] = {}

    def read(self) -> Iterator[Event]:
        """Yield the events since the last call, in order of time within a host."""
        for place in places(self._run_dir):
            path = place / LEDGER_NAME
            if not path.is_file():
                continue
            for identifier, event in read_ledger(path, after_id=self._last.get(path, 0)):
                self._last[path] = identifier
                yield event


def read_json(path: Path) -> Any:
    """Read a JSON file; raise ConfigError if that fails."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give another run directory") from error


def read_settings(run_dir: Path) -> Record:
    """Read the settings of a run; they are empty for a Guard in the user's own script."""
    path = run_dir / SETTINGS_NAME
    values = read_json(path) if path.exists() else {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not the record of a run: give another run directory")
    return values


def read_results(run_dir: Path) -> list[Record]:
    """Read the results that finished ranks wrote, by rank."""
    paths = [path for place in places(run_dir) for path in place.glob("result-*.json")]
    return [read_json(path) for path in sorted(paths, key=lambda path: (len(path.name), path))]


def coverage_of(results: Iterable[Record]) -> Record | None:
    """Return the coverage of matmuls from the results of the first rank that has one."""
    return next((result["coverage"] for result in results if result.get("coverage")), None)


def read_smps(run_dir: Path) -> list[Record]:
    """Ask each living SMP for its status; the value of one that does not answer is an ``error``."""
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
    """List the steps that this run has persisted and that are still there."""
    steps: set[int] = set()
    for place in places(run_dir):
        told = supervisor.read_settings(place)
        steps |= set(Checkpoints(Path(told.directory)).steps()) if told is not None else set()
    return sorted(steps)


def read_fatal(run_dir: Path) -> str:
    """Read the reason why the run cannot go on; it is empty if it can."""
    path = run_dir / FATAL_NAME
    return path.read_text(errors="replace").strip() if path.exists() else ""


def is_locked(run_dir: Path) -> bool:
    """Return whether a launcher holds the directory's lock, according to ``/proc/locks``."""
    with suppress(OSError):
        inode = f":{(run_dir / LOCK_NAME).stat().st_ino}"
        return any(word.endswith(inode) for word in Path("/proc/locks").read_text().split())
    return False


def last_sign_s(run_dir: Path) -> float:
    """Return the time of the run's latest write, in seconds since 1970; 0 if there is none."""
    paths = [place / name for place in places(run_dir) for name in (METRICS_NAME, LEDGER_NAME)]
    paths += [path.with_name(f"{path.name}-wal") for path in paths]
    return max((os.stat(path).st_mtime for path in paths if path.exists()), default=0.0)

"""Readers of the files of a run directory, which may still grow."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.events import LEDGER_NAME, Event, read_ledger
from holdfast.events.ledger import STEPS_NAME, SUMMARY_NAME
from holdfast.report.record_checks import check_result, check_settings, check_summary
from holdfast.report.run_files import FATAL_NAME, LOCK_NAME, METRICS_NAME, SETTINGS_NAME
from holdfast.snapshot.node import launch, supervisor
from holdfast.snapshot.protocol.roster import ProtocolViolation
from holdfast.text_files import UNPARSABLE, read_text

Record = dict[str, Any]  # an object of a JSON file, or the status of an SMP
MARKS = (SETTINGS_NAME, LEDGER_NAME, METRICS_NAME, STEPS_NAME)


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
    """One line of metrics: a step, or several up to ``step`` with their mean ``seconds``.

    ``step`` counts from 1. ``time_s`` is when it was written, in seconds since 1970, if that is
    known.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float
    steps: int = 1
    time_s: float = 0.0

    def again(self, done: int) -> int:
        """Return how many of these steps are among the first ``done``."""
        return min(self.steps, max(0, done - self.step + self.steps))


class MetricsTail:
    """Reader of a run's growing metrics that returns each line once, when it is complete.

    ``holdfast train`` writes ``metrics.jsonl``, a Guard ``steps.jsonl``. If there are both, the
    former is read.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}
        self._inodes: dict[Path, int] = {}
        self._newest_s: dict[Path, float] = {}

    def read(self) -> Iterator[StepLine]:
        """Yield the lines since the last call.

        A line that is not what the trainer writes raises ConfigError; the next call passes over it.
        """
        found = places(self._run_dir)
        names = (SETTINGS_NAME, METRICS_NAME)
        trained = any((place / name).exists() for place in found for name in names)
        for place in found:
            yield from self._metrics(place) if trained else self._steps(place)

    def _metrics(self, place: Path) -> Iterator[StepLine]:
        path = place / METRICS_NAME
        for line in self._fresh(path):
            yield _parse(line, path)

    def _steps(self, place: Path) -> Iterator[StepLine]:
        """Yield the lines of a Guard, which are best effort: damaged ones are passed over.

        The Guard replaces the file by a shorter one when it is full, which has old lines again.
        """
        path = place / STEPS_NAME
        before = self._inodes.get(path)
        lines = self._fresh(path)
        replaced = before not in (None, self._inodes.get(path))
        known_s = self._newest_s.get(path, 0.0) if replaced else 0.0
        for text in lines:
            with suppress(ConfigError):
                line = _parse(text, path)
                if line.time_s > known_s:
                    self._newest_s[path] = line.time_s
                    yield line

    def _fresh(self, path: Path) -> list[bytes]:
        try:
            with path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if self._inodes.setdefault(path, inode) != inode:
                    self._inodes[path], self._offsets[path] = inode, 0
                offset = self._offsets.get(path, 0)
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
        loss, norm, seconds = (float(values[name]) for name in ("loss", "grad_norm", "seconds"))
        steps, time_s = int(values.get("steps", 1)), float(values.get("time_s", 0.0))
        return StepLine(int(values["step"]), loss, norm, seconds, steps, time_s)
    except (*UNPARSABLE, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path} is damaged: {line[:60]!r} is no line of metrics; remove that line"
        ) from error


@dataclass
class Metrics:
    """Loss and seconds by step; if a step was repeated, its later line counts.

    A line that stands for several steps is kept under the last of them.
    """

    loss: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)  # steps that a line stands for
    repeated: int = 0  # steps done again after a restart
    repeated_s: float = 0.0
    steps_done: int = 0  # the newest step; 0 before the first

    def take(self, lines: Iterable[StepLine]) -> None:
        """Add lines of metrics, in the order in which they were written."""
        for line in lines:
            again = line.again(self.steps_done)
            self.repeated += again
            self.repeated_s += again * line.seconds
            self.loss[line.step], self.seconds[line.step] = line.loss, line.seconds
            self.counts[line.step] = line.steps
            self.steps_done = max(self.steps_done, line.step)


class Ledgers:
    """The events of all hosts of a run; each is returned once.

    The ledger of a run may hold copies of what its hosts recorded, because a lost host takes its
    own ledger with it. An event that is in several ledgers is one event; equal events in one ledger
    are several.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._last: dict[Path, int] = {}
        self._seen: Counter[tuple[Path | None, int]] = Counter()  # None: returned, from any ledger

    def read(self) -> Iterator[Event]:
        """Yield the events since the last call, in order of time within a host."""
        for place in places(self._run_dir):
            path = place / LEDGER_NAME
            if not path.is_file():
                continue
            for identifier, event in read_ledger(path, after_id=self._last.get(path, 0)):
                self._last[path] = identifier
                if self._is_new(path, event):
                    yield event

    def _is_new(self, path: Path, event: Event) -> bool:
        alike = hash(json.dumps(event.as_dict(), sort_keys=True, default=str))
        self._seen[path, alike] += 1
        if self._seen[path, alike] <= self._seen[None, alike]:
            return False
        self._seen[None, alike] += 1
        return True


def read_json(path: Path) -> Any:
    """Read a JSON file; raise ConfigError if that fails."""
    try:
        return json.loads(read_text(path))
    except (OSError, *UNPARSABLE) as error:
        raise ConfigError(f"cannot read {path}: {error}; give another run directory") from error


def read_settings(run_dir: Path) -> Record:
    """Read the settings of a run; they are empty for a Guard in the user's own script."""
    path = run_dir / SETTINGS_NAME
    return check_settings(path, read_json(path)) if path.exists() else {}


def read_results(run_dir: Path) -> list[Record]:
    """Read the results that finished ranks wrote, by rank."""
    paths = [path for place in places(run_dir) for path in place.glob("result-*.json")]
    ordered = sorted(paths, key=lambda path: (len(path.name), path))
    return [check_result(path, read_json(path)) for path in ordered]


def read_summaries(run_dir: Path) -> list[Record]:
    """Read what the Guard of each rank wrote last, by rank, also while the run goes on.

    A summary that cannot be read is passed over, because a Guard writes them as best it can.
    """
    found = []
    for place in places(run_dir):
        for path in place.glob(SUMMARY_NAME.format(rank="*")):
            with suppress(ConfigError):
                found.append(check_summary(path, read_json(path)))
    return sorted(found, key=lambda record: (record["rank"], record["host"]))


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
        except (ProtocolViolation, OSError) as error:
            status = {"error": f"what listens at the socket of {place} is no SMP: {error}"}
        if status is not None:
            cluster = status.get("cluster") or {}
            folder = "0" if place == run_dir else place.name
            found.append({"node": str(cluster.get("node", folder)), **status})
    return found


def read_checkpoints(run_dir: Path) -> list[int]:
    """List the steps that this run has persisted and that are still there."""
    from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at  # it imports torch

    steps: set[int] = set()
    for place in places(run_dir):
        told = supervisor.read_settings(place)
        steps |= set(checkpoints_at(told.directory).steps()) if told is not None else set()
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
    names = (METRICS_NAME, STEPS_NAME, LEDGER_NAME)
    paths = [place / name for place in places(run_dir) for name in names]
    paths += [path.with_name(f"{path.name}-wal") for path in paths]
    return max((os.stat(path).st_mtime for path in paths if path.exists()), default=0.0)

"""What a run's Guards record for reports, in small files beside the ledger.

``StepLog`` writes the loss and the duration of steps, ``write_summary`` a rank's progress and
coverage. Both are best effort: they cost microseconds a step and never fail the training.
"""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast import config
from holdfast.events import recorder
from holdfast.events.ledger import STEPS_NAME, SUMMARY_NAME

LINE_S = 0.1  # shorter steps share a line
FLUSH_S = 2.0
LIMIT_BYTES = 1_000_000
KEPT_LINES = 4_000  # after lines were merged, because the file had reached its limit

_logger = logging.getLogger("holdfast.events")

Line = dict[str, float]
NAMES = ("step", "steps", "loss", "grad_norm", "seconds", "time_s")


class StepLog:
    """Writes a line for each step, or for several short ones, on rank 0.

    The file has a bounded size: once it is full, neighbouring lines are merged, evenly over the
    whole run. A merged line says how many ``steps`` it stands for, with the mean of their
    ``seconds`` and the worst ``loss`` and ``grad_norm``. Nothing is written unless events go to a
    ledger.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._at_s = self._flushed_s = time.perf_counter()
        self._failed = False

    def start(self) -> None:
        """Time the first step from now on."""
        self._at_s = time.perf_counter()

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Record that a step was done; it took the time since the previous one."""
        now_s = time.perf_counter()
        line = {
            "step": step,
            "steps": 1,
            "loss": loss,
            "grad_norm": grad_norm,
            "seconds": now_s - self._at_s,
            "time_s": time.time(),
        }
        self._at_s = now_s
        last = self._lines[-1] if self._lines else None
        if last is not None and last["seconds"] * last["steps"] < LINE_S and _follows(last, line):
            self._lines[-1] = _merged(last, line)
        else:
            self._lines.append(line)
        if now_s - self._flushed_s >= FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded; without success it is dropped, and one warning is logged."""
        lines, self._lines, self._flushed_s = self._lines, [], time.perf_counter()
        directory = recorder.ledger_dir()
        if not lines or directory is None or config.rank() > 0:
            return
        path = directory / STEPS_NAME
        try:
            with path.open("ab") as file:
                text = "".join(json.dumps(line) + "\n" for line in lines)
                # A failed write may have left a part of a line.
                file.write(("\n" * self._failed + text).encode())
                full = file.tell() > LIMIT_BYTES
            if full:
                _compact(path)
        except (OSError, ValueError) as error:
            if not self._failed:
                _logger.warning("the losses of steps cannot be recorded in %s: %s", path, error)
            self._failed = True


def write_summary(values: Mapping[str, object]) -> None:
    """Write this rank's summary beside the ledger, with host and time; without one do nothing.

    An older one is replaced at once, so that a reader never sees a part of it.

    Raises:
        OSError: It cannot be written.
    """
    directory = recorder.ledger_dir()
    if directory is None:
        return
    rank = max(0, config.rank())
    path = directory / SUMMARY_NAME.format(rank=rank)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    whole = {"rank": rank, "host": socket.gethostname(), "time_s": time.time(), **values}
    draft.write_text(json.dumps(whole, default=str))
    draft.replace(path)


def _follows(first: Line, second: Line) -> bool:
    return second["step"] - second["steps"] == first["step"]


def _merged(first: Line, second: Line) -> Line:
    steps = first["steps"] + second["steps"]
    total_s = first["steps"] * first["seconds"] + second["steps"] * second["seconds"]
    return {
        "step": second["step"],
        "steps": steps,
        "loss": _worse(first["loss"], second["loss"]),
        "grad_norm": _worse(first["grad_norm"], second["grad_norm"]),
        "seconds": total_s / steps,
        "time_s": second["time_s"],
    }


def _worse(first: float, second: float) -> float:
    return second if math.isnan(second) else first if math.isnan(first) else max(first, second)


def _compact(path: Path) -> None:
    """Merge neighbouring lines until about ``KEPT_LINES`` remain; damaged lines are dropped."""
    lines: list[Line] = []
    for text in path.read_bytes().splitlines():
        with suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            lines.append({name: line[name] for name in NAMES})
    most = sum(line["steps"] for line in lines) / KEPT_LINES
    kept = lines[:1]
    for line in lines[1:]:
        if kept[-1]["steps"] + line["steps"] <= most and _follows(kept[-1], line):
            kept[-1] = _merged(kept[-1], line)
        else:
            kept.append(line)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text("".join(json.dumps(line) + "\n" for line in kept[-2 * KEPT_LINES :]))
    draft.replace(path)

"""The process of a stage: its rows come through a file, so that none is lost if it is ended."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.stage import Machine, Row, Stage, WrongResult

RIGHT, WRONG, FAILED, LATE = "right", "WRONG", "failed", "out of time"
_WRONG_RESULT = "wrong result"  # the only column of the last row, if a result was wrong


@dataclass(frozen=True)
class Outcome:
    """How a stage ended, with its rows and the seconds that it took."""

    status: str = "not run"
    message: str = ""
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def serve(stage: Stage, path: Path, *, rehearsed: bool) -> int:
    """Run a stage in this process, and append its rows to a file; return the exit code."""
    done = {row["case"] for row in _rows(path)}
    with path.open("a") as file:
        try:
            for row in stage.run(Machine(rehearsed), done):
                print(json.dumps(row), file=file, flush=True)
        except WrongResult as wrong:
            print(json.dumps({_WRONG_RESULT: str(wrong)}), file=file, flush=True)
            return 1
    return 0


def launched(stage: Stage, known: Sequence[Row], limit_s: float, *, rehearsed: bool) -> Outcome:
    """Run a stage in a process of its own, which is ended with all that it started at its limit.

    Args:
        stage: The stage.
        known: Rows of an earlier call, whose cases are not repeated.
        limit_s: Seconds that it may take.
        rehearsed: True for toy sizes on CPU.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in known))
        words = ["-m", "bench.gpu", "--stage", str(stage.number), "--rows", str(path)]
        words += ["--rehearse"] if rehearsed else []
        code = _code([sys.executable, *words], limit_s)
        rows = _rows(path)
    wrong = rows.pop()[_WRONG_RESULT] if rows and _WRONG_RESULT in rows[-1] else ""
    seconds = round(time.monotonic() - started_s, 1)
    if wrong:
        return Outcome(WRONG, wrong, rows, seconds)
    if code is None:
        return Outcome(LATE, f"ended after {limit_s:.0f} s", rows, seconds)
    if code:
        return Outcome(FAILED, f"ended with status {code}; see above", rows, seconds)
    return Outcome(RIGHT, "", rows, seconds)


def _code(command: list[str], limit_s: float) -> int | None:
    """Return the exit code of a command; None if it had to be ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _rows(path: Path) -> list[Row]:
    """Read the whole rows of a file."""
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]

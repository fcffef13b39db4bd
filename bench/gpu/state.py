"""The state of ``bench.gpu``: how each stage ended, in one file, for calls that follow."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.gpu.process import Outcome
from holdfast.cli.tables import write_json
from holdfast.errors import ConfigError
from holdfast_lab.provenance import provenance


class State:
    """The outcomes of the stages, as far as they are of this commit, code and kind of device.

    Args:
        path: The file, which is made with its folder when the first outcome is kept.
        device: Name of the device.

    Raises:
        ConfigError: The file is there and is not one of these.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        self._key = {"commit": _commit(), "device": device, **provenance("bench.gpu.__main__")}
        self._stages: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self._stages = dict(json.loads(path.read_text())["stages"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} is no state of bench.gpu: remove it") from error

    def of(self, number: int) -> Outcome:
        """Return how a stage ended; "not run" also if that was with other code or elsewhere."""
        entry = dict(self._stages.get(str(number), {}))
        if entry.pop("of", None) != self._key:
            return Outcome()
        return Outcome(**entry)

    def forget(self, numbers: Iterable[int]) -> None:
        """Let stages count as not run."""
        for number in numbers:
            self._stages.pop(str(number), None)

    def keep(self, number: int, outcome: Outcome) -> None:
        """Write down how a stage ended."""
        self._stages[str(number)] = {**outcome.as_dict(), "of": self._key}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"stages": self._stages})


def _commit() -> str:
    """Return the commit of the checkout; empty where there is none."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip()

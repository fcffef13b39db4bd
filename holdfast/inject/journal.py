"""The file to which finished trials are appended, so that a killed campaign can be continued."""

import json
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__, native
from holdfast.errors import ConfigError
from holdfast.events.ledger import try_lock


def environment() -> dict[str, str]:
    """Return the versions and hardware features that results depend on, besides the plan."""
    return {
        "holdfast": __version__,
        "torch": torch.__version__,
        "core": "reference" if native.core is None else "native",
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


class Journal:
    """Results by key, ``done``, one JSON line each, under a header that names the campaign.

    Guarantees: results that were passed to ``append`` before a SIGKILL are found again, and an
    incomplete last line is dropped. Not covered: a power failure right after.

    Raises:
        ConfigError: Another campaign uses the file, or it belongs to another plan or environment.
    """

    def __init__(self, path: Path, header: Mapping[str, object], keys: Collection[str]) -> None:
        self._path, self._header = path, {**header, **environment()}
        self.done: dict[str, dict[str, Any]] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; name a writable directory"
            ) from error
        try:
            if not try_lock(self._file.fileno()):
                raise ConfigError(
                    f"another campaign is writing {path}: wait for it, or name another place"
                )
            self._load(frozenset(keys))
        except BaseException:
            self._file.close()
            raise

    def append(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep results by key; they survive a kill once this call returns."""
        self.done.update({key: dict(values) for key, values in results.items()})
        self._write(*({"cell": key, **values} for key, values in results.items()))

    def close(self) -> None:
        """Close the journal, so that another campaign can use its place."""
        self._file.close()

    def _write(self, *lines: Mapping[str, object]) -> None:
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def _load(self, keys: Collection[str]) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        self._file.truncate(len(whole.encode()))
        if not whole:
            self._write(self._header)
            return
        try:
            header, *rows = [dict(json.loads(line)) for line in whole.splitlines()]
            self.done = {row.pop("cell"): row for row in rows}
            unknown = self.done.keys() - keys
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self._path} is damaged: {error}; name a new directory") from error
        for name, ours in self._header.items():
            if header.get(name) != ours:
                raise ConfigError(
                    f"{self._path} is of another campaign: {name} was {header.get(name)}, now it "
                    f"is {ours}; repeat the former options to continue it, "
                    "or name another directory"
                )
        if unknown:
            raise ConfigError(f"{self._path} is damaged: it holds {min(unknown)!r}; name a new one")

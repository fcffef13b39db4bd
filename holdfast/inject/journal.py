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
    """Results by key, one JSON line each, under a header that says which campaign they are of.

    The folder is made if it does not exist, and only one campaign at a time may use the file, until
    ``close``. ``header`` describes the campaign; ``keys`` are the keys it can have.

    Guarantees: results that were passed to ``append`` before a SIGKILL are found again, and an
    incomplete last line is dropped. Not covered: a power failure right after.

    Raises:
        ConfigError: Another campaign uses the file, or it belongs to another plan or environment.
    """

    def __init__(self, path: Path, header: Mapping[str, object], keys: Collection[str]) -> None:
        self._path, self._keys = path, frozenset(keys)
        self._header = {**header, **environment()}
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
            self._load()
        except BaseException:
            self._file.close()
            raise

    def append(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep results by key; they survive a kill once this call returns."""
        self.done.update({key: dict(values) for key, values in results.items()})
        lines = [json.dumps({"cell": key, **values}) + "\n" for key, values in results.items()]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the journal, so that another campaign can use its place."""
        self._file.close()

    def _load(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self._file.truncate(len(whole.encode()))
        if not whole:
            self._file.write(json.dumps(self._header) + "\n")
            self._file.flush()
            return
        header, *lines = whole.splitlines()
        self._check(self._parse(header))
        for line in lines:
            values = self._parse(line)
            key = values.pop("cell", None)
            if key not in self._keys:
                raise ConfigError(
                    f"{self._path} is damaged: it holds {key!r}; name a new directory"
                )
            self.done[key] = values

    def _parse(self, line: str) -> dict[str, Any]:
        try:
            values: dict[str, Any] = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._path} is damaged: {line[:60]!r} is no JSON; name a new directory"
            ) from error
        return values

    def _check(self, header: dict[str, object]) -> None:
        for name, ours in self._header.items():
            theirs = header.get(name)
            if theirs != ours:
                raise ConfigError(
                    f"{self._path} is of another campaign: {name} was {theirs}, now it is {ours}; "
                    "repeat the former options to continue it, or name another directory"
                )

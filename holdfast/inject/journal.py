"""The file to which finished trials are appended, so that a killed campaign can be continued."""

import json
import platform
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

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

    Without a path they are kept in memory only.

    Guarantees: results that were passed to ``append`` before a SIGKILL are found again, and an
    incomplete last line is dropped. Not covered: a power failure right after.

    Raises:
        ConfigError: Another campaign uses the file, or it belongs to another plan or environment.
    """

    def __init__(self, path: Path | None, header: Mapping[str, object]) -> None:
        self.done: dict[str, dict[str, Any]] = {}
        self._file = StringIO() if path is None else _opened(path)
        self.close = self._file.close
        try:
            self._load(path, {**header, **environment()})
        except BaseException:
            self.close()
            raise

    def append(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep results by key; they survive a kill once this call returns."""
        self.done.update({key: dict(values) for key, values in results.items()})
        self._write(*({"cell": key, **values} for key, values in results.items()))

    def _write(self, *lines: Mapping[str, object]) -> None:
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def _load(self, path: object, header: Mapping[str, object]) -> None:
        self._file.seek(0)
        read = self._file.read()
        whole = read[: read.rfind("\n") + 1]
        if json.dumps(header).startswith(read):  # empty, or killed while it was begun
            self._file.truncate(0)
            self._write(header)
            return
        try:
            found, *rows = [dict(json.loads(line)) for line in whole.splitlines()]
            self.done = {row.pop("cell"): row for row in rows}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} is no journal of a campaign or study, or is damaged ({error}); it is left "
                "as it is: name another place"
            ) from error
        for name in (name for name in header if found.get(name) != header[name]):
            raise ConfigError(
                f"{path} is of another campaign or study: {name} was {found.get(name)}, now it is "
                f"{header[name]}; repeat the former options to continue it, or name another place"
            )
        self._file.truncate(len(whole.encode()))


def _opened(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another place") from error
    if not try_lock(file.fileno()):
        file.close()
        raise ConfigError(
            f"another campaign or study is writing {path}: wait for it, or name another place"
        )
    return file

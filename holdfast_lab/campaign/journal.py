"""The file to which finished cells are appended, so that a killed campaign can be continued."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__, native
from holdfast.errors import ConfigError
from holdfast.events.ledger import try_lock
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.plan import Plan

JOURNAL_NAME = "cells.jsonl"


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
    """Results by cell, one JSON line each, under a header that names the plan.

    The directory is made if it does not exist, and only one campaign at a time may use it, until
    ``close``.

    Guarantees: results that were passed to ``append`` before a SIGKILL are found again, and an
    incomplete last line is dropped. Not covered: a power failure right after.

    Raises:
        ConfigError: Another campaign uses the file, or it belongs to another plan or environment.
    """

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._path = directory / JOURNAL_NAME
        self._keys = {cell.key for cell in plan.cells}
        self._header = {"plan": plan.digest(), "cells": len(plan.cells), **environment()}
        self.done: dict[str, Counts] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror}; name a writable directory"
            ) from error
        try:
            self._claim()
            self._load()
        except BaseException:
            self._file.close()
            raise

    def append(self, results: Mapping[str, Counts]) -> None:
        """Keep the results of cells, by key; they survive a kill once this call returns."""
        self.done.update(results)
        lines = [json.dumps({"cell": key, **c.as_dict()}) + "\n" for key, c in results.items()]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the journal, so that another campaign can use its directory."""
        self._file.close()

    def _claim(self) -> None:
        if not try_lock(self._file.fileno()):
            raise ConfigError(
                f"another campaign is writing {self._path}: wait for it, or name another directory"
            )

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
            self.done[key] = Counts(**values)

    def _parse(self, line: str) -> dict[str, Any]:
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{self._path} is damaged: {line[:60]!r} is no JSON; name a new directory"
            ) from error
        assert isinstance(values, dict)
        return values

    def _check(self, header: dict[str, object]) -> None:
        for name, ours in self._header.items():
            theirs = header.get(name)
            if theirs != ours:
                raise ConfigError(
                    f"{self._path} is of another campaign: {name} was {theirs}, now it is {ours}; "
                    "repeat the former options to continue it, or name another directory"
                )

"""The file that finished cells are appended to, so that a killed campaign continues."""

import fcntl
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast import __version__, native
from holdfast.errors import ConfigError
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.plan import Plan

JOURNAL_NAME = "cells.jsonl"


def environment() -> dict[str, str]:
    """Return everything besides the plan that the results depend on."""
    return {
        "holdfast": __version__,
        "torch": torch.__version__,
        "core": "reference" if native.core is None else "native",
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


class Journal:
    """Results by cell, one JSON line each under a header that names the plan; to be closed.

    Args:
        directory: made if it is not there; one campaign at a time may hold it.
        plan: what the results are of.

    Guarantees: whatever was ``append``-ed before a SIGKILL is found again, a torn last line is
    dropped. Not covered: loss of the machine's power right after.

    Raises:
        ConfigError: the file cannot be used: another campaign holds it, or it belongs to another
            plan or environment.
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
        """Keep the results of cells, by key; they are safe from a kill when this returns."""
        self.done.update(results)
        lines = [json.dumps({"cell": key, **c.as_dict()}) + "\n" for key, c in results.items()]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the journal, so that another campaign can use its directory."""
        self._file.close()

    def _claim(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another campaign is writing {self._path}: wait for it, or name another directory"
            ) from error

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

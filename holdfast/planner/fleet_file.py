"""The fleet file, a TOML file with the inputs of a plan of the whole ladder.

It has a table for each class of ``holdfast.planner.fleet``; docs/planning.md lists the fields.
Fields that are left out have assumed values, and ``LadderQuestion.assumed`` lists their names.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError
from holdfast.planner.fleet import (
    KINDS,
    AttentionTable,
    Detection,
    Devices,
    Faults,
    FaultyDevice,
    LadderCosts,
    LadderQuestion,
    LadderSpeeds,
    Model,
    Target,
)
from holdfast.text_files import UNPARSABLE, read_text

_Table = TypeVar("_Table")

_TABLES: Mapping[str, Any] = {
    "fleet": Devices,
    "model": Model,
    "faulty_device": FaultyDevice,
    "costs": LadderCosts,
    "speeds": LadderSpeeds,
    "detection": Detection,
    "target": Target,
    "attention": AttentionTable,
}
_TYPES: Mapping[Any, tuple[str, Any]] = {
    str: ("a string", str),
    int: ("a whole number", int),
    float: ("a number", int | float),
}


def load_question(path: Path) -> LadderQuestion:
    """Read a fleet file; raise ConfigError, which names file, key and value, if it is not valid."""
    try:
        return parse_question(tomllib.loads(read_text(path)))
    except OSError as error:
        reason = f"{error.strerror}; name a TOML file"
        raise ConfigError(f"cannot read the fleet file {path}: {reason}") from error
    except (*UNPARSABLE, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_question(document: Mapping[str, Any]) -> LadderQuestion:
    """Read the parsed TOML of a fleet file; raise ConfigError for unknown or invalid entries."""
    valid = [*_TABLES, "faults"]
    for name, table in document.items():
        if name not in valid:
            raise ConfigError(f"unknown table [{name}]; valid: {', '.join(valid)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name} = {table!r} is no table: write [{name}]")
    read = {
        name: _read(name, document.get(name, {}), table)
        for name, table in _TABLES.items()
        if name in document or name != "attention"
    }
    given = document.get("faults", {})
    if unknown := set(given) - set(KINDS):
        raise ConfigError(f"unknown fault [faults.{min(unknown)}]; valid: {', '.join(KINDS)}")
    faults = {
        kind: _read(f"faults.{kind}", given[kind], Faults) if kind in given else usual
        for kind, usual in KINDS.items()
    }
    return LadderQuestion(**read, faults=faults, assumed=tuple(_assumed(document)))


def _assumed(document: Mapping[str, Any]) -> list[str]:
    """List the keys that the file leaves out, as ``table.key``."""
    missing = [f"faults.{kind}" for kind in KINDS if kind not in document.get("faults", {})]
    for name, table in _TABLES.items():
        if name in ("attention", "speeds"):
            continue
        present = document.get(name, {})
        missing += [f"{name}.{item.name}" for item in fields(table) if item.name not in present]
    return missing


def _read(name: str, values: object, table: type[_Table]) -> _Table:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} = {values!r} is no table: write [{name}]")
    known = {item.name: item for item in fields(table)}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown key {name}.{key} = {value!r}; valid: {', '.join(known)}")
        words, accepted = _TYPES[known[key].type]
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ConfigError(f"{name}.{key} = {value!r} must be {words}")
        if name == "costs" and value < 0:
            raise ConfigError(
                f"costs.{key} = {value} must be at least 0; leave out what you have not measured"
            )
    for key, item in known.items():
        if item.default is MISSING and key not in values:
            raise ConfigError(f"{name}.{key} is missing: give it in [{name}]")
    try:
        return table(**values)
    except ConfigError as error:
        where = "" if str(error).startswith(name) else f"[{name}] "
        raise ConfigError(f"{where}{error}") from error

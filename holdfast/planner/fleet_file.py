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


def load_question(path: Path) -> LadderQuestion:
    """Read a fleet file.

    Raises:
        ConfigError: The file cannot be read, a key is unknown or missing, or a value is out of
            range; the message names file, key and value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(
            f"cannot read the fleet file {path}: {reason}; name a TOML file"
        ) from error
    try:
        return parse_question(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_question(document: Mapping[str, Any]) -> LadderQuestion:
    """Read the parsed TOML of a fleet file.

    Raises:
        ConfigError: A key is unknown or missing, or a value is out of range.
    """
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
        kind: _read(f"faults.{kind}", {"mttf_days": usual.mttf_days, "per": usual.per}, Faults)
        if kind not in given
        else _read(f"faults.{kind}", given[kind], Faults)
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
        _check_type(f"{name}.{key}", value, known[key].type)
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


def _check_type(name: str, value: object, wanted: object) -> None:
    if wanted is str and isinstance(value, str):
        return
    number = not isinstance(value, bool) and isinstance(
        value, int if wanted is int else int | float
    )
    if wanted is not str and number:
        return
    words = {str: "a string", int: "a whole number", float: "a number"}
    raise ConfigError(f"{name} = {value!r} must be {words.get(wanted, wanted)}")  # type: ignore[call-overload]

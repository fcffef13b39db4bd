"""Settings that several parts of the package read: timeout, run directory, config file.

A config file (``holdfast plan ladder --write holdfast.toml`` writes one) holds default values for
the arguments of ``protect``, ``holdfast.nn.Attention``, ``Guard`` and ``Snapshots``; an argument
that is passed explicitly takes precedence. The file applies once ``load`` has read it, and in every
process whose environment variable ``HOLDFAST_CONFIG`` names it.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TypeGuard, TypeVar, cast

from holdfast.errors import ConfigError
from holdfast.text_files import UNPARSABLE, read_text

TIMEOUT_VARIABLE = "HOLDFAST_TIMEOUT_S"
RUN_DIR_VARIABLE = "HOLDFAST_RUN_DIR"
RUN_ID_VARIABLE = "HOLDFAST_RUN_ID"
ADDRESS_VARIABLE = "HOLDFAST_ADDRESS"
DOMAIN_VARIABLE = "HOLDFAST_DOMAIN"
INTERFACE_VARIABLE = "HOLDFAST_INTERFACE"
PARITY_RATE_VARIABLE = "HOLDFAST_PARITY_BYTES_S"
TLS_VARIABLES = "HOLDFAST_TLS_CERT", "HOLDFAST_TLS_KEY", "HOLDFAST_TLS_CA"
CONFIG_VARIABLE = "HOLDFAST_CONFIG"
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_RUN_DIR = "holdfast-run"

_Value = TypeVar("_Value")
_used: dict[str, object] = {}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


_SHARE = (_is_share, "a share from 0 (never) to 1 (always)")
_COUNT = (_is_count, "a whole number of steps, at least 1")
KEYS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "protect.frequency": _SHARE,
    "protect.convolutions": _SHARE,
    "attention.S_AS": _SHARE,
    "attention.S_CL": _SHARE,
    "attention.S_O": _SHARE,
    "guard.audit": _SHARE,
    "guard.shadow": _SHARE,
    "guard.at_rest": _SHARE,
    "guard.optimizer_check": _SHARE,
    "guard.spot": _SHARE,
    "guard.collectives": (lambda value: type(value) is bool, "true or false"),
    "guard.hang_floor_s": (lambda value: _is_number(value) and value > 0, "seconds above 0"),
    "guard.hang_restart": (lambda value: type(value) is bool, "true or false"),
    "snapshots.every": _COUNT,
    "snapshots.interval": (lambda value: value == "auto", '"auto"; a number of steps is every'),
    "snapshots.mttf_s": (lambda value: _is_number(value) and value > 0, "seconds above 0"),
    "snapshots.parities": (lambda value: type(value) is int and 0 <= value <= 2, "0, 1 or 2"),
    "snapshots.group_nodes": (
        lambda value: type(value) is int and 2 <= value <= 16,
        "the most nodes of a parity group, 2 to 16",
    ),
    "snapshots.persist_every": _COUNT,
}
"""Every key of a config file, as ``table.key``, with what its value must be."""


def load(path: str | os.PathLike[str]) -> Mapping[str, object]:
    """Apply a config file to this process and to the processes that it starts.

    Args:
        path: Path of a TOML file with keys from ``KEYS``, each in its table; all are optional.

    Returns:
        The values of the file, by ``table.key``.

    Raises:
        ConfigError: The file cannot be read, or a key or value is invalid; no file is applied then.
    """
    found = Path(path).absolute()
    values = read(found)
    os.environ[CONFIG_VARIABLE] = str(found)
    return values


@cache
def read(path: Path) -> Mapping[str, object]:
    """Return the values of a config file by ``table.key``; each file is read once per process.

    Raises:
        ConfigError: The file is unusable, see ``load``.
    """
    try:
        document = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error.strerror}; make one with "
            "`holdfast plan ladder --write`"
        ) from error
    except UNPARSABLE as error:
        raise ConfigError(f"{path} is no TOML file: {error}") from error
    try:
        return parse(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse(document: Mapping[str, object]) -> dict[str, object]:
    """Check a parsed config file and return its values by ``table.key``.

    Raises:
        ConfigError: A key or value is invalid, see ``load``.
    """
    tables = list(dict.fromkeys(key.split(".")[0] for key in KEYS))
    values: dict[str, object] = {}
    for table, entries in document.items():
        if table not in tables or not isinstance(entries, Mapping):
            raise ConfigError(f"unknown: {table} = {entries!r}; valid tables: {', '.join(tables)}")
        values |= {f"{table}.{name}": value for name, value in entries.items()}
    for key, value in values.items():
        if key not in KEYS:
            table = key.split(".")[0]
            valid = ", ".join(name for name in KEYS if name.startswith(f"{table}."))
            raise ConfigError(f"unknown key {key} = {value!r}; valid: {valid}")
        fits, wanted = KEYS[key]
        if not fits(value):
            raise ConfigError(f"{key} = {value!r} must be {wanted}")
    if {"snapshots.every", "snapshots.interval"} <= values.keys():
        raise ConfigError("snapshots.every and snapshots.interval exclude each other: remove one")
    if "snapshots.mttf_s" in values and "snapshots.interval" not in values:
        raise ConfigError(
            'snapshots.mttf_s is for snapshots.interval = "auto" alone: add or remove'
        )
    return values


def config_file() -> Path | None:
    """Return the path in ``HOLDFAST_CONFIG``, the config file that applies here, or None."""
    path = os.environ.get(CONFIG_VARIABLE)
    return Path(path).absolute() if path else None


def value(key: str, given: _Value | None, default: _Value) -> _Value:
    """Resolve an argument: the caller's value, else the config file's, else the default.

    Args:
        key: One of ``KEYS``.
        given: Value that the caller passed; None if the argument was left out.
        default: Value if neither the caller nor the file sets it.

    Raises:
        ConfigError: The file is unusable, see ``load``.
    """
    assert key in KEYS, key
    path = config_file()
    if given is not None or path is None:
        return default if given is None else given
    values = read(path)
    if key not in values:
        return default
    _used[key] = values[key]
    return cast(_Value, values[key])


def used() -> dict[str, object]:
    """Return the values of the config file that took effect in this process, and its path.

    It is empty without a config file. ``Snapshots.status()`` and the event ``config_in_force``
    report the same values.
    """
    path = config_file()
    if path is None:
        return {}
    held = read(path)
    return {"file": str(path), **{key: _used[key] for key in held if key in _used}}


def timeout_s() -> float:
    """Return the longest that holdfast waits for any peer process, in seconds.

    The limits of all waits (start of the snapshot management process, commit of a snapshot,
    collectives, agreement on a restore) derive from it; ``HOLDFAST_TIMEOUT_S`` sets it.

    Raises:
        ConfigError: The variable is not a positive number.
    """
    return _positive(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S, "seconds")


def parity_bytes_s() -> float:
    """Return how many bytes a second a node sends for parities of states that differ.

    ``HOLDFAST_PARITY_BYTES_S`` sets it; 0 means that there is no limit.

    Raises:
        ConfigError: The variable is not a positive number.
    """
    return _positive(PARITY_RATE_VARIABLE, 0.0, "bytes per second")


def _positive(name: str, default: float, unit: str) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={text!r} is not a positive number of {unit}")
    return value


def tls_files() -> tuple[str, str, str] | None:
    """Return the files with certificate, key and authority of this node, in PEM; None without TLS.

    Connections between nodes are encrypted if all of ``HOLDFAST_TLS_CERT``, ``HOLDFAST_TLS_KEY``
    and ``HOLDFAST_TLS_CA`` are set.

    Raises:
        ConfigError: Only some of the variables are set.
    """
    certificate, key, authority = found = tuple(os.environ.get(v, "") for v in TLS_VARIABLES)
    if any(found) and not all(found):
        raise ConfigError(f"set all of {', '.join(TLS_VARIABLES)}, or none; given: {found}")
    return (certificate, key, authority) if all(found) else None


def interface() -> str:
    """Return the network interface for traffic between nodes, from ``HOLDFAST_INTERFACE``."""
    return os.environ.get(INTERFACE_VARIABLE, "")


def run_dir(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of a run's event ledger and snapshot management socket.

    It is ``path``, else ``HOLDFAST_RUN_DIR``, else ``holdfast-run`` in the working directory.

    Raises:
        ConfigError: The path is too long, or holds a character that no path may hold.
    """
    found = Path(path or os.environ.get(RUN_DIR_VARIABLE) or DEFAULT_RUN_DIR).absolute()
    try:
        os.lstat(found / "events.sqlite")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return found  # who uses it says what is wrong with it
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run_dir {str(found)[:100]!r}… ({len(str(found))} characters) cannot be used: "
            f"{getattr(error, 'strerror', error)}; choose another"
        ) from error
    return found


def run_id(given: str | None = None) -> str:
    """Return the name that the user gives the run: ``given``, else ``HOLDFAST_RUN_ID``, else ""."""
    return given if given is not None else os.environ.get(RUN_ID_VARIABLE, "")


def _number(name: str, default: int, least: int) -> int:
    """Return the value of an environment variable that torchrun sets.

    Raises:
        ConfigError: It is not a whole number of at least ``least``.
    """
    text = os.environ.get(name) or str(default)
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise ConfigError(
            f"the environment variable {name}={text!r} must be a whole number of at least {least}: "
            "unset it, or start the script with torchrun or `holdfast run`, which set it"
        )
    return found


def rank() -> int:
    """Return this process's global rank, as torchrun sets it (0 outside torchrun)."""
    return _number("RANK", 0, 0)


def world_size() -> int:
    """Return the number of ranks of the run (1 outside torchrun)."""
    return _number("WORLD_SIZE", 1, 1)


def address() -> str:
    """Return this node's address for other nodes, from ``HOLDFAST_ADDRESS`` if it is set."""
    return os.environ.get(ADDRESS_VARIABLE, "")


def failure_domain() -> str:
    """Return what is lost together with this node: a rack, a switch; empty if it is unknown.

    It is ``HOLDFAST_DOMAIN``, else the switches in Slurm's ``SLURM_TOPOLOGY_ADDR``.
    """
    switches, _, _ = os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")
    return os.environ.get(DOMAIN_VARIABLE) or switches


def master_address() -> str:
    """Return the host of torchrun's key-value store (this machine outside torchrun)."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def local_rank() -> int:
    """Return this process's rank on its node (0 outside torchrun)."""
    return _number("LOCAL_RANK", 0, 0)


def local_world_size() -> int:
    """Return the number of ranks on this node (1 outside torchrun)."""
    return _number("LOCAL_WORLD_SIZE", 1, 1)

"""Checks of the records that a run left as JSON, whose files may be damaged or edited."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError

Types = Mapping[str, Any]
NUMBER = (int, float)
_SETTINGS = {"ranks": int, "steps": int, "mode": str}
_RESULT = {"finite": bool, "coverage": dict, "snapshot_stall_s": NUMBER, "snapshot_bytes": NUMBER}
_SUMMARY = {
    "rank": int,
    "host": str,
    "time_s": NUMBER,
    "step": int,
    "steps": int,
    "seconds": dict,
}
_COVERAGE = {"frequency": NUMBER, "passes": int, "verified_passes": int, "false_alarms": int}
_SITE = {"site": str, "covered": bool, "reason": str}
_OPTIMIZER: Types = {"optimizer": str, "reason": str, "checked": int, "share": NUMBER}
_MODULES: Types = {"share": NUMBER, "modules": int, "checked": int, "left_out": dict}
_COVERED_SITE = {
    "method": str,
    "calls": int,
    "rows": int,
    **dict.fromkeys(("encode_s", "product_s", "verify_s"), NUMBER),
}


def check_settings(path: Path, settings: object) -> dict[str, Any]:
    """Return the settings of a run; raise ConfigError if they are not those of a training."""
    record = _check(path, settings, _SETTINGS)
    for name in ("ranks", "steps"):
        if record.get(name, 1) < 1:
            raise _damaged(path, f"{name} = {record[name]}")
    return record


def check_result(path: Path, result: object) -> dict[str, Any]:
    """Return the result of a rank; raise ConfigError if the report could not read it."""
    record = _check(path, result, _RESULT)
    coverage = record.get("coverage")
    if coverage:
        _check(path, coverage, _COVERAGE)
        sites = coverage.get("sites")
        if not isinstance(sites, list):
            raise _damaged(path, f"sites = {sites!r:.60}")
        for site in sites:
            found = _check(path, site, _SITE, required=True)
            if found["covered"]:
                _check(path, site, _COVERED_SITE, required=True)
    return record


def check_summary(path: Path, summary: object) -> dict[str, Any]:
    """Return the summary of a rank's Guard; raise ConfigError if the report could not read it."""
    record = check_result(path, _check(path, summary, _SUMMARY, required=True))
    for optimizer in _check(path, record, {"optimizers": list}).get("optimizers") or ():
        _check(path, optimizer, _OPTIMIZER, required=True)
    if record.get("modules"):
        _check(path, record["modules"], _MODULES, required=True)
    for name, seconds in record["seconds"].items():
        if not isinstance(seconds, NUMBER):
            raise _damaged(path, f"{name} = {seconds!r:.60}")
    return record


def _check(path: Path, record: object, types: Types, *, required: bool = False) -> dict[str, Any]:
    """Check the types of those values that are there, or also that all are there."""
    if not isinstance(record, dict):
        raise _damaged(path, f"{record!r:.60}")
    for name, kind in types.items():
        value = record.get(name)
        if not (isinstance(value, kind) or (value is None and not required)):
            raise _damaged(path, f"{name} = {value!r:.60}")
    return record


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is not the record of a run ({what}): give another run directory")

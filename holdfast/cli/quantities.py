"""Durations, sizes and speeds as users write them: ``30d``, ``4GB``, ``250MB/s``."""

import re
from collections.abc import Mapping
from math import isfinite

from holdfast.errors import ConfigError
from holdfast.report.quantities import duration

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
SECONDS |= {"d": 86_400.0, "w": 604_800.0, "y": 365.25 * 86_400.0}
BYTES = {"B": 1.0} | {
    f"{prefix}{ending}": base**power
    for ending, base in (("B", 1000.0), ("iB", 1024.0))
    for power, prefix in enumerate(("k" if base == 1000.0 else "K", "M", "G", "T", "P"), start=1)
}
SPEEDS = {f"{unit}/s": count for unit, count in BYTES.items()}
_NUMBER = r"[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]+(?:\s*/\s*[A-Za-z]+)?)\s*")


def duration_s(text: str, option: str) -> float:
    """Return the seconds of ``700ms``, ``90 s``, ``5m``, ``12h``, ``30d``, ``2w`` or ``3y``.

    Only 0 needs no unit. The error message, a ConfigError, names the ``option``.
    """
    return _read(text, SECONDS, option, "a time like 700ms, 90s, 5m, 12h or 30d")


def size_bytes(text: str, option: str) -> float:
    """Return the bytes of ``4GB`` (powers of 1,000) or ``4GiB`` (of 1,024)."""
    return _read(text, BYTES, option, "a size like 350MB, 4GB or 4GiB")


def speed_bytes_s(text: str, option: str) -> float:
    """Return the bytes per second of ``250MB/s``."""
    return _read(text, SPEEDS, option, "a speed like 250MB/s or 10GB/s")


def shown_duration(seconds: float) -> str:
    """Format a time as the report does, in ASCII: ``2.5 d``, ``20 us``; infinity as ``never``."""
    return duration(seconds).replace("µ", "u") if isfinite(seconds) else "never"


def shown_steps(count: int, step_s: float) -> str:
    """Format an interval in steps and in time, e.g. ``every 17 steps (3.5 min)``."""
    steps = "every step" if count == 1 else f"every {count} steps"
    return f"{steps} ({shown_duration(count * step_s)})"


def _read(text: str, units: Mapping[str, float], option: str, wanted: str) -> float:
    if text.strip() == "0":
        return 0.0
    found = _QUANTITY.fullmatch(text)
    unit = "".join(found[2].split()) if found else ""
    if found is None or unit not in units:
        raise ConfigError(f"{option} {text}: give {wanted}")
    value = float(found[1]) * units[unit]
    if not isfinite(value):
        raise ConfigError(f"{option} {text} is too large: give {wanted}")
    return value

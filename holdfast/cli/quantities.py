"""Durations, sizes and speeds as people write them: ``30d``, ``4GB``, ``250MB/s``."""

import re
from collections.abc import Mapping
from math import isfinite

from holdfast.errors import ConfigError
from holdfast.report.quantities import duration, size

SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "w": 604_800.0,
    "y": 365.25 * 86_400.0,
}
BYTES = {"B": 1.0} | {
    f"{prefix}{ending}": base**power
    for ending, base in (("B", 1000.0), ("iB", 1024.0))
    for power, prefix in enumerate(("k" if base == 1000.0 else "K", "M", "G", "T", "P"), start=1)
}
_QUANTITY = re.compile(r"\s*([0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)\s*")


def duration_s(text: str, option: str) -> float:
    """Seconds of ``700ms``, ``90 s``, ``5m``, ``12h``, ``30d``, ``2w``, ``3y``.

    Args:
        text: a number with its unit; 0 needs none.
        option: what it was given for, named if it cannot be read.

    Raises:
        ConfigError: no number, or no known unit of time.
    """
    return _read(text, SECONDS, option, "a time like 700ms, 90s, 5m, 12h or 30d")


def size_bytes(text: str, option: str) -> float:
    """Bytes of ``4GB`` (powers of 1,000) or ``4GiB`` (of 1,024).

    Raises:
        ConfigError: no number, or no known unit of size.
    """
    return _read(text, BYTES, option, "a size like 350MB, 4GB or 4GiB")


def speed_bytes_s(text: str, option: str) -> float:
    """Bytes a second of ``250MB/s``.

    Raises:
        ConfigError: no number, or no known unit of size per second.
    """
    amount, slash, per = text.partition("/")
    wanted = "a speed like 250MB/s or 10GB/s"
    if not slash or per.strip() != "s":
        raise ConfigError(f"{option} {text}: give {wanted}")
    return _read(amount, BYTES, option, wanted, text)


def shown_duration(seconds: float) -> str:
    """Format a time as the report does, in ASCII: ``2.5 d``, ``20 us``; infinity as ``never``."""
    return duration(seconds).replace("µ", "u") if isfinite(seconds) else "never"


def shown_size(count_bytes: float) -> str:
    """Format a size in powers of 1,000, e.g. ``4 GB``."""
    return size(count_bytes)


def _read(
    text: str, units: Mapping[str, float], option: str, wanted: str, whole: str | None = None
) -> float:
    if text.strip() == "0":
        return 0.0
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        raise ConfigError(f"{option} {whole or text}: give {wanted}")
    value = float(found[1]) * units[found[2]]
    if not isfinite(value):
        raise ConfigError(f"{option} {whole or text} is too large: give {wanted}")
    return value

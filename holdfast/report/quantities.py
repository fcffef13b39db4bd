"""Formatting of numbers for people: three digits and a unit."""

from collections.abc import Iterable
from math import isfinite

_TIMES = (
    *((365.25 * 86_400.0, "y"), (86_400.0, "d"), (3600.0, "h"), (60.0, "min")),
    *((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
)
_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
NONE = "–"
LONGEST = 120


def duration(seconds: float | None) -> str:
    """Format a time: ``2.5 d``, ``17.8 ms``, ``0 s``; a dash if it is not known."""
    if seconds is None or not isfinite(seconds):
        return NONE
    for size, unit in _TIMES:
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return "0 s" if seconds < 1e-9 else f"{_digits(seconds / 1e-9)} ns"


def size(count_bytes: float | None) -> str:
    """Format a size in powers of 1,000: ``4 GB``."""
    if count_bytes is None:
        return NONE
    for unit_bytes, unit in _SIZES:
        if count_bytes >= unit_bytes:
            return f"{_digits(count_bytes / unit_bytes)} {unit}"
    return f"{count_bytes:.0f} B"


def number(value: float | None) -> str:
    """Format a number in three digits: ``0.0312``, ``1.2e-05``; a dash if it is not known."""
    return NONE if value is None or value != value else f"{value:.3g}"


def share(value: float) -> str:
    """Format a share in percent, with enough digits to tell it from 0 and 100."""
    if not isfinite(value):
        return NONE
    if value == 0.0 or value >= 1.0:
        return f"{value:,.0%}"
    edge = min(value, 1 - value)
    return f"{value:.{0 if edge >= 0.1 else 1 if edge >= 0.01 else 2}%}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 fault``, ``1,200 faults``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """Format whole numbers as ranges: 0, 1, 2, 5 as ``0–2, 5``."""
    parts: list[list[int]] = []
    for value in sorted(numbers):
        if parts and value == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ", ".join("–".join(map(str, part)) for part in parts)


def shortened(text: str) -> str:
    """Cut a text to ``LONGEST`` characters, because names may have any length."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _digits(value: float) -> str:
    return f"{value:.0f}" if 99.5 <= value < 1e4 else f"{value:.3g}"

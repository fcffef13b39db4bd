"""Numbers as the page writes them: with a unit, three digits, and nothing to decode."""

from collections.abc import Iterable
from math import isfinite

_TIMES = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
NONE = "–"
LONGEST = 120


def duration(seconds: float | None) -> str:
    """``2.5 d``, ``17.8 ms``, ``0 s``; a dash for what is not known."""
    if seconds is None or not isfinite(seconds):
        return NONE
    for size, unit in _TIMES:
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return "0 s" if seconds < 1e-9 else f"{_digits(seconds / 1e-9)} ns"


def size(count_bytes: float | None) -> str:
    """``4 GB`` in powers of 1,000."""
    if count_bytes is None:
        return NONE
    for unit_bytes, unit in _SIZES:
        if count_bytes >= unit_bytes:
            return f"{_digits(count_bytes / unit_bytes)} {unit}"
    return f"{count_bytes:.0f} B"


def number(value: float | None) -> str:
    """Three digits: ``0.0312``, ``1.2e-05``; a dash for what is not known."""
    return NONE if value is None or value != value else f"{value:.3g}"


def share(value: float) -> str:
    """A share in percent, with enough digits to tell it from 0 and 100."""
    if not isfinite(value):
        return NONE
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    edge = min(value, 1 - value)
    return f"{value:.{0 if edge >= 0.1 else 1 if edge >= 0.01 else 2}%}"


def counted(count: int, noun: str) -> str:
    """``1 fault``, ``1,200 faults``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """``0–2, 5`` of 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for value in sorted(numbers):
        if parts and value == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], value]
        else:
            parts.append([value])
    return ", ".join("–".join(map(str, part)) for part in parts)


def shortened(text: str) -> str:
    """A text of at most ``LONGEST`` characters: names may have any length, a page may not."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"

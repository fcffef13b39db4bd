"""Counts of verified products by site, for operators whose checks run in Python."""

from typing import TypedDict

import torch

from holdfast.abft.gemm.cpu import detection_line
from holdfast.sites import Gemm, SiteTuple

CALLS_PER_LINE = 256  # calls of a site between two samples of its detection line


class Counters(TypedDict):
    """Counts of the products of one site since the counters were last set to zero."""

    site: SiteTuple
    covered: bool
    calls: int
    rows: int
    suspects: int
    unverified: int
    reason: str  # reason why calls were not verified
    line: float  # sampled ratio of a row's threshold to its rms
    encode_s: float
    product_s: float
    verify_s: float


_counters: dict[SiteTuple, Counters] = {}


def _counter(site: SiteTuple) -> Counters:
    """Return the counter of a site, which is new for the first of all threads that ask for it."""
    known = _counters.get(site)
    if known is not None:
        return known
    new = Counters(
        site=site,
        covered=True,
        calls=0,
        rows=0,
        suspects=0,
        unverified=0,
        reason="",
        line=0.0,
        encode_s=0.0,
        product_s=0.0,
        verify_s=0.0,
    )
    return _counters.setdefault(site, new)  # one step, as another thread may be here too


def computed(site: SiteTuple, encode_s: float, product_s: float) -> None:
    """Count the time of a product, and of encoding its right operand."""
    counter = _counter(site)
    counter["encode_s"] += encode_s
    counter["product_s"] += product_s


def verified(site: SiteTuple, rows: int, suspects: int, verify_s: float) -> bool:
    """Count a product that was checked; return true if ``note_line`` is due for the site."""
    counter = _counter(site)
    counter["calls"] += 1
    counter["rows"] += rows
    counter["suspects"] += suspects
    counter["verify_s"] += verify_s
    return not suspects and counter["calls"] % CALLS_PER_LINE == 1


def note_line(site: SiteTuple, gemm: Gemm, output: torch.Tensor) -> None:
    """Record threshold / rms of the product's first row; smaller relative changes pass."""
    _counter(site)["line"] = detection_line(gemm, output)


def skipped(site: SiteTuple) -> None:
    """Count a product that was not checked because its section was not due."""
    counter = _counter(site)
    counter["unverified"] += 1
    counter["reason"] = "not due at the section's frequency"


def counters() -> list[Counters]:
    """List the counts of every site."""
    return [counter.copy() for counter in _counters.values()]


def reset() -> None:
    """Set all counters to zero."""
    _counters.clear()

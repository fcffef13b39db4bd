"""Counters of the sections' products by site, in the form that ``Backend.counters`` has."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from holdfast.abft.gemm.passes import verify
from holdfast.sites import Gemm, SiteTuple

CALLS_PER_LINE = 256  # between two looks at the detection line of a site


@dataclass
class _Counter:
    """Counts of one site; ``line`` is threshold / rms of a row, and times are in seconds."""

    site: SiteTuple
    covered: bool = True
    reason: str = ""
    calls: int = 0
    rows: int = 0
    suspects: int = 0
    unverified: int = 0
    encode_s: float = 0.0
    product_s: float = 0.0
    verify_s: float = 0.0
    line: float = 0.0


_counters: dict[SiteTuple, _Counter] = {}


def _counter(site: SiteTuple) -> _Counter:
    return _counters.setdefault(site, _Counter(site))


def computed(site: SiteTuple, encode_s: float, product_s: float) -> None:
    """Count the time of a product, and of encoding its right operand."""
    counter = _counter(site)
    counter.encode_s += encode_s
    counter.product_s += product_s


def verified(site: SiteTuple, rows: int, suspects: int, verify_s: float) -> bool:
    """Count a product that was checked; return whether its detection line is to be noted."""
    counter = _counter(site)
    counter.calls += 1
    counter.rows += rows
    counter.suspects += suspects
    counter.verify_s += verify_s
    return not suspects and counter.calls % CALLS_PER_LINE == 1


def note_line(site: SiteTuple, gemm: Gemm, output: torch.Tensor) -> None:
    """Note threshold / rms of the product's first row: a change smaller than that passes."""
    c, a = (t[:1, :1] if t.dim() == 3 else t[:1] for t in (output, gemm.a))
    encoding = gemm.row_sum[:1], gemm.statistics[:1]
    _, threshold, energy = (float(x) for x in verify(c, a, *encoding, gemm.addend).flatten())
    rms = (energy / output.shape[-1]) ** 0.5
    _counter(site).line = threshold / rms if 0 < rms < float("inf") else 0.0


def skipped(site: SiteTuple) -> None:
    """Count a product of a section that was not due."""
    counter = _counter(site)
    counter.unverified += 1
    counter.reason = "not due at the section's frequency"


def counters() -> list[dict[str, Any]]:
    """List by site: site, covered, calls, rows, suspects, unverified, reason, line, and seconds."""
    return [asdict(counter) for counter in _counters.values()]


def reset() -> None:
    """Set all counters to zero."""
    _counters.clear()

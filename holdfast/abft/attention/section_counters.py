"""What the sections' products did, by site, in the form that ``Backend.counters`` has."""

from typing import Any

import torch

from holdfast.abft.gemm.passes import verify
from holdfast.sites import Gemm, SiteTuple

_counters: dict[SiteTuple, dict[str, Any]] = {}
CALLS_PER_LINE = 256  # between two looks at the detection line of a site


def _row(site: SiteTuple) -> dict[str, Any]:
    row = _counters.get(site)
    if row is None:
        counted = dict.fromkeys(("calls", "rows", "suspects", "unverified"), 0)
        seconds = dict.fromkeys(("encode_s", "product_s", "verify_s", "line"), 0.0)
        row = {"site": site, "covered": True, "reason": "", **counted, **seconds}
        _counters[site] = row
    return row


def computed(site: SiteTuple, encode_s: float, product_s: float) -> None:
    """A product was computed, and its right operand encoded."""
    row = _row(site)
    row["encode_s"] += encode_s
    row["product_s"] += product_s


def verified(site: SiteTuple, rows: int, suspects: int, verify_s: float) -> bool:
    """A product was checked; whether its detection line is to be noted."""
    row = _row(site)
    row["calls"] += 1
    row["rows"] += rows
    row["suspects"] += suspects
    row["verify_s"] += verify_s
    return not suspects and row["calls"] % CALLS_PER_LINE == 1


def note_line(site: SiteTuple, gemm: Gemm, output: torch.Tensor) -> None:
    """threshold / rms of the product's first row: a change smaller than that passes."""
    c, a = (t[:1, :1] if t.dim() == 3 else t[:1] for t in (output, gemm.a))
    encoding = gemm.row_sum[:1], gemm.statistics[:1]
    _, threshold, energy = (float(x) for x in verify(c, a, *encoding, gemm.addend).flatten())
    rms = (energy / output.shape[-1]) ** 0.5
    _row(site)["line"] = threshold / rms if 0 < rms < float("inf") else 0.0


def skipped(site: SiteTuple) -> None:
    """A product of a section that was not due."""
    row = _row(site)
    row["unverified"] += 1
    row["reason"] = "not due at the section's frequency"


def counters() -> list[dict[str, Any]]:
    """Per site: site, covered, calls, rows, suspects, unverified, reason, line, and seconds."""
    return [dict(row) for row in _counters.values()]


def reset() -> None:
    """Set all counters to zero."""
    _counters.clear()

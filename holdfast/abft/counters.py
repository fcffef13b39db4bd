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
_on_devices: dict[tuple[SiteTuple, torch.device], torch.Tensor] = {}


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


def note_ratio(site: SiteTuple, ratio: float) -> None:
    """Record threshold / rms of what is no matrix product."""
    _counter(site)["line"] = ratio


def skipped(site: SiteTuple) -> None:
    """Count a product that was not checked because its section was not due."""
    left_out(site, "not due at the section's frequency")


def left_out(site: SiteTuple, reason: str) -> None:
    """Count a product that was not checked, and why."""
    counter = _counter(site)
    counter["unverified"] += 1
    counter["reason"] = reason


def on_device(site: SiteTuple, device: torch.device) -> torch.Tensor:
    """Return counters of suspect and of corrected rows, int32 [2], to which a device adds.

    ``counters`` waits for the device and adds the first to the suspect rows of the site. The first
    call for a site may not be captured in a graph, whose replays would set the counters to zero.
    """
    known = _on_devices.get((site, device))
    if known is None:
        new = torch.zeros(2, dtype=torch.int32, device=device)
        known = _on_devices.setdefault((site, device), new)
    return known


def counters() -> list[Counters]:
    """List the counts of every site."""
    rows = {site: counter.copy() for site, counter in list(_counters.items())}
    for (site, _), counts in list(_on_devices.items()):
        if site in rows:
            rows[site]["suspects"] += int(counts[0])
    return [*rows.values()]


def reset() -> None:
    """Set all counters to zero."""
    _counters.clear()
    for counts in _on_devices.values():  # which a captured graph may hold
        counts.zero_()

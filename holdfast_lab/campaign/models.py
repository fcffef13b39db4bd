"""The fault models of the laboratory's campaigns, by name; ``holdfast.inject`` has the models."""

import torch

from holdfast.inject.faults import bit_width
from holdfast.inject.models import BURST_BITS, ELEMENT_FAULTS, EXTENTS, MATRIX_FAULTS

EXTREME_FAULTS = ("inf", "nan", "near_inf")
FAULTS = {
    "flip": "one bit flips: flip-BIT-up (0 to 1) and flip-BIT-down (1 to 0), for every bit; by "
    "request also flip-BIT-any, in any element",
    "inf": "INF of the element's sign",
    "nan": "NaN",
    "near_inf": "a quarter of the largest finite number, of the element's sign",
    "spurious_carry": "a carry into a random bit of the significand that should not be",
    "missing_carry": "a carry into a random bit of the significand that is lost",
    "random_value": "all bits random",
    "burst_bits": f"{BURST_BITS} adjacent bits flip, at a random place",
    "stuck_at_0": f"one random bit is 0 in {EXTENTS['lane']}",
    "stuck_at_1": f"one random bit is 1 in {EXTENTS['lane']}",
    "burst_elements": f"a random bit flips in each of {EXTENTS['burst']}",
    "row": "a random bit flips in every element of a row",
    "column": "a random bit flips in every element of a column",
}


def undirected_flips(dtype: torch.dtype) -> list[str]:
    """List flips of every bit in either direction, which papers count; only run by request."""
    return [f"flip-{bit}-any" for bit in range(bit_width(dtype))]


def fault_names(dtype: torch.dtype, *, matrix: bool) -> list[str]:
    """List the fault models for a dtype, with ``matrix`` also those that change many elements."""
    flips = [
        f"flip-{bit}-{direction}" for bit in range(bit_width(dtype)) for direction in ("up", "down")
    ]
    return [*flips, *ELEMENT_FAULTS, *(MATRIX_FAULTS if matrix else ())]


def in_class(name: str, wanted: str) -> bool:
    """Return whether a fault has the wanted name or kind; ``flip`` and ``flip-7`` name several."""
    return name == wanted or name.startswith(f"{wanted}-")

"""The fault models of the laboratory's campaigns, by name; ``holdfast.inject`` has the models."""

import torch

from holdfast.inject.faults import bit_width
from holdfast.inject.models import BURST_BITS, BURST_ELEMENTS, LANES

EXTREME_FAULTS = ("inf", "nan", "near_inf")
# Faults of many elements, which only the output of a product can have.
MATRIX_FAULTS = ("stuck_at_0", "stuck_at_1", "burst_elements", "row", "column")
DIRECTIONS = {"up": "0 → 1", "down": "1 → 0", "any": "whichever it is"}
_LANE = f"every {LANES}th element of a row: what one of {LANES} vector lanes writes"
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
    "stuck_at_0": f"one random bit is 0 in {_LANE}",
    "stuck_at_1": f"one random bit is 1 in {_LANE}",
    "burst_elements": f"a random bit flips in each of {BURST_ELEMENTS} adjacent elements of a row",
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
    others = [name for name in FAULTS if name != "flip" and (matrix or name not in MATRIX_FAULTS)]
    return flips + others


def in_class(name: str, wanted: str) -> bool:
    """Return whether a fault has the wanted name or kind; ``flip`` and ``flip-7`` name several."""
    return name == wanted or name.startswith(f"{wanted}-")

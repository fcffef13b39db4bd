"""Fault models: which elements of a tensor a fault changes, and which values they get."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.inject.faults import (
    bit_field,
    bit_width,
    carry_error,
    flip_bit,
    flip_bits,
    has_bit,
    hold_bits,
    mantissa_bits,
    random_patterns,
    special_value,
)

BURST_BITS = 3
BURST_ELEMENTS = 4
LANES = 8

EXTENTS = {
    "element": "one element",
    "burst": f"{BURST_ELEMENTS} adjacent elements of a row",
    "lane": f"every {LANES}th element of a row: what one of {LANES} vector lanes writes",
    "row": "a whole row",
    "column": "a whole column",
}
EXTREME_FAULTS = ("inf", "nan", "near_inf")

Corrupt = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class FaultModel:
    """A fault model: a way in which values become wrong.

    Attributes:
        group: Name of the group with which tables sum it up.
        extent: Elements that one fault changes, one of ``EXTENTS``.
        corrupt: Function of the right values and a generator that returns the wrong values.
        bit: Bit that flips; None if the model does not name one.
    """

    name: str
    group: str
    extent: str
    corrupt: Corrupt
    bit: int | None = None
    direction: str = "any"

    def eligible(self, values: torch.Tensor) -> torch.Tensor:
        """Return which values can have this fault: those whose bit can flip in its direction."""
        if self.bit is None or self.direction == "any":
            return torch.ones_like(values, dtype=torch.bool)
        return has_bit(values, self.bit) ^ (self.direction == "up")


def _random_bits(values: torch.Tensor, generator: torch.Generator, choices: int) -> torch.Tensor:
    return torch.randint(choices, values.shape, generator=generator)


def _random_flip(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return flip_bits(values, _random_bits(values, generator, bit_width(values.dtype)))


def _bit_burst(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = bit_width(values.dtype) - BURST_BITS + 1
    return flip_bits(values, _random_bits(values, generator, starts), adjacent=BURST_BITS)


def _carry(values: torch.Tensor, generator: torch.Generator, *, missing: bool) -> torch.Tensor:
    bits = _random_bits(values, generator, mantissa_bits(values.dtype) + 1)
    return carry_error(values, bits, missing=missing)


def _stuck(values: torch.Tensor, generator: torch.Generator, *, high: bool) -> torch.Tensor:
    """Set one bit of every element to its stuck value; values are [faults, elements]."""
    bits = _random_bits(values[:, :1], generator, bit_width(values.dtype))
    return hold_bits(values, bits, high=high)


def _special(values: torch.Tensor, generator: torch.Generator, *, kind: str) -> torch.Tensor:
    return special_value(values, kind)


ELEMENT_FAULTS: dict[str, Corrupt] = {
    "inf": partial(_special, kind="inf"),
    "nan": partial(_special, kind="nan"),
    "near_inf": partial(_special, kind="near_inf"),
    "spurious_carry": partial(_carry, missing=False),
    "missing_carry": partial(_carry, missing=True),
    "random_value": random_patterns,
    "burst_bits": _bit_burst,
}
# Faults of many elements, which only the output of a product can have.
MATRIX_FAULTS: dict[str, tuple[str, Corrupt]] = {
    "stuck_at_0": ("lane", partial(_stuck, high=False)),
    "stuck_at_1": ("lane", partial(_stuck, high=True)),
    "burst_elements": ("burst", _random_flip),
    "row": ("row", _random_flip),
    "column": ("column", _random_flip),
}
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

DIRECTIONS = {"up": "0 → 1", "down": "1 → 0", "any": "whichever it is"}

_FLIP = re.compile(rf"flip-(\d+)-({'|'.join(DIRECTIONS)})")


def undirected_flips(dtype: torch.dtype) -> list[str]:
    """List flips of every bit in either direction, which papers count; only run by request."""
    return [f"flip-{bit}-any" for bit in range(bit_width(dtype))]


def fault_names(dtype: torch.dtype, *, matrix: bool) -> list[str]:
    """List the fault models for a dtype, with ``matrix`` also those that change many elements."""
    flips = [
        f"flip-{bit}-{direction}" for bit in range(bit_width(dtype)) for direction in ("up", "down")
    ]
    return [*flips, *ELEMENT_FAULTS, *(MATRIX_FAULTS if matrix else ())]


def fault_model(name: str, dtype: torch.dtype) -> FaultModel:
    """Return the fault model with a name, for elements of a dtype.

    Raises:
        ValueError: There is no such fault, or the dtype has no such bit.
    """
    flip = _FLIP.fullmatch(name)
    if flip is not None:
        bit = int(flip[1])
        group = f"flip {bit_field(dtype, bit)}"
        corrupt: Corrupt = lambda values, _: flip_bit(values, bit)  # noqa: E731
        return FaultModel(name, group, "element", corrupt, bit, flip[2])
    if name in ELEMENT_FAULTS:
        return FaultModel(name, name, "element", ELEMENT_FAULTS[name])
    if name in MATRIX_FAULTS:
        extent, corrupt = MATRIX_FAULTS[name]
        return FaultModel(name, name, extent, corrupt)
    raise ValueError(f"unknown fault {name!r}; valid: {', '.join(FAULTS)}")


def in_class(name: str, wanted: str) -> bool:
    """Return whether a fault has the wanted name or kind; ``flip`` and ``flip-7`` name several."""
    return name == wanted or name.startswith(f"{wanted}-")

"""Fault models: which elements of a tensor a fault changes, and which values they get."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.inject.faults import (
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
TILE = 16

Corrupt = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class FaultModel:
    """A way in which values become wrong.

    Attributes:
        extent: Elements that one fault changes: an element, burst, lane, row, column or tile, or
            rows_beyond, a row and all after it.
        corrupt: Function of the right values and a generator that returns the wrong values.
        bit: Bit that flips; None if the model does not name one.
    """

    extent: str
    corrupt: Corrupt
    bit: int | None = None
    direction: str = "any"

    def eligible(self, values: torch.Tensor) -> torch.Tensor:
        """Return which values can have this fault: those whose bit can flip in its direction."""
        if self.bit is None or self.direction == "any":
            return torch.ones_like(values, dtype=torch.bool)
        return has_bit(values, self.bit) ^ (self.direction == "up")


def _flips(values: torch.Tensor, generator: torch.Generator, run: int = 1) -> torch.Tensor:
    """Invert so many adjacent bits, at a place of its own in every element."""
    places = bit_width(values.dtype) - run + 1
    drawn = torch.randint(places, values.shape, generator=generator)
    return flip_bits(values, drawn, adjacent=run)


def _several_flips(values: torch.Tensor, generator: torch.Generator, count: int) -> torch.Tensor:
    """Invert ``count`` different bits, the same ones in every element."""
    for bit in torch.randperm(bit_width(values.dtype), generator=generator)[:count].tolist():
        values = flip_bit(values, bit)
    return values


def _carry(values: torch.Tensor, generator: torch.Generator, *, missing: bool) -> torch.Tensor:
    bits = torch.randint(mantissa_bits(values.dtype) + 1, values.shape, generator=generator)
    return carry_error(values, bits, missing=missing)


def _stuck(values: torch.Tensor, generator: torch.Generator, *, high: bool) -> torch.Tensor:
    """Set one bit of every element to its stuck value; values are [faults, elements]."""
    bits = torch.randint(bit_width(values.dtype), values[:, :1].shape, generator=generator)
    return hold_bits(values, bits, high=high)


def _special(values: torch.Tensor, generator: torch.Generator, *, kind: str) -> torch.Tensor:
    return special_value(values, kind)


def _uniform(
    values: torch.Tensor, generator: torch.Generator, low: float = 0.0, high: float = 0.0
) -> torch.Tensor:
    if low == high:
        return torch.full_like(values, low)
    drawn = torch.rand(values.shape, generator=generator, dtype=torch.float64)
    return (low + (high - low) * drawn).to(values.dtype)


MODELS: dict[str, tuple[str, Corrupt]] = {
    "flip": ("element", _flips),
    "zero": ("element", _uniform),
    "inf": ("element", partial(_special, kind="inf")),
    "nan": ("element", partial(_special, kind="nan")),
    "near_inf": ("element", partial(_special, kind="near_inf")),
    "spurious_carry": ("element", partial(_carry, missing=False)),
    "missing_carry": ("element", partial(_carry, missing=True)),
    "random_value": ("element", random_patterns),
    "burst_bits": ("element", partial(_flips, run=BURST_BITS)),
    "stuck_at_0": ("lane", partial(_stuck, high=False)),
    "stuck_at_1": ("lane", partial(_stuck, high=True)),
    "burst_elements": ("burst", _flips),
    "row": ("row", _flips),
    "column": ("column", _flips),
    "tile": ("tile", _flips),
    "zero_row": ("row", _uniform),
    "zero_tile": ("tile", _uniform),
    # The product of these rows is lost: what the layer adds to it, its bias, is left.
    "bias_only": ("rows_beyond", _uniform),
}
NUMBERED = "flip-BIT, flip-BIT-up, flip-BIT-down, flips-COUNT, value=X, uniform=LOW:HIGH"
_FLIP = re.compile(r"flip-(\d+)(?:-(up|down|any))?")


def fault_model(name: str, dtype: torch.dtype) -> FaultModel:
    """Return the fault model with a name, for elements of a dtype.

    Raises:
        ValueError: There is no such fault, or the dtype has no such bit.
    """
    if name in MODELS:
        return FaultModel(*MODELS[name])
    flip = _FLIP.fullmatch(name)
    if flip is not None:
        bit = int(flip[1])
        flip_bit(torch.zeros(0, dtype=dtype), bit)  # raises if there is no such bit
        corrupt: Corrupt = lambda values, _: flip_bit(values, bit)  # noqa: E731
        return FaultModel("element", corrupt, bit, flip[2] or "any")
    drawn = _numbered(name, bit_width(dtype))
    if drawn is None:
        raise ValueError(f"unknown fault {name!r}; valid: {', '.join(MODELS)}, {NUMBERED}")
    return FaultModel("element", drawn)


def _numbered(name: str, width: int) -> Corrupt | None:
    kind, _, number = name.partition("-" if name.startswith("flips-") else "=")
    low, _, high = number.partition(":")
    try:
        if kind == "flips" and 0 < int(number) <= width:
            return partial(_several_flips, count=int(number))
        if kind in ("value", "uniform") and bool(high) == (kind == "uniform"):
            return partial(_uniform, low=float(low), high=float(high or low))
    except ValueError:  # the text is no number: not the name of a fault
        return None
    return None

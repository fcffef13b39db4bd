"""Quantisation of activations to uint8, on a device without waiting for it."""

import math

import torch

from holdfast.abft.int8_gemm.encoding import largest_accumulator
from holdfast.abft.int8_gemm.operands import LARGEST, TINY, vanishes
from holdfast.abft.int8_gemm.weights import Int8Weights

LEVELS = 255  # steps of an activation
REFUSED = 0x7F800000  # the bits of INF in fp32
Quantised = tuple[
    torch.Tensor, float | torch.Tensor, int | torch.Tensor, torch.Tensor | None
]  # codes, scale, zero point, and what is refused


def quantise_on_host(
    rows: torch.Tensor, weights: Int8Weights, static: tuple[float, int] | None
) -> Quantised:
    """Quantise rows, fp32 [M, K], by a static scale and zero point or by their range.

    Raises:
        ValueError: They hold NaN or INF.
    """
    low, high = (float(x) for x in rows.aminmax()) if rows.numel() else (0.0, 0.0)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("the input holds NaN or INF: see its source")
    scale, zero = static or _range_of(min(low, 0.0), max(high, 0.0), float(weights.scale.max()))
    steps = (rows * (1.0 / scale)).round_().add_(zero)
    return steps.clamp_(0, LEVELS).to(torch.uint8), scale, zero, None


def _range_of(low: float, high: float, weight_scale: float) -> tuple[float, int]:
    scale = (high - low) / LEVELS
    if vanishes(scale, weight_scale):
        return 1.0, 0
    return scale, min(LEVELS, max(0, round(-low / scale)))


def quantise_on_device(
    rows: torch.Tensor, weights: Int8Weights, static: tuple[float, int] | None
) -> Quantised:
    """Quantise rows as ``quantise_on_host`` does, with the same bits and without waiting.

    Args:
        rows: fp32 [M, K].
        weights: The weight that they are to be multiplied by.
        static: Scale and zero point; by default those of the rows' range.

    Returns:
        Codes uint8 [M, K], scale fp64 [], zero point int32 [], and int32 []: ``REFUSED`` if the
        rows hold NaN or INF or overflow fp32 in an accumulator, else 0.
    """
    wide = rows.new_zeros(2) if not rows.numel() else torch.stack(rows.aminmax())
    low, high = wide.double().unbind()
    refused = ~(low.isfinite() & high.isfinite())
    largest = weights.scale.max().double()
    if static is None:
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        scale = (high - low) / LEVELS
        vanishes = (scale < TINY) | (scale * largest < TINY)
        scale = torch.where(vanishes, 1.0, scale)
        zero = torch.where(vanishes, 0.0, (-low / scale).round().clamp(0, LEVELS))
    else:
        scale, zero = (wide.new_full((), each, dtype=torch.float64) for each in static)
    accumulator = largest_accumulator(weights.inner, shifted=weights.zero_point is not None)
    refused |= ~(scale * largest * accumulator <= LARGEST)
    steps = (rows * (1.0 / scale).float()).round_().add_(zero.float())
    codes = steps.clamp_(0, LEVELS).nan_to_num_(0.0).to(torch.uint8)
    return codes, scale, zero.nan_to_num(0.0).int(), refused.int() * REFUSED


def report_refused(refused: torch.Tensor, slot: torch.Tensor | None) -> None:
    """Record in a slot that an input is refused; without a slot raise ValueError."""
    if slot is not None:
        torch.maximum(slot, refused, out=slot)
    elif int(refused):
        raise ValueError(
            "the input holds NaN or INF, or overflows fp32 in an accumulator: see its source"
        )

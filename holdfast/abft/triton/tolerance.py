"""Bounds on the rounding errors of signed residuals, for GPU kernels with one accumulator."""

import math
from typing import Literal, NamedTuple

import torch

from holdfast.abft.thresholds.rounding import (
    ACCUMULATION_SIGMAS,
    CHECK_STEPS,
    FLOAT8,
    OUTPUT_SIGMAS,
    underflow,
)

Precision = Literal["ieee", "tf32x3", "tf32", "fast"]


UNIT = torch.finfo(torch.float32).eps / 2
_MMA_BYTES = 32  # bytes of an operand's row in one step of a matrix unit
# Relative error from rounding both operands before they are multiplied.
_OPERAND_ROUNDING = {"ieee": 0.0, "tf32x3": 2.0**-21, "tf32": 2.0**-10, "fast": 0.0}
# Matrix units add fp8 products into fp32 once every 128. They cut each one, and the sum so far, 13
# bits below the largest of a step of 32, which costs up to √(33 / 3) < 4 of the last bits
# (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
_FLOAT8_ROUNDING = 2.0**-11


class Tolerance(NamedTuple):
    """Factors of the largest signed row residual that rounding causes.

    ``T = scale · √(output² E + walk² W + drift² max(E − 4 W, 0)) + floor`` with ``E = Σ_j c_ij²``,
    ``W = Σ_k a_ik² z_k`` and ``z_k = Σ_j b_kj² + g N m_k²``, where m_k is the mean of row k of B
    beyond its noise (see ``drift_growth``). For unrelated terms partial sums are random walks, E is
    about W, and errors grow with √K. For similar terms E far exceeds W, errors may all have one
    sign, and ``drift`` grows with K. ``output`` is for the rounding of C and of sums that grow
    steadily.
    """

    scale: float
    output: float
    walk: float
    drift: float
    floor: float

    @classmethod
    def of(
        cls,
        operand: torch.dtype,
        output: torch.dtype | None,
        inner: int,
        columns: int,
        precision: Precision = "ieee",
    ) -> "Tolerance":
        """Compute the tolerance of a product with K = inner.

        It is accumulated in fp32, or in fp64 if the operands are.

        The model is that of ``thresholds.rounding`` with one accumulator in place of panels. As
        matrix units truncate where they should round, ``walk`` also grows with their steps.

        Args:
            operand: Dtype of A and B.
            output: Dtype to which C was rounded; None if the accumulator is verified.
            inner: K.
            columns: Columns of C, or of the tile that is verified.
            precision: Precision of products of fp32 operands, or ``fast`` for sums of fp8 products
                that are not added into fp32 before they are complete.

        Not covered: rows whose sums grow far above √W and then cancel, such as two long blocks of
        opposite sign, and reductions in less than fp32 (torch's
        ``allow_bf16_reduced_precision_reduction``). Such rows may be suspected although right.
        """
        single = operand == torch.float32
        scalar = operand == torch.float64 or (single and precision == "ieee")
        accumulator = torch.float64 if operand == torch.float64 else torch.float32
        stored, rounding = output or accumulator, torch.finfo(accumulator).eps / 2
        # The partial sums' squares sum to K/2 (K/3 for terms of one sign) times that of the result,
        # and the mean square of a rounding is a sixth of the largest.
        sigmas = ACCUMULATION_SIGMAS / OUTPUT_SIGMAS * rounding
        random = sigmas * math.sqrt((inner / 2 + CHECK_STEPS) / 6)
        ended = sigmas * math.sqrt((inner / 3 + CHECK_STEPS + 1) / 6)
        unit = math.hypot(ended, torch.finfo(stored).eps / 2 if stored.itemsize < 4 else 0.0)
        floor = math.sqrt(columns) * underflow(inner, stored, accumulator)
        floor *= OUTPUT_SIGMAS
        cut = _OPERAND_ROUNDING[precision] if single else 0.0
        steps = 0.0 if scalar else inner * operand.itemsize / _MMA_BYTES
        if output is None and not scalar:
            # The prediction is a TF32 product of its own.
            cut += _OPERAND_ROUNDING["tf32x3"]
            steps *= 2
        coherent = cut + random + rounding * inner / 3
        walk = cut + random + rounding * steps
        if operand in FLOAT8:  # sums that stay in the matrix unit are truncated in each step
            walk = coherent = _FLOAT8_ROUNDING * (max(1.0, steps) if precision == "fast" else 1.0)
        if operand.itemsize <= 2:  # their sums are fp32, where squares below the normals are lost
            lost = unit * math.sqrt(columns) + walk * math.sqrt(inner)
            floor += OUTPUT_SIGMAS * math.sqrt(torch.finfo(torch.float32).smallest_normal) * lost
        return cls(OUTPUT_SIGMAS, unit, walk, coherent, floor)


def drift_growth(inner: int) -> tuple[float, float]:
    """Return the ratio g of the squared errors of K drifting terms to those of a random walk.

    The first value is for terms of one sign with independent roundings, the second for equal terms.
    """
    walk = inner / 2 + CHECK_STEPS
    return inner * (inner / 3) / walk, inner * (inner * inner / 4) / walk

"""How far rounding on a GPU can move a signed residual, for every kernel that sums in fp32."""

import math
from typing import Literal, NamedTuple

import torch

from holdfast.abft.thresholds.rounding import (
    ACCUMULATION_SIGMAS,
    CHECK_STEPS,
    OUTPUT_SIGMAS,
    underflow,
)

Precision = Literal["ieee", "tf32x3", "tf32"]

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

UNIT = torch.finfo(torch.float32).eps / 2
_MMA_BYTES = 32  # of operand in one step of a matrix unit: 16 products of 16 bits, 8 of TF32
# What operands lose before they are multiplied, both together.
_OPERAND_ROUNDING = {"ieee": 0.0, "tf32x3": 2.0**-21, "tf32": 2.0**-10}
# Matrix units add fp8 products with 13 fraction bits, and into fp32 once every 128.
_FLOAT8_ROUNDING = 2.0**-13


class Tolerance(NamedTuple):
    """How far rounding can move a signed row residual.

    ``T = scale · √(output² E + walk² W + drift² max(E − 4 W, 0)) + floor`` with ``E = Σ_j c_ij²``
    and ``W = Σ_k a_ik² z_k``, ``z_k = Σ_j b_kj² + g N m_k²`` for rows of mean m_k beyond its noise
    (see ``drift_growth``). Partial sums of unrelated terms are random walks: E is about W, and
    errors grow with the root of K. Where terms are alike E far exceeds W; errors may then all have
    one sign, and ``drift`` grows with K itself. ``output`` is the rounding of C, and of sums that
    grew steadily to what C is.
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
        """Compute the tolerance of a product with K = inner that is accumulated in fp32.

        The model is that of ``thresholds.rounding``, for one accumulator in place of panels.
        Matrix units moreover cut off where they should round, which is a bias: ``walk`` then grows
        with the number of their steps.

        Args:
            operand: dtype of A and B.
            output: dtype that C was rounded to, None for the accumulator.
            inner: K.
            columns: of C, or of the tile that is verified.
            precision: how fp32 operands are multiplied.

        Not covered: sums whose terms cancel in bulk after growing far above √W, such as two long
        blocks with opposite signs; reductions in less than fp32 (torch's
        ``allow_bf16_reduced_precision_reduction``). Their rows may be suspected though right.
        """
        scalar = operand == torch.float32 and precision == "ieee"
        stored = output or torch.float32
        # Of a sum of K/2 squares, resp. K/3 for terms of one sign, each rounding a sixth.
        sigmas = ACCUMULATION_SIGMAS / OUTPUT_SIGMAS * UNIT
        random = sigmas * math.sqrt((inner / 2 + CHECK_STEPS) / 6)
        ended = sigmas * math.sqrt((inner / 3 + CHECK_STEPS + 1) / 6)
        unit = math.hypot(ended, torch.finfo(stored).eps / 2 if stored.itemsize < 4 else 0.0)
        floor = math.sqrt(columns) * underflow(inner, stored, torch.float32)
        floor *= OUTPUT_SIGMAS
        if operand in FLOAT8:
            return cls(OUTPUT_SIGMAS, unit, _FLOAT8_ROUNDING, _FLOAT8_ROUNDING, floor)
        cut = _OPERAND_ROUNDING[precision] if operand == torch.float32 else 0.0
        steps = 0.0 if scalar else inner * operand.itemsize / _MMA_BYTES
        if output is None and not scalar:
            # The prediction is a TF32 product of its own.
            cut += _OPERAND_ROUNDING["tf32x3"]
            steps *= 2
        coherent = cut + random + UNIT * inner / 3
        return cls(OUTPUT_SIGMAS, unit, cut + random + UNIT * steps, coherent, floor)


def drift_growth(inner: int) -> tuple[float, float]:
    """Compute g, how much more a drift of K terms adds to the squared errors than a walk does.

    Returns:
        g for terms of one sign, whose roundings are independent, and g for terms that repeat.
    """
    walk = inner / 2 + CHECK_STEPS
    return inner * (inner / 3) / walk, inner * (inner * inner / 4) / walk

"""Worst-case rounding bounds (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.abft.thresholds.protocol import ACCUMULATION, Product, Weights


@dataclass(frozen=True)
class Analytic:
    """The threshold if every rounding of a row has its largest size and the same direction.

    ``T_i = ((1 + ρ)(1 + γ') − 1) · Σ_j (|A||B|)_ij + N·ω``, where the share of the product is
    ``ρ = 2 γ_{K+2}(u_acc) + 2 u_out`` (without ``u_out`` if it is verified online), that of the
    checksums is ``γ' = γ_{K+2N+2}``, and ω bounds the effect of underflow. ``γ_n(u) = e^{nu} − 1``
    is never above Higham's ``nu/(1 − nu)`` and is defined for every n.

    Args:
        checksum: Dtype in which checksums and residuals are computed.

    Guarantees: never exceeded by rounding alone, for any data and any order of summation.
    Not covered: it is loose by a factor of about √(K N), and faults below it pass; products that
    overflow; kernels that round more coarsely than ``accumulation`` says (TF32, reduced-precision
    reduction).
    Source: Higham, sections 3.1 and 3.5; γ from ``(1 + u)^n ≤ e^{nu}``.
    """

    checksum: torch.dtype = torch.float64

    name: ClassVar[str] = "analytic"
    weights: ClassVar[Weights] = "ones"

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M]."""
        a, b = product.operands()
        magnitude = (a.abs() @ b.abs().sum(-1, keepdim=True)).squeeze(-1)
        output = None if product.online else product.output
        sizes = product.inner, product.columns
        return row_bound(magnitude, *sizes, product.accumulator, output, self.checksum)


def row_bound(
    magnitude: torch.Tensor,
    inner: int,
    columns: int,
    accumulator: torch.dtype,
    output: torch.dtype | None,
    checksum: torch.dtype = torch.float64,
    factor: float = 1.0,
) -> torch.Tensor:
    """Bound the residual of a row in the worst case, as ``Analytic`` does.

    ``magnitude`` is ``Σ_j (|alpha| |A||B| + |beta addend|)_ij`` of each row, in fp64, ``output``
    None if C is not rounded to another dtype, and ``factor`` the one by which alpha or beta enlarge
    an underflow.
    """
    computed = _relative_bound(inner, accumulator, output)
    checked = _gamma(inner + 2 * columns + 2, checksum)
    relative = computed + checked * (1 + computed)
    return relative * magnitude + columns * _underflow(inner, accumulator, output, factor)


def element_bound(
    magnitude: torch.Tensor, inner: int, dtype: torch.dtype, factor: float = 1.0
) -> torch.Tensor:
    """Bound the distance of an element of C from its exact value, in the worst case.

    The bound is ``(2 γ + 2 u_out)·m + factor·(K + 2)·ω`` with ``γ = e^{(K+2) u_acc} − 1``, for any
    K. ω is the smallest normal number, as each step may underflow or be flushed to zero.
    ``magnitude`` is m = |alpha| |A||B| + |beta addend| at each element, in fp64, and ``factor``
    the one by which alpha or beta enlarge an underflow.
    """
    accumulator = ACCUMULATION[dtype]
    relative = _relative_bound(inner, accumulator, dtype)
    return relative * magnitude + _underflow(inner, accumulator, dtype, factor)


def _relative_bound(inner: int, accumulator: torch.dtype, output: torch.dtype | None) -> float:
    """Compute ``2 γ + 2 u_out``, or ``2 γ`` if ``output`` is None."""
    rounded = 0.0 if output is None else torch.finfo(output).eps
    return 2 * _gamma(inner + 2, accumulator) + rounded


def _gamma(steps: int, dtype: torch.dtype) -> float:
    return math.expm1(steps * torch.finfo(dtype).eps / 2)


def _underflow(
    inner: int, accumulator: torch.dtype, output: torch.dtype | None, factor: float = 1.0
) -> float:
    lost = factor * (inner + 2) * torch.finfo(accumulator).smallest_normal
    if output is None:
        return lost
    return lost + 2 * torch.finfo(output).smallest_normal * torch.finfo(output).eps

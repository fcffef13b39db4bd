"""Worst-case rounding bounds (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3)."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.abft.thresholds.protocol import ACCUMULATION, Product, Weights


@dataclass(frozen=True)
class Analytic:
    """Every rounding at its worst and in the same direction, summed over the row.

    ``T_i = ((1 + ρ)(1 + γ') − 1) · Σ_j (|A||B|)_ij + N·ω``, with ``ρ = 2 γ_{K+2}(u_acc) + 2 u_out``
    the product's share (online: without ``u_out``), ``γ' = γ_{K+2N+2}`` that of the checksums' own
    arithmetic, and ``γ_n(u) = e^{nu} − 1``: never above Higham's ``nu/(1 − nu)``, and defined for
    every n. ω is what underflow may lose.

    Args:
        checksum: dtype that the checksums and the residual are computed in.

    Guarantees: never exceeded by rounding alone, whatever the data, for any order of summation.
    Not covered: it is loose by about √(K N); faults below it pass. Products that overflow, and
    kernels that round more coarsely than ``accumulation`` says (TF32, reduced-precision reduction).
    Source: Higham, sections 3.1 and 3.5; γ from ``(1 + u)^n ≤ e^{nu}``.
    """

    checksum: torch.dtype = torch.float64

    name: ClassVar[str] = "analytic"
    weights: ClassVar[Weights] = "ones"

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M]."""
        a, b = product.operands()
        magnitude = (a.abs() @ b.abs().sum(-1, keepdim=True)).squeeze(-1)
        inner, columns = product.inner, product.columns
        output = None if product.online else product.output
        computed = _relative_bound(inner, product.accumulator, output)
        checked = _gamma(inner + 2 * columns + 2, self.checksum)
        relative = computed + checked * (1 + computed)
        return relative * magnitude + columns * _underflow(inner, product.accumulator, output)


def element_bound(
    magnitude: torch.Tensor, inner: int, dtype: torch.dtype, factor: float = 1.0
) -> torch.Tensor:
    """Bound the distance of an element of C from its exact value, in the worst case.

    ``2 γ·(|A||B| + |addend|) + 2 u_out·(same) + factor·(K + 2)·ω``, ``γ = e^{(K+2) u_acc} − 1``,
    which holds for any K; ω is the smallest normal number: each step may underflow or be flushed.

    Args:
        magnitude: fp64, |alpha| |A||B| + |beta addend| at each element.
        inner: K.
        dtype: of C.
        factor: by what alpha or beta enlarge an underflow.
    """
    accumulator = ACCUMULATION[dtype]
    relative = _relative_bound(inner, accumulator, dtype)
    return relative * magnitude + _underflow(inner, accumulator, dtype, factor)


def _relative_bound(inner: int, accumulator: torch.dtype, output: torch.dtype | None) -> float:
    """``2 γ + 2 u_out``; ``output`` is None where nothing is rounded to it."""
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

"""Rows of a matrix product computed in fp64, and bounds on a healthy kernel's error."""

import torch

from holdfast.abft.gemm.correction import row_operands
from holdfast.abft.thresholds.analytic import element_bound
from holdfast.sites import Gemm


def exact_rows(
    gemm: Gemm, batch: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute rows of C in fp64, with their sums of magnitudes and a bound on a kernel's error."""
    a, b, addend = row_operands(gemm, batch, rows)
    exact, magnitude = gemm.alpha * (a @ b), abs(gemm.alpha) * (a.abs() @ b.abs())
    if addend is not None:
        exact, magnitude = exact + addend, magnitude + addend.abs()
    factor = max(1.0, abs(gemm.alpha), abs(gemm.beta))
    bound = element_bound(magnitude, a.shape[-1], gemm.a.dtype, factor)
    return exact, magnitude, bound


def flushed(gemm: Gemm, batch: int, rows: torch.Tensor) -> torch.Tensor:
    """Bound the error in rows of C of a kernel that flushes subnormal operands to zero."""
    a, b, _ = row_operands(gemm, batch, rows)
    left, right = a.abs(), b.abs()
    smallest = torch.finfo(gemm.a.dtype).smallest_normal
    return left.where(left < smallest, 0) @ right + left @ right.where(right < smallest, 0)

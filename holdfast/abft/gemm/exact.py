"""Rows of a product in fp64, and how far a healthy kernel may be from them: the second opinion."""

import torch

from holdfast.abft.gemm.correction import full_addend
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds.analytic import element_bound
from holdfast.sites import Gemm


def exact_rows(
    gemm: Gemm, batch: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of C in fp64, their sums of magnitudes, and how far an element may be from them."""
    a, b = as_batch(gemm.a)[batch, rows].double(), as_batch(gemm.b)[batch].double()
    exact, magnitude = gemm.alpha * (a @ b), abs(gemm.alpha) * (a.abs() @ b.abs())
    if gemm.addend is not None and gemm.beta != 0:
        added = gemm.beta * as_batch(full_addend(gemm))[batch, rows].double()
        exact, magnitude = exact + added, magnitude + added.abs()
    factor = max(1.0, abs(gemm.alpha), abs(gemm.beta))
    bound = element_bound(magnitude, a.shape[-1], gemm.a.dtype, factor)
    return exact, magnitude, bound


def flushed(gemm: Gemm, batch: int, rows: torch.Tensor) -> torch.Tensor:
    """What rows of C lose at most where the kernel takes subnormal operands for zero."""
    left = as_batch(gemm.a)[batch, rows].double().abs()
    right = as_batch(gemm.b)[batch].double().abs()
    smallest = torch.finfo(gemm.a.dtype).smallest_normal
    return left.where(left < smallest, 0) @ right + left @ right.where(right < smallest, 0)

"""A product computed once more by another kernel, which decides about suspect rows.

The transposed product ``Bᵀ Aᵀ`` computes each element at another place of the processor's registers
and caches, and without copies. It sums the products of an element in the same order in almost all
shapes, so that rounding errors agree however much the data make them add up, and a device's errors
do not. The product with B's columns moved runs the very same kernel and keeps that order in every
shape.
"""

import torch

from holdfast.abft.checksums.rows import encode_rows
from holdfast.abft.gemm.correction import full_addend
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds.rounding import NARROW
from holdfast.sites import Gemm


def transposed(gemm: Gemm) -> torch.Tensor:
    """Compute ``C = (Bᵀ Aᵀ)ᵀ`` with its addend."""
    addend = None if gemm.addend is None else full_addend(gemm).mT
    return _product(gemm, gemm.b.mT, gemm.a.mT, addend).mT


def moved(gemm: Gemm) -> torch.Tensor:
    """Compute C with the columns of B moved by about half of their number, and move them back."""
    by = gemm.b.shape[-1] // 2 | 1
    b = torch.empty_like(gemm.b).copy_(gemm.b.roll(by, -1))
    addend = None if gemm.addend is None else full_addend(gemm).roll(by, -1)
    return _product(gemm, gemm.a, b, addend).roll(-by, -1)


def agreeing(
    left: torch.Tensor, right: torch.Tensor, threshold: torch.Tensor, suspects: torch.Tensor
) -> torch.Tensor:
    """Mark the suspect rows in which two products agree to within T, bool [batch, M].

    Neither an element nor the signed sum of a row may differ by more than ``threshold``.
    """
    agree = torch.zeros_like(suspects)
    limit = threshold[suspects]
    change = as_batch(left)[suspects].double() - as_batch(right)[suspects].double()
    within = (change.abs().amax(-1) <= limit) & (encode_rows(change).abs() <= limit)
    agree[suspects] = within & limit.isfinite()
    return agree


def unmoved_columns(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mark the columns in which nine of ten rows are equal, bool [batch, 1, N].

    There the two kernels sum in the same order. No column of a narrow product is marked, as its
    kernels change their order from column to column.
    """
    equal = as_batch(left) == as_batch(right)
    if min(equal.shape[-2:]) < NARROW:
        return torch.zeros_like(equal[..., :1, :])
    return equal.double().mean(-2, keepdim=True) >= 0.9


def _product(
    gemm: Gemm, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None
) -> torch.Tensor:
    with torch.no_grad():
        if addend is not None and gemm.beta != 0:
            kernel = torch.addmm if a.dim() == 2 else torch.baddbmm
            return kernel(addend, a, b, beta=gemm.beta, alpha=gemm.alpha)
        product = torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)
        return product if gemm.alpha == 1 else product.mul_(gemm.alpha)

"""Verification of products whose addend masks elements, such as attention scores with a mask.

A mask is INF, or a large finite value (−1e9, −65504, ``finfo.min``) in an addend that also holds
values far smaller. A row sum with INF cannot be compared with its checksum, and one with −1e9 has
roundings that hide any fault in the other elements. The same kernel therefore computes the product
again with 0 in place of the mask, and that product is verified. The masked product must equal it
bit for bit beside the mask. Under the mask it must be the addend's INF, or the addend plus the
unmasked product up to rounding.

Not covered: where a healthy kernel may overflow, because the magnitudes of a finite mask and of the
product add up to more than the dtype holds (a mask of ``finfo.min``), INF of the sum's sign passes.
"""

from dataclasses import dataclass, replace

import torch

from holdfast.abft.gemm.correction import exact_rows, full_addend
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds.chains import LEAST as SHORTEST_CHAIN
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.sites import Gemm

LEAST = 4096.0  # magnitude from which a finite value may be a mask
SPREAD = 1024.0  # by which the largest value of an addend with a finite mask exceeds the smallest


def mask_of(addend: torch.Tensor) -> torch.Tensor:
    """Mark the elements of an addend that mask those of the product, bool."""
    size, infinite = addend.abs(), addend.isinf()
    finite = size.where(~infinite, 0)
    if not addend.numel() or not (LEAST <= finite.max() >= SPREAD * finite.min()):
        return infinite
    return size >= LEAST


@dataclass(frozen=True)
class Unmasked:
    """A product ``gemm`` in which 0 replaces every element of the addend that masks.

    ``mask`` marks these elements of C, and ``added`` holds ``beta`` times the original addend in
    the shape of C.
    """

    gemm: Gemm
    mask: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of(cls, gemm: Gemm) -> "Unmasked":
        """Make the unmasked product of a product whose addend is a mask."""
        assert gemm.addend is not None
        addend, mask = full_addend(gemm), mask_of(gemm.addend)
        unmasked = gemm.addend.masked_fill(mask, 0)
        return cls(
            replace(gemm, addend=unmasked), mask.expand(addend.shape), gemm.beta * addend.double()
        )

    def compute(self, like: torch.Tensor) -> torch.Tensor:
        """Compute the unmasked product with the kernel and memory layout of the masked one."""
        gemm, addend = self.gemm, self.gemm.addend
        assert addend is not None
        kernel = torch.addmm if gemm.a.dim() == 2 else torch.baddbmm
        with torch.no_grad():
            out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            return kernel(addend, gemm.a, gemm.b, beta=gemm.beta, alpha=gemm.alpha, out=out)

    def wrong(self, masked: torch.Tensor, unmasked: torch.Tensor) -> torch.Tensor:
        """Mark the masked elements that do not have the value that the mask gives them, bool.

        Where the product itself is INF of the opposite sign, the sum is NaN, unless the product
        overflows only when it is rounded to the dtype of C.
        """
        sums = unmasked.double() + self.added
        expected = (self.added, unmasked + self.added.to(masked.dtype))
        equal = (
            torch.isclose(masked.double(), each.double(), rtol=0, atol=0, equal_nan=True)
            for each in expected
        )
        wrong = self.mask & ~torch.stack([*equal]).any(0)
        eps = torch.finfo(masked.dtype).eps
        finer = torch.finfo(ACCUMULATION[masked.dtype]).eps
        added = 2 * eps + finer * self.gemm.a.shape[-1] / SHORTEST_CHAIN
        near = added * self.added.abs() + 2 * eps * unmasked.double().abs()
        wrong &= self.added.isinf() | ~((masked.double() - sums).abs() <= near)
        return wrong & ~self._within_worst_case(masked, wrong)

    def _within_worst_case(self, masked: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
        """Mark finite masked elements that a healthy kernel may round or overflow to, bool."""
        within = torch.zeros_like(as_batch(wrong))
        gemm = replace(self.gemm, addend=self.added, beta=1.0)
        for batch, row in (as_batch(wrong).any(-1)).nonzero().tolist():
            exact, magnitude, bound = exact_rows(gemm, batch, torch.tensor([row]))
            actual = as_batch(masked)[batch, row].double()
            # Beside a mask of the largest fp64 value the bound may be INF, and bounds nothing.
            near = bound[0].isfinite() & ((actual - exact[0]).abs() <= bound[0])
            reached = magnitude[0] + bound[0] > torch.finfo(masked.dtype).max
            overflows = reached & actual.isinf()
            finite = as_batch(self.added)[batch, row].isfinite()
            within[batch, row] = finite & (near | (overflows & (actual.sign() == exact[0].sign())))
        return within.reshape(wrong.shape)

    def where(self, masked: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
        """Return ``masked`` where the addend masks and ``elsewhere`` at all other elements."""
        return torch.where(self.mask, masked, elsewhere)

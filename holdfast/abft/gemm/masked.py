"""Products whose addend holds INF: a mask, as attention adds it to its scores, and no fault.

INF hides what the checksum of its row would show. So the same kernel computes the product a second
time with 0 in place of INF. That one is verified like any other, and tells what the masked one must
be: bit for bit the same where the addend is finite, and the addend's INF elsewhere.
"""

from dataclasses import dataclass, replace

import torch

from holdfast.abft.gemm.correction import full_addend
from holdfast.sites import Gemm


@dataclass(frozen=True)
class Unmasked:
    """The product with 0 in place of its addend's INF.

    Attributes:
        gemm: with the finite addend; infinite: where C is masked, bool, of C's shape; added: what
            the mask adds there, ``beta`` times INF, of C's shape and dtype.
    """

    gemm: Gemm
    infinite: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of(cls, gemm: Gemm) -> "Unmasked":
        """Take the mask off a product that has one."""
        assert gemm.addend is not None
        addend = full_addend(gemm)
        finite = gemm.addend.masked_fill(gemm.addend.isinf(), 0)
        return cls(replace(gemm, addend=finite), addend.isinf(), gemm.beta * addend)

    def compute(self, like: torch.Tensor) -> torch.Tensor:
        """Compute the unmasked product, by the kernel and in the layout of the masked one."""
        gemm, addend = self.gemm, self.gemm.addend
        assert addend is not None
        kernel = torch.addmm if gemm.a.dim() == 2 else torch.baddbmm
        with torch.no_grad():
            out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            return kernel(addend, gemm.a, gemm.b, beta=gemm.beta, alpha=gemm.alpha, out=out)

    def wrong(self, masked: torch.Tensor, unmasked: torch.Tensor) -> torch.Tensor:
        """Mark the masked elements that do not have the value that the mask gives them, bool.

        INF of the other sign added is NaN, unless the product overflows only when it is stored.
        """
        expected = (self.added, unmasked + self.added)
        equal = (torch.isclose(masked, each, rtol=0, atol=0, equal_nan=True) for each in expected)
        return self.infinite & ~torch.stack([*equal]).any(0)

    def where(self, masked: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
        """Take the elements of one product where the mask is, those of another elsewhere."""
        return torch.where(self.infinite, masked, elsewhere)

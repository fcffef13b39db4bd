"""Verification of products whose addend holds INF, such as attention scores with an added mask.

A row sum with INF cannot be compared with its checksum. The same kernel therefore computes the
product again with 0 in place of INF, and that product is verified. The masked product must equal it
bit for bit where the addend is finite, and must be the addend's INF elsewhere.
"""

from dataclasses import dataclass, replace

import torch

from holdfast.abft.gemm.correction import full_addend
from holdfast.sites import Gemm


@dataclass(frozen=True)
class Unmasked:
    """A product ``gemm`` in which 0 replaces every INF of the addend.

    ``infinite`` marks the elements of C whose addend was INF, and ``added`` holds ``beta`` times
    the original addend in the shape of C.
    """

    gemm: Gemm
    infinite: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of(cls, gemm: Gemm) -> "Unmasked":
        """Make the unmasked product of a product whose addend holds INF."""
        assert gemm.addend is not None
        addend = full_addend(gemm)
        finite = gemm.addend.masked_fill(gemm.addend.isinf(), 0)
        return cls(replace(gemm, addend=finite), addend.isinf(), gemm.beta * addend)

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
        expected = (self.added, unmasked + self.added)
        equal = (torch.isclose(masked, each, rtol=0, atol=0, equal_nan=True) for each in expected)
        return self.infinite & ~torch.stack([*equal]).any(0)

    def where(self, masked: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
        """Return ``masked`` where the addend is INF and ``elsewhere`` at all other elements."""
        return torch.where(self.infinite, masked, elsewhere)

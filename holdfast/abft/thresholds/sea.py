"""Simplified error analysis: a tolerance from vector norms (Roy-Chowdhury and Banerjee)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.abft.thresholds.protocol import Product, Weights


@dataclass(frozen=True)
class Sea:
    """The threshold ``T_i = ε ((K + 2N − 2) ‖A_i‖₂ Σ_j ‖B_·j‖₂ + K ‖A_i‖₂ ‖B e‖₂)``, ``ε = 2u``.

    The first part bounds the N inner products and their sum, the second the inner product with the
    checksum ``B e``. By Cauchy–Schwarz, norms replace ``Σ_k |A_ik B_kj|``; terms in ε² are dropped.

    Guarantees: it holds to first order in ε for any data and any order of summation, while
    ``(K + 2N) ε`` is small.
    Not covered: larger products (in bf16, K + 2N above a hundred); underflow. For row checksums it
    is looser than the analytic bound, although the V-ABFT paper's introduction says the opposite.
    Source: Roy-Chowdhury and Banerjee, "Tolerance determination for algorithm-based checks using
    simplified error analysis techniques", FTCS 1993, in the form that A-ABFT (Braun et al., DSN
    2014) compares itself with, transposed: there a column checksum of m rows of length n is
    checked, here a row checksum of N columns of length K. The V-ABFT paper names it without its
    formula. ε is read as the machine epsilon 2^{1−t}; with u in its place the tolerance halves.
    """

    name: ClassVar[str] = "sea"
    weights: ClassVar[Weights] = "ones"

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M]."""
        a, b = product.operands()
        inner, columns = product.inner, product.columns
        elements = (inner + 2 * columns - 2) * torch.linalg.vector_norm(b, dim=-2).sum(-1)
        checksum = inner * torch.linalg.vector_norm(b.sum(-1), dim=-1)
        scale = (elements + checksum).unsqueeze(-1) * torch.linalg.vector_norm(a, dim=-1)
        threshold: torch.Tensor = torch.finfo(product.verified).eps * scale
        return threshold

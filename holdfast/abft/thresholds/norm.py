"""The norm-wise tolerance of the ABFT trial in the SDC study (its appendix D, equation 6)."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from holdfast.abft.thresholds.protocol import Product, Weights

Scope = Literal["matrix", "row"]


@dataclass(frozen=True)
class Norm:
    """The threshold ``T = τ ‖A‖_∞ ‖B‖_∞`` with ``τ = K u``, equal for all rows of a matrix.

    ‖·‖_∞ is the induced norm, the largest absolute row sum. With ``scope="row"`` row i of A takes
    the place of A, ``T_i = τ ‖A_i‖₁ ‖B‖_∞``: the same inequality before its maximum over the rows.

    Args:
        scope: "matrix", as published, or "row", which is never looser.

    Guarantees: the paper states none. ``τ`` bounds the K roundings of an inner product to first
    order, while ``K u`` is small.
    Not covered: the rounding of the checksums themselves (fp64 products with N far above K). Few
    faults are found, as one large row of A or B loosens the threshold of every row; the study found
    that it missed nearly all of its faults.
    Source: "Understanding SDC in LLM training", equation 6 and appendix D.4, after Golub and
    Van Loan, 2.7.11. Erratum: u is called the unit roundoff but is ``torch.finfo(dtype).eps``,
    twice as much (D.4: 1.19e-7 for fp32), and so it is here.
    """

    scope: Scope = "matrix"

    name: ClassVar[str] = "norm"
    weights: ClassVar[Weights] = "ones"

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope is {self.scope!r}; choose one of {get_args(Scope)}")

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M]."""
        if product.is_empty:
            return product.zeros()
        a, b = product.operands()
        left = a.abs().sum(-1)
        if self.scope == "matrix":
            left = left.amax(-1, keepdim=True)
        right = b.abs().sum(-1).amax(-1, keepdim=True)
        tau = product.inner * torch.finfo(product.verified).eps
        return (tau * left * right).expand(product.rows).contiguous()

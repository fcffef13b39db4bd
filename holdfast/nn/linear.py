"""The verified linear layer."""

import torch
from torch import nn

from holdfast.abft.gemm.op import matmul


class Linear(nn.Linear):
    """``nn.Linear`` whose product, and whose gradients' products, are verified: ``x Wᵀ + b``.

    Takes what ``torch.nn.Linear`` takes. Guarantees and errors are those of ``holdfast.matmul``.
    The bias is added to the finished product: in 16 bits that is one rounding more than torch's
    fused ``addmm``. Under ``protect`` a plain ``nn.Linear`` is verified too, with torch's own bits.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute [.., in_features] → [.., out_features]."""
        product = matmul(input, self.weight.t())
        return product if self.bias is None else product + self.bias

"""A floating-point linear layer whose products are verified."""

import torch
from torch import nn

from holdfast.abft.gemm.op import matmul


class Linear(nn.Linear):
    """``nn.Linear`` whose product, and whose gradients' products, are verified: ``x Wᵀ + b``.

    The arguments are those of ``torch.nn.Linear``; guarantees and errors are those of
    ``holdfast.matmul``. The bias is added to the rounded product, which for 16-bit dtypes is one
    rounding more than in torch's ``addmm``; ``protect`` verifies ``nn.Linear`` without that change.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute [.., in_features] → [.., out_features]."""
        product = matmul(input, self.weight.t())
        return product if self.bias is None else product + self.bias

"""What every threshold takes and gives: one product in, one bound per row out."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

# What a product accumulates in, by operand dtype.
ACCUMULATION = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

Weights = Literal["ones", "signs"]


@dataclass(frozen=True)
class Product:
    """``C = A B`` as a threshold sees it.

    Args:
        a: [.., M, K]; b: [.., K, N]: the operands.
        c: [.., M, N], the computed product; None where a threshold must do without it.
        output: dtype that C is stored in.
        online: C is verified in its accumulator, before it is rounded to ``output``.
        accumulation: dtype of the partial sums; by default what torch uses for a's dtype.
    """

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    output: torch.dtype
    online: bool = False
    accumulation: torch.dtype | None = None

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of the partial sums."""
        return self.accumulation or ACCUMULATION.get(self.a.dtype, torch.float32)

    @property
    def verified(self) -> torch.dtype:
        """Whose rounding the residual shows: the output's, or online the accumulator's."""
        return self.accumulator if self.online else self.output

    @property
    def unit_roundoff(self) -> float:
        """u of the verified dtype: half the distance from 1 to the next number."""
        return torch.finfo(self.verified).eps / 2


class Threshold(Protocol):
    """A bound on ``|C v − A (B v)|`` of each row from rounding alone; v are the ``weights``."""

    @property
    def name(self) -> str:
        """Its key in the registry."""

    @property
    def weights(self) -> Weights:
        """The checksum vector whose residual it bounds."""

    def __call__(self, product: Product) -> torch.Tensor:
        """fp64 [.., M].

        Raises:
            ValueError: the product lacks what this threshold needs (C, or a known dtype).
        """

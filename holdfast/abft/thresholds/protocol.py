"""Interface of all thresholds, which bound the checksum residual of each row of a product."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

# Dtype in which torch accumulates a product, by the dtype of its operands.
ACCUMULATION = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

Weights = Literal["ones", "signs"]


@dataclass(frozen=True)
class Product:
    """A product ``C = A B`` for which a threshold is computed.

    Args:
        a: Left operand, [.., M, K].
        b: Right operand, [.., K, N].
        c: The computed product, [.., M, N]; None if it is not available.
        output: Dtype in which C is stored.
        online: True if C is verified in its accumulator, before it is rounded to ``output``.
        accumulation: Dtype of the partial sums; by default the one that torch uses for a's dtype.

    Raises:
        ValueError: A dtype is not a floating-point one, or the shapes do not multiply.
    """

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None
    output: torch.dtype
    online: bool = False
    accumulation: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("a", self.a.dtype), ("b", self.b.dtype), ("output", self.output)):
            if not dtype.is_floating_point:
                raise ValueError(
                    f"{name} has dtype {dtype}, which does not round as real floating point "
                    "does; compare integer products exactly, complex ones by their parts"
                )
        a, b = tuple(self.a.shape), tuple(self.b.shape)
        if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
            raise ValueError(f"a [.., M, K] and b [.., K, N] do not multiply: shapes {a} and {b}")

    @property
    def inner(self) -> int:
        """K, the length of the inner products."""
        return self.a.shape[-1]

    @property
    def columns(self) -> int:
        """N, the length of a row of C."""
        return self.b.shape[-1]

    @property
    def rows(self) -> torch.Size:
        """The shape of one number per row of C, [.., M]."""
        batch = torch.broadcast_shapes(self.a.shape[:-2], self.b.shape[:-2])
        return torch.Size([*batch, self.a.shape[-2]])

    @property
    def is_empty(self) -> bool:
        """True if a dimension is zero, so that nothing is multiplied."""
        return self.inner == 0 or self.columns == 0 or self.rows.numel() == 0

    def zeros(self) -> torch.Tensor:
        """Return the thresholds of an empty product, which are zeros, fp64 [.., M]."""
        return self.a.new_zeros(self.rows, dtype=torch.float64)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert A and B to fp64, outside autograd."""
        return self.a.detach().double(), self.b.detach().double()

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of the partial sums."""
        return self.accumulation or ACCUMULATION.get(self.a.dtype, torch.float32)

    @property
    def verified(self) -> torch.dtype:
        """Dtype of the verified values: that of the output or, online, of the accumulator."""
        return self.accumulator if self.online else self.output

    @property
    def unit_roundoff(self) -> float:
        """Half the distance from 1 to the next number of the verified dtype."""
        return torch.finfo(self.verified).eps / 2


class Threshold(Protocol):
    """A bound on ``|C v − A (B v)|`` of each row from rounding alone; v are the ``weights``."""

    @property
    def name(self) -> str:
        """Name under which the threshold is registered."""

    @property
    def weights(self) -> Weights:
        """Checksum vector whose residual is bounded."""

    def __call__(self, product: Product) -> torch.Tensor:
        """Bound each row's residual, fp64 [.., M].

        Raises:
            ValueError: The product lacks C or has a dtype that this threshold does not know.
        """

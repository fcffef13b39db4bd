"""A-ABFT's probabilistic threshold (Braun, Halder, Wunderlich, DSN 2014)."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from holdfast.abft.thresholds.protocol import Product, Weights

# t of equation 26. The V-ABFT paper counts the hidden bit for fp64 (53) and for bf16 (8, which its
# table 6 requires), but not for fp32 (23, table 5). It gives none for fp16; here it is counted.
MANTISSA_BITS = {torch.float64: 53, torch.float32: 23, torch.float16: 11, torch.bfloat16: 8}

Magnitude = Literal["maxima", "product"]


@dataclass(frozen=True)
class AAbft:
    """A-ABFT's threshold ``T_i = 3 σ``, ``σ = √((K(K+1)(K+½) + 2K)/24) · 2^{−t} · y``.

    σ is the deviation of the rounding error of one inner product of length K whose mantissas follow
    Benford's law; the inner product is the row's checksum, ``A_i · (B e)``.

    Args:
        y: Largest |a_k b_k| of the inner products. A number is a calibrated constant (the paper has
            21 for elements in (−1, 1)), "maxima" is ``max|A| · max_k|(B e)_k|`` over the matrix, as
            in the V-ABFT paper's table 6, and "product" is ``max_k|A_ik (B e)_k|`` for each row,
            which is the definition and never looser than "maxima".
        sigmas: Number of deviations.

    Raises:
        ValueError: y or sigmas is out of range, or t is unknown for the verified dtype.

    Guarantees: none. With a computed y it holds for about 99.7 % of the rows of random data by its
    own model, and for far more in practice, as y is a maximum.

    Not covered: the rounding of the elements of C. If the rows of B sum to nearly zero, y vanishes
    and clean rows are flagged. A calibrated y fits its own data only.

    Source: V-ABFT, equation 26 and sections 4.1, 6.2. Erratum: t counts the hidden bit for fp64 and
    bf16 but not for fp32, whose threshold is therefore twice as large; this is kept to match
    table 5.
    """

    y: float | Magnitude = "maxima"
    sigmas: float = 3.0

    name: ClassVar[str] = "aabft"
    weights: ClassVar[Weights] = "ones"

    def __post_init__(self) -> None:
        if isinstance(self.y, str):
            if self.y not in get_args(Magnitude):
                raise ValueError(f"y is {self.y!r}; give a number or one of {get_args(Magnitude)}")
        elif not 0 < self.y < math.inf:
            raise ValueError(f"y is {self.y}; a calibrated y is positive and finite")
        if not 0 < self.sigmas < math.inf:
            raise ValueError(f"sigmas is {self.sigmas}; it must be positive and finite")

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, fp64 [.., M]."""
        bits = MANTISSA_BITS.get(product.verified)
        if bits is None:
            raise ValueError(
                f"A-ABFT has no mantissa length for {product.verified}; "
                f"it knows {', '.join(map(str, MANTISSA_BITS))}"
            )
        if product.is_empty:
            return product.zeros()
        n = product.inner
        deviation = math.sqrt((n * (n + 1) * (n + 0.5) + 2 * n) / 24) * 2.0**-bits
        return self.sigmas * deviation * self._magnitude(product)

    def _magnitude(self, product: Product) -> torch.Tensor:
        if not isinstance(self.y, str):
            return product.zeros() + self.y
        a, b = product.operands()
        left, right = a.abs(), b.sum(-1).abs()
        if self.y == "product":
            return (left * right.unsqueeze(-2)).amax(-1)
        largest = left.amax((-2, -1)) * right.amax(-1)
        return largest.unsqueeze(-1).expand(product.rows).contiguous()

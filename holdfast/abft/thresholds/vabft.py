"""V-ABFT's variance-based threshold (V-ABFT, section 3.4; ``e_max`` from its tables 1, 2 and 7)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch

from holdfast.abft.thresholds.protocol import Product, Weights

# Largest relative error of a row checksum on CPU, by output dtype, for outputs that are verified
# after rounding ("offline").
E_MAX = {torch.float64: 6e-16, torch.float32: 4e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}
C_SIGMA = 2.5

# The paper's block (M, K, N) on Ascend 910B.
TILE = (128, 1024, 256)

Variance = Literal["extrema", "true"]


@dataclass(frozen=True)
class EMax:
    """The largest relative error of a row checksum, ``e_max = growth · √K + constant``.

    The paper fits square products and writes √N, but its analysis (section 3.6) and its reference
    values depend on the depth of accumulation K.
    """

    constant: float
    growth: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.constant < math.inf and 0 <= self.growth < math.inf):
            raise ValueError(f"{self} is not a bound; both parts must be finite and not negative")

    def __call__(self, inner: int) -> float:
        """Evaluate ``e_max`` at K = ``inner``."""
        return self.growth * math.sqrt(inner) + self.constant


# Table 7: measured on the device, with a margin of 20 %.
CPU: Mapping[torch.dtype, EMax] = {dtype: EMax(value) for dtype, value in E_MAX.items()}
H100: Mapping[torch.dtype, EMax] = {
    torch.float64: EMax(2.5e-16, growth=1.0e-17),
    torch.float32: EMax(1.2e-7, growth=5.0e-9),
    torch.float16: EMax(1e-3),
    torch.bfloat16: EMax(8e-3),
}
ASCEND_910B: Mapping[torch.dtype, EMax] = {
    torch.float32: EMax(0.0, growth=2e-6 / math.sqrt(1024)),
    torch.float16: EMax(1e-3),
    torch.bfloat16: EMax(8e-3),
}
# The largest relative rounding errors that the paper has measured, by platform and dtype.
PRESETS = {"cpu": CPU, "h100": H100, "ascend-910b": ASCEND_910B}


@dataclass(frozen=True)
class VAbft:
    """V-ABFT's threshold, from means and variances of the rows of A and B.

    ``T_i = e_max (N|μ_A|Σ|μ_k| + c√(N μ_A² Σσ_k² + N² σ_A² Σμ_k²) + c√N σ_A √Σσ_k²)``, where μ_A
    and σ_A are those of row i of A, and μ_k and σ_k those of row k of B. e_max is that of the
    output's dtype, also for fp8 operands with an fp16 output, or online that of the accumulator's.

    Args:
        e_max: e_max by verified dtype, as in ``PRESETS`` or measured by ``calibrate``.
        online: e_max of an fp32 accumulator that is verified before it is rounded to less.
        variance: "extrema" for the one-pass bound ``σ² ≤ (max − μ)(μ − min)``, or "true" for the
            variance itself, which is never larger.
        c_sigma: Number c of standard deviations of the random terms.
        tile: Block (M, K, N) over which statistics are computed, such as ``TILE``; by default the
            whole matrix.

    Raises:
        ValueError: An argument is out of range, or there is no e_max for the verified dtype.

    Guarantees: none; the paper reports no false alarm in 100,000 products of each of four random
    distributions.

    Not covered: rounding errors that are not independent, which add up on coherent data (constant
    matrices, repeated rows of one sign, padding), so that clean rows are flagged; subnormal
    outputs.

    Source: V-ABFT, equation 23, algorithm 1, theorem 1, section 5.2. Erratum: section 3.6 also
    gives 1e-3 for bf16 on H100; table 7's 8e-3, about 2u, is used.
    """

    e_max: Mapping[torch.dtype, EMax] = field(default_factory=lambda: CPU, hash=False)
    online: EMax = EMax(1e-6)
    variance: Variance = "extrema"
    c_sigma: float = C_SIGMA
    tile: tuple[int, int, int] | None = None

    name: ClassVar[str] = "vabft"
    weights: ClassVar[Weights] = "ones"

    def __post_init__(self) -> None:
        if self.variance not in get_args(Variance):
            raise ValueError(f"variance is {self.variance!r}; choose one of {get_args(Variance)}")
        if not 0 <= self.c_sigma < math.inf:
            raise ValueError(f"c_sigma is {self.c_sigma}; it must be finite and not negative")
        if self.tile is not None and min(self.tile) < 1:
            raise ValueError(f"tile is {self.tile}; M, K and N of a tile must be positive")

    def __call__(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row, the sum of its tiles' thresholds, fp64 [.., M]."""
        return self.tiles(product).sum((-2, -1))

    def tiles(self, product: Product) -> torch.Tensor:
        """Compute the threshold of each row in each tile, fp64 [.., M, ⌈K/k⌉, ⌈N/n⌉].

        Entry (i, κ, J) bounds the residual of row i over the columns J of the partial product over
        κ, and its sum over κ bounds ``Σ_{j∈J} C_ij − A_i (B e_J)``. The tile's M is not used, as
        the statistics are those of single rows. e_max is that of the whole K, as the partial sums
        of all tiles are added in the same accumulator.
        """
        e_max = self._e_max(product)
        if product.is_empty:
            return product.zeros()[..., None, None]
        a, b = product.operands()
        _, inner, columns = self.tile or (1, product.inner, product.columns)
        strips = zip(a.split(inner, -1), b.split(inner, -2), strict=True)
        return e_max * torch.stack([self._strip(*strip, columns) for strip in strips], -2)

    def _strip(self, a: torch.Tensor, b: torch.Tensor, columns: int) -> torch.Tensor:
        """Compute ``spread`` for the tiles along N, fp64 [.., M, ⌈N/n⌉]."""
        variance = variance_bound if self.variance == "extrema" else true_variance
        mean, between = a.mean(-1), variance(a)
        brackets = [
            spread(mean, between, float(tile.shape[-1]), b_statistics(tile, variance), self.c_sigma)
            for tile in b.split(columns, -1)
        ]
        return torch.stack(brackets, -1)

    def _e_max(self, product: Product) -> float:
        accumulator = product.accumulator
        if product.online and accumulator is torch.float32 and product.output is not accumulator:
            return self.online(product.inner)
        model = self.e_max.get(product.verified)
        if model is None:
            known = ", ".join(map(str, self.e_max))
            raise ValueError(
                f"V-ABFT has no e_max for {product.verified}, only for {known}; "
                "calibrate one and pass VAbft(e_max={dtype: EMax(…)})"
            )
        return model(product.inner)


def variance_bound(rows: torch.Tensor) -> torch.Tensor:
    """Bound σ² ≤ (max − μ)(μ − min) over the last dimension (Bhatia–Davis; V-ABFT, theorem 1)."""
    mean = rows.mean(-1)
    return ((rows.amax(-1) - mean) * (mean - rows.amin(-1))).clamp_min(0)


def true_variance(rows: torch.Tensor) -> torch.Tensor:
    """Compute σ² over the last dimension, of the population."""
    return rows.var(-1, correction=0)


def b_statistics(
    b: torch.Tensor, variance: Callable[[torch.Tensor], torch.Tensor] = variance_bound
) -> torch.Tensor:
    """Compute Σ_k|μ_k|, Σ_k μ_k² and Σ_k σ_k² over the rows k of b [.., K, N], fp64 [.., 3]."""
    rows = b.double()
    mean = rows.mean(-1)
    return torch.stack([mean.abs().sum(-1), mean.square().sum(-1), variance(rows).sum(-1)], -1)


def spread(
    mean: torch.Tensor,
    variance: torch.Tensor,
    columns: float,
    statistics: torch.Tensor,
    c_sigma: float = C_SIGMA,
) -> torch.Tensor:
    """Compute the factor of e_max in V-ABFT's threshold, fp64 [.., M]."""
    absolute, squared, between = (statistics[..., i].unsqueeze(-1) for i in range(3))
    crossed = columns * mean.square() * between + columns**2 * variance * squared
    return (
        columns * mean.abs() * absolute
        + c_sigma * crossed.sqrt()
        + c_sigma * (columns * variance * between).sqrt()
    )

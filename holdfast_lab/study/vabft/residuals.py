"""Residuals of clean products, and how they compare with every registered threshold."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf, sqrt
from operator import mul
from statistics import stdev

import torch

from holdfast.abft.checksums.weights import ones, signs
from holdfast.abft.thresholds import REGISTRY
from holdfast.abft.thresholds.protocol import Product, Threshold, Weights
from holdfast_lab.study.vabft.paper import Z

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
WEIGHTS: dict[Weights, Callable[[int], torch.Tensor]] = {"ones": ones, "signs": signs}

Residuals = dict[Weights, torch.Tensor]


def residuals(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Residuals:
    """Compute ``C v − A (B v)`` of every row, fp64 [.., M], for each kind of weights v."""
    a, b, c = a.double(), b.double(), c.double()
    found: Residuals = {}
    for name, weights in WEIGHTS.items():
        v = weights(c.shape[-1])
        found[name] = c @ v - (a @ (b @ v).unsqueeze(-1)).squeeze(-1)
    return found


def exact_residuals(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Residuals:
    """Compute the residuals of [M, K], [K, N] and [M, N] matrices exactly, in integers.

    They show the errors of the product alone. The paper's baseline is mpmath at a hundred digits,
    with which this one agrees; it is faster.
    """
    vectors = {name: weights(c.shape[-1]).int().tolist() for name, weights in WEIGHTS.items()}
    encoded: dict[Weights, list[Fraction]] = {name: [] for name in vectors}
    for row in b.double().tolist():
        integers, scale = _integers(row)
        for name, v in vectors.items():
            encoded[name].append(Fraction(_dot(integers, v), scale))
    columns = {name: _integers(values) for name, values in encoded.items()}
    found: dict[Weights, list[float]] = {name: [] for name in vectors}
    for left, right in zip(a.double().tolist(), c.double().tolist(), strict=True):
        (factors, unit), (sums, scale) = _integers(left), _integers(right)
        for name, v in vectors.items():
            checksum, step = columns[name]
            predicted = Fraction(_dot(factors, checksum), unit * step)
            found[name].append(float(Fraction(_dot(sums, v), scale) - predicted))
    return {name: torch.tensor(exact, dtype=torch.float64) for name, exact in found.items()}


def _integers(numbers: Sequence[float] | Sequence[Fraction]) -> tuple[list[int], int]:
    """Return the numerators of binary fractions over a common denominator, and the denominator."""
    ratios = [number.as_integer_ratio() for number in numbers]
    scale = max(denominator for _, denominator in ratios)
    return [numerator * (scale // denominator) for numerator, denominator in ratios], scale


def _dot(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(map(mul, left, right))


def exceeds(threshold: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Mark the rows over their threshold, and those where either value is not finite, bool."""
    return ~(threshold.isfinite() & (residual.abs() <= threshold))


@dataclass
class Margin:
    """The margin of a threshold over the residuals of many rows.

    Attributes:
        rows: Number of rows.
        over: Number of residuals that exceed it, which are false alarms on clean data.
        tightness: Least threshold / |residual| of any row; below 1 if one exceeds it.
        square: Σ residual².
        total, total_square: Σ threshold and Σ threshold².
        products: Mean threshold of each product.
    """

    rows: int = 0
    over: int = 0
    tightness: float = inf
    square: float = 0.0
    total: float = 0.0
    total_square: float = 0.0
    products: list[float] = field(default_factory=list)

    def add(self, threshold: torch.Tensor, residual: torch.Tensor) -> None:
        """Add the rows of a product; thresholds and residuals are [.., M]."""
        size = residual.abs()
        self.rows += size.numel()
        self.over += int(exceeds(threshold, residual).sum())
        ratios = (threshold / size)[size > 0]
        self.tightness = min(self.tightness, float(ratios.min()) if len(ratios) else inf)
        self.square += float(size.square().sum())
        self.total += float(threshold.sum())
        self.total_square += float(threshold.square().sum())
        self.products.append(float(threshold.mean()))

    def include(self, other: "Margin") -> None:
        """Add the rows that another object has counted."""
        self.rows += other.rows
        self.over += other.over
        self.tightness = min(self.tightness, other.tightness)
        self.square += other.square
        self.total += other.total
        self.total_square += other.total_square
        self.products += other.products

    @property
    def typical(self) -> float:
        """Root mean square of the residuals."""
        return float((self.square / self.rows) ** 0.5)

    @property
    def threshold(self) -> float:
        """Mean threshold."""
        return self.total / self.rows

    @property
    def typical_error(self) -> float:
        """Relative 95 % sampling error of ``typical``, if residuals are normal."""
        return Z / sqrt(2 * self.rows)

    @property
    def threshold_error(self) -> float:
        """Relative 95 % sampling error of ``threshold``, over rows or products if that is more."""
        variance = max(0.0, self.total_square / self.rows - self.threshold**2)
        count = len(self.products)
        products = stdev(self.products) / sqrt(count) if count > 1 else 0.0
        return Z * max(sqrt(variance / self.rows), products) / self.threshold


class Margins(dict[str, Margin]):
    """The margins of several thresholds over the same rows, by the thresholds' names."""

    def add(
        self, product: Product, measured: Residuals, members: Iterable[Threshold] | None = None
    ) -> None:
        """Add the rows of a product to every threshold, by default the registered ones."""
        for member in REGISTRY.values() if members is None else members:
            margin = self.setdefault(member.name, Margin())
            margin.add(member(product), measured[member.weights])

    def include(self, other: "Margins") -> None:
        """Add the rows that another object has counted."""
        for name, margin in other.items():
            self.setdefault(name, Margin()).include(margin)

    def tightness(self) -> dict[str, float]:
        """Return the tightness of each threshold."""
        return {name: margin.tightness for name, margin in self.items()}

    def share_over(self) -> dict[str, float]:
        """Return the percentage of rows over each threshold."""
        return {name: 100 * margin.over / margin.rows for name, margin in self.items()}

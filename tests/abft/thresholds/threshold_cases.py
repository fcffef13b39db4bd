"""Products that thresholds are tried on, and the residuals that they bound."""

from fractions import Fraction

import torch
from struck import DTYPES as DTYPES

from holdfast.abft.checksums.weights import ones, signs
from holdfast.abft.thresholds import Product, Threshold

WEIGHTS = {"ones": ones, "signs": signs}


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """N(0, 1), drawn in fp64 and rounded."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def uniform(*shape: int, dtype: torch.dtype, low: float = -1.0, seed: int = 0) -> torch.Tensor:
    """U(low, 1), drawn in fp64 and rounded."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + (1 - low) * drawn).to(dtype)


def computed(a: torch.Tensor, b: torch.Tensor, online: bool = False) -> Product:
    """A B by torch's own kernel, in the operands' dtype."""
    return Product(a, b, a @ b, a.dtype, online=online)


def random_product(dtype: torch.dtype, inner: int = 64, seed: int = 0) -> Product:
    """N(0, 1) [24, inner] by [inner, 48]."""
    a = normal(24, inner, dtype=dtype, seed=2 * seed)
    return computed(a, normal(inner, 48, dtype=dtype, seed=2 * seed + 1))


def in_order(a: torch.Tensor, b: torch.Tensor) -> Product:
    """A B summed over k one by one in the operands' dtype: the textbook kernel, same everywhere."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        c += a[:, k : k + 1] * b[k : k + 1]
    return Product(a, b, c, a.dtype)


def residual(product: Product, threshold: Threshold) -> torch.Tensor:
    """``|C v − A (B v)|`` in fp64, with the weights that the threshold is for."""
    assert product.c is not None
    a, b = product.operands()
    v = WEIGHTS[threshold.weights](product.columns).unsqueeze(-1)
    return (product.c.double() @ v - a @ (b @ v)).squeeze(-1).abs()


def flagged(product: Product, threshold: Threshold) -> torch.Tensor:
    """Which rows are over the threshold: bool [.., M]."""
    return residual(product, threshold) > threshold(product)


def exact_residual(product: Product, rows: int) -> list[float]:
    """``|C e − A (B e)|`` of the first rows, in rational arithmetic."""
    assert product.c is not None
    checksum = [sum(map(Fraction, row)) for row in product.b.tolist()]
    differences = []
    for a, c in zip(product.a[:rows].tolist(), product.c[:rows].tolist(), strict=True):
        predicted = sum(Fraction(x) * total for x, total in zip(a, checksum, strict=True))
        differences.append(abs(float(sum(map(Fraction, c)) - predicted)))
    return differences

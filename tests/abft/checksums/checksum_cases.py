"""Data with known rounding, a bound that holds for it, faults, and a mode that forbids syncs."""

import math
from collections.abc import Callable

import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KINDS = ["inf", "-inf", "nan", "near", "-near", "moderate", "-moderate"]
EXTREME = KINDS[:5]
LAMBDA = 8.0  # Hoeffding: P(noise > bound) < 2 exp(-32), per checksum


def healthy(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """fp64 normal data; rounding it to another dtype is the only noise of its checksums."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(
    dtype: torch.dtype, dim: int, accumulate: torch.dtype = torch.float64
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounding to dtype, bounded by Hoeffding, and the worst case of pairwise summation, twice."""

    def threshold(matrix: torch.Tensor) -> torch.Tensor:
        n = matrix.shape[dim]
        summation = 4 * torch.finfo(accumulate).eps * math.sqrt(n) * math.log2(2 * n)
        rounding = LAMBDA * torch.finfo(dtype).eps / 2
        return (rounding + summation) * matrix.double().norm(dim=dim)

    return threshold


def value_of(kind: str, dtype: torch.dtype) -> float:
    """A wrong value of this kind; near-INF is half the largest number, moderate is 100."""
    size = {
        "inf": math.inf,
        "nan": math.nan,
        "near": torch.finfo(dtype).max * 0.6,
        "moderate": 100.0,
    }[kind.removeprefix("-")]
    return -size if kind.startswith("-") else size

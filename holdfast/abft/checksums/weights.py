"""Vectors that weight the elements of a checksum: ones, or random signs."""

from functools import cache

import numpy as np
import torch

# With this seed every prefix of n = 16, 17, … 2²⁰ signs has a sum of magnitude between √n / 2 and
# 2.26 √n, and of 3 at least: adding a constant to a whole row changes its checksum, whatever its
# length, and by no more than it would with typical signs.
SIGN_SEED = 8487194


def ones(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return Huang and Abraham's weights, (1, …, 1)."""
    return torch.ones(count, dtype=dtype)


def signs(count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the first ``count`` entries of a fixed sequence of random ±1.

    With signs in place of ones, rounding errors add up like independent ones whatever the data:
    ``P(|Σ r_j ε_j| > λ‖ε‖₂) ≤ 2 exp(−λ²/2)`` (Hoeffding), also where all ``ε_j`` are equal. A
    single error of size δ still moves the checksum by δ.
    """
    return _sign_table(1 << max(12, (count - 1).bit_length()))[:count].to(dtype, copy=True)


@cache
def _sign_table(length: int) -> torch.Tensor:
    """Draw signs from the top bits of a counter-based generator, so that every prefix agrees."""
    counters = np.arange(length, dtype=np.uint64) + np.uint64(SIGN_SEED << 32)
    return torch.from_numpy(1 - 2 * (splitmix64(counters) >> np.uint64(63)).astype(np.int8))


def splitmix64(counters: np.ndarray) -> np.ndarray:
    """Compute the values of the generator SplitMix64 for counters, uint64."""
    with np.errstate(over="ignore"):
        z = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

"""What users ask for: dense features and popular indices, the same for the same seed."""

from dataclasses import dataclass

import numpy as np
import torch

from examples.dlrm.model import Bag, Sizes

_SCATTER = 2654435761  # odd: spreads the popular rows over the table


@dataclass(frozen=True)
class Request:
    """One request: a batch of candidates to be ranked for one user."""

    dense: torch.Tensor  # [batch, dense]
    bags: list[Bag]


@dataclass(frozen=True)
class Traffic:
    """Where requests come from.

    Args:
        sizes: of the model.
        batch: candidates a request.
        pooling: indices a bag, at most; the sizes are spread evenly from 1.
        exponent: of Zipf's law, by which the r-th most popular row is asked for as r^-exponent.
    """

    sizes: Sizes
    batch: int = 32
    pooling: int = 20
    exponent: float = 1.05

    def request(self, seed: int) -> Request:
        """The request of a seed."""
        generator = np.random.default_rng(seed)
        dense = generator.standard_normal((self.batch, self.sizes.dense), dtype=np.float32)
        bags = [self._bag(rows, generator) for rows in self.sizes.rows]
        return Request(torch.from_numpy(dense), bags)

    def _bag(self, rows: int, generator: np.random.Generator) -> Bag:
        counts = generator.integers(1, self.pooling + 1, self.batch)
        offsets = np.concatenate([[0], counts.cumsum()[:-1]])
        indices = zipf(rows, self.exponent, int(counts.sum()), generator)
        return torch.from_numpy(indices), torch.from_numpy(offsets)


def zipf(
    rows: int, exponent: float, count: int, generator: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Indices below ``rows``, by the inverse of the continuous law's distribution, scattered."""
    uniform, power = generator.random(count), 1 - exponent
    ranks = ((rows + 1.0) ** power - 1) * uniform + 1
    popular = np.minimum(ranks ** (1 / power), rows).astype(np.int64) - 1
    return popular.clip(0, rows - 1) * _SCATTER % rows

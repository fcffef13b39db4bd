"""Fault-free embedding bags with large rounding errors, for measuring false alarms."""

from collections.abc import Iterator

import torch

from holdfast.abft.embedding_bag import Table
from holdfast.abft.embedding_bag.batch import Batch

# Name → (rows' kind, dim, rows pooled to a bag).
CLEAN = {
    "N(0,1), 5 rows": ("uint8", 64, 5),
    "N(0,1), 100 rows": ("uint8", 64, 100),
    "N(0,1), 2000 rows": ("uint8", 32, 2000),
    "single rows": ("uint8", 128, 1),
    "one column": ("uint8", 1, 20),
    "constant rows": ("uint8", 64, 20),
    "scales from 1e-12 to 1e12": ("uint8", 64, 20),
    "cancelling weights": ("uint8", 64, 20),
    "4 bits": ("uint4", 64, 20),
    "fp32 rows": ("float32", 64, 20),
    "fp32 constant rows": ("float32", 64, 20),
    "bf16 rows, mean": ("bfloat16", 64, 20),
}
_ROWS, _INDICES = 5000, 500_000  # rows of a table; indices of a batch, at most


def clean_bags(case: str, bags: int, generator: torch.Generator) -> Iterator[tuple[Table, Batch]]:
    """Yield tables and batches with about ``bags`` bags in all; fewer if bags are large."""
    kind, dim, pooled = CLEAN[case]
    bags = max(1, bags * 20 // pooled) if pooled > 20 else bags
    while bags > 0:
        count = min(bags, _INDICES // pooled)
        yield (
            Table.from_float(_rows(case, dim, generator), kind),
            _batch(case, count, pooled, generator),
        )
        bags -= count


def _rows(case: str, dim: int, generator: torch.Generator) -> torch.Tensor:
    weight = torch.randn(_ROWS, dim, generator=generator)
    if "constant" in case:
        return weight[:1, :1].expand(_ROWS, dim) * torch.linspace(0.9, 1.1, _ROWS)[:, None]
    if "scales" in case:
        return weight * torch.logspace(-12, 12, _ROWS)[:, None]
    return weight + 3 if "cancelling" in case else weight


def _batch(case: str, bags: int, pooled: int, generator: torch.Generator) -> Batch:
    indices = torch.randint(0, _ROWS, (bags, pooled), generator=generator)
    if "cancelling" not in case:
        return Batch(indices, mode="mean" if "mean" in case else "sum")
    indices[:, 1::2] = indices[:, ::2]  # each row is pooled twice, with opposite weights
    weights = torch.rand(bags, pooled, generator=generator)
    weights[:, 1::2] = -weights[:, ::2] * (1 + 1e-6)
    return Batch(indices, weights=weights)

"""Tables and bags that the tests share."""

from contextlib import AbstractContextManager

import torch
from struck import Strike, struck

from holdfast.abft.embedding_bag import KINDS, Table, embedding_bag
from holdfast.abft.embedding_bag.batch import Batch

QUANTISED = ("uint8", "uint4")
DIMS = (2, 16, 30, 33, 64, 100, 128, 300)


def table_of(kind: str, dim: int, rows: int = 200, seed: int = 0) -> Table:
    """Random rows, one of zeros and a constant one among them."""
    weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    weight[3], weight[4] = 0, 2.5
    return Table.from_float(weight, kind)


def batch_of(rows: int = 200, *, weighted: bool = False, seed: int = 0, **options: object) -> Batch:
    """Bags of 0, 5, 100, 195, 1 and 99 rows; some rows repeat."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, rows, (400,), generator=generator)
    offsets = torch.tensor([0, 0, 5, 105, 300, 301])
    weights = torch.randn(400, generator=generator) if weighted else None
    return Batch(indices, offsets, weights, **options)  # type: ignore[arg-type]


def kinds_and_dims() -> list[tuple[str, int]]:
    return [(kind, dim) for kind in KINDS for dim in DIMS if kind != "uint4" or dim % 2 == 0]


def pooled(table: Table, batch: Batch) -> torch.Tensor:
    return embedding_bag(
        table,
        batch.indices,
        batch.offsets,
        per_sample_weights=batch.weights,
        mode=batch.mode,
        dtype=batch.dtype,
    )


def changed(bag: int, column: int, change: float) -> AbstractContextManager[Strike]:
    """Within the block one element of every pooled output is changed before its check."""
    return struck((bag, column), lambda old: old + change, always=True)


def flip(table: Table, row: int, bit: int) -> None:
    table.data[row, bit // 8] ^= 1 << bit % 8

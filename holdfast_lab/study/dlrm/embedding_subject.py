"""The embedding bags of DLRM-ABFT's table I, with and without checksums, in a cold cache."""

from dataclasses import dataclass, field
from typing import cast

import torch

from holdfast.abft.embedding_bag import Table
from holdfast.abft.embedding_bag.batch import Batch
from holdfast.abft.embedding_bag.cpu import BEST, FBGEMM, run_kernel
from holdfast.abft.embedding_bag.layout import zeroed

ROWS, DIMS, POOLING, BATCH = 4_000_000, (32, 64, 128, 256), 100, 10
KINDS = {8: "uint8", 4: "uint4"}
FLUSHED_BYTES = 96 << 20  # at least twice the last-level cache


def packed_rows(rows: int, dim: int, bits: int = 8) -> torch.Tensor:
    """Draw random rows in FBGEMM's layout (codes, scale, bias), on memory pages like a Table's."""
    generator = torch.Generator().manual_seed(dim)
    codes = dim * bits // 8
    parameter = torch.float32 if bits == 8 else torch.float16
    width = codes + 2 * parameter.itemsize
    packed = zeroed(rows * width).view(rows, width)
    packed.random_(generator=generator)
    parameters = torch.rand(rows, 2, generator=generator) * torch.tensor([0.02, -2.0])
    packed[:, codes:] = parameters.to(parameter).view(torch.uint8)
    return packed


@dataclass
class Bare:
    """Rows without checksums, for kernels that use none."""

    data: torch.Tensor
    table: Table

    def __post_init__(self) -> None:
        self.dim, self.kind, self.module = self.table.dim, self.table.kind, self.table.module


@dataclass
class Subject:
    """A table in FBGEMM's layout and in ours with checksums, and bags drawn from it."""

    bare: torch.Tensor
    checked: Table
    weighted: bool = False
    prefetch: bool = True
    small: "Subject | None" = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        self.stream = torch.zeros(FLUSHED_BYTES if self.small else 1, dtype=torch.uint8)
        self.fresh = True
        self.draw()

    def draw(self) -> None:
        """Draw new indices for all bags."""
        rows = len(self.checked)
        indices = torch.randint(0, rows, (BATCH * POOLING,), generator=self.generator)
        weights = torch.rand(len(indices), generator=self.generator) if self.weighted else None
        self.batch = Batch(indices, torch.arange(BATCH) * POOLING, weights, prefetch=self.prefetch)

    def cool(self) -> None:
        """Evict the table but not the code from the cache; draw new indices every other time."""
        if self.fresh:
            self.draw()
        self.fresh = not self.fresh
        self.stream += 1
        if self.small is not None:
            self.small.unchecked()
            self.small.protected()

    def unchecked(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Run FBGEMM's kernel on rows in its layout, by default those of this table."""
        bare = cast(Table, Bare(self.bare if rows is None else rows, self.checked))
        return run_kernel(bare, self.batch, FBGEMM, check=False)[0]

    def protected(self, kernel: int = BEST, *, check: bool = True) -> torch.Tensor:
        """Run our kernel on rows with checksums, and verify them unless ``check`` is False."""
        output, suspects = run_kernel(self.checked, self.batch, kernel, check=check)
        assert not suspects, f"bags {suspects} of a clean table are suspected"
        return output


def subject(rows: int, dim: int, bits: int = 8) -> Subject:
    """Make a table with ``rows`` rows, and a small one that keeps the code in the cache."""
    made = []
    for count in (1000, rows):
        bare = packed_rows(count, dim, bits)
        made.append((bare, Table.from_packed(bare, KINDS[bits])))
    return Subject(*made[1], small=Subject(*made[0]))

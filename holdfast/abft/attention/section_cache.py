"""Checksums of cached keys and values, which are extended when positions are appended.

A step of decoding multiplies by all keys and values so far, and adds a few new ones. Their
checksums are therefore kept as sums (``abft.gemm.incremental_checksums``): new columns of the keys
[.., d, positions] are added to the sums of each row, and for new rows of the values
[.., positions, d] sums are appended. The checksums also show whether stored keys or values changed
in memory.
"""

from dataclasses import dataclass, field
from typing import Self

import torch

from holdfast.abft.gemm import incremental_checksums
from holdfast.abft.gemm.suspects import report_damaged_encoding
from holdfast.sites import SiteTuple


@dataclass(frozen=True)
class Grown:
    """The sums of one operand up to some position, and their fingerprints."""

    sums: torch.Tensor  # fp64 [batch, 3, K]
    check: torch.Tensor  # fp64 [batch]
    positions: int

    @classmethod
    def of(cls, sums: torch.Tensor, positions: int) -> Self:
        """Make sums for ``positions`` cached positions, with their present fingerprints."""
        return cls(sums, incremental_checksums.fingerprints(sums), positions)

    def intact(self) -> bool:
        """Check that the sums still have their fingerprints."""
        return torch.equal(incremental_checksums.fingerprints(self.sums), self.check)


@dataclass
class Operand:
    """Keys (``dim`` 2) or values (``dim`` 1) in one call: sums before it, and after it."""

    dim: int
    before: Grown | None = None
    after: Grown | None = None

    def encode(self, b: torch.Tensor, site: SiteTuple) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the checksums of B, of which only the new positions are read.

        Sums that were damaged in memory are computed again from all of B, and a ``checksum_fault``
        is recorded.
        """
        before = self.before
        if before is not None and not before.intact():
            report_damaged_encoding(site)
            before = None
        self.after = self._grown(before, b)
        return incremental_checksums.encoding_of(self.after.sums, b.shape[2], b.dtype)

    def encode_anew(self, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the checksums of ``encode``, bit for bit, from B alone."""
        return incremental_checksums.encoding_of(self._grown(None, b).sums, b.shape[2], b.dtype)

    def _grown(self, before: Grown | None, b: torch.Tensor) -> Grown:
        seen = 0 if before is None else before.positions
        new = b.narrow(self.dim, seen, b.shape[self.dim] - seen)
        empty = incremental_checksums.no_sums(b.shape[0], new.shape[1])
        if before is None:
            sums = incremental_checksums.add_columns(empty, new, 0)
        elif self.dim == 2:
            sums = incremental_checksums.add_columns(before.sums, new, seen)
        else:
            sums = torch.cat([before.sums, incremental_checksums.add_columns(empty, new, 0)], 2)
        return Grown.of(sums, b.shape[self.dim])


@dataclass
class Growing:
    """The checksums of the keys and values of one call, grown from those of the call before."""

    keys: Operand = field(default_factory=lambda: Operand(2))
    values: Operand = field(default_factory=lambda: Operand(1))

    def next(self) -> "Growing":
        """Return the checksums for the next call; sections not checked in this call keep theirs."""
        keys, values = (
            Operand(each.dim, each.after or each.before) for each in (self.keys, self.values)
        )
        return Growing(keys, values)

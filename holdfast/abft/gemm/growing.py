"""Checksums of a right operand that grows by columns or by rows: kept as sums, added to.

A row k of B is kept as ``Σ_j r_j B_kj``, ``Σ_j B_kj²`` and ``Σ_j B_kj`` in fp64, from which its
encoding follows (``thresholds.rounding``). The additions are made in the order of the columns, so
that sums made at once and sums made column by column agree in every bit: B encoded again tells
whether B changed.
"""

import torch

from holdfast import native
from holdfast.abft.checksums.rows import fingerprint
from holdfast.abft.checksums.weights import signs
from holdfast.abft.thresholds import rounding

SUMS = 3


def no_sums(batches: int, inner: int) -> torch.Tensor:
    """The sums of matrices [batches, inner, 0]: fp64 zeros [batches, 3, inner]."""
    return torch.zeros(batches, SUMS, inner, dtype=torch.float64)


def add_columns(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    """The sums of B with more columns: b [batch, K, n], of which the first is number ``first``."""
    if not b.numel():
        return sums
    if native.core is None:
        return add_columns_reference(sums, b, first)
    grown = sums.clone()
    native.core.add_columns(grown, b, first)
    return grown


def add_columns_reference(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    """``add_columns`` in plain torch, the same bits."""
    wide = b.double()
    weighted = wide * signs(first + b.shape[-1])[first:]
    terms = torch.stack([weighted, wide.square(), wide], 1)
    return torch.cat([sums.unsqueeze(-1), terms], -1).cumsum(-1)[..., -1].contiguous()


def encoding_of(
    sums: torch.Tensor, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row checksums and statistics of a B with these sums, as ``passes.encode`` gives them.

    Args:
        sums: fp64 [batch, 3, K]; columns: N; dtype: of B.

    Returns:
        fp64 [batch, K] and fp64 [batch, K + 2].
    """
    if native.core is None:
        return encoding_of_reference(sums, columns, dtype)
    row_sum, statistics = native.core.encoding_of_sums(sums, columns, torch.empty((), dtype=dtype))
    return row_sum, statistics


def encoding_of_reference(
    sums: torch.Tensor, columns: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``encoding_of`` in plain torch."""
    row_sum, square, plain = (each.clone() for each in sums.unbind(1))
    statistics = rounding.statistics_of_sums(square, plain, columns, dtype)
    check = fingerprint(torch.cat([row_sum, statistics], -1))
    return row_sum, torch.cat([statistics, check.unsqueeze(-1)], -1)


def fingerprints(sums: torch.Tensor) -> torch.Tensor:
    """The fingerprint of each matrix's sums, fp64 [batch]."""
    if native.core is None:
        return fingerprint(sums.flatten(1))
    found: torch.Tensor = native.core.fingerprints(sums)
    return found

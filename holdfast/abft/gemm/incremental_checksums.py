"""Checksums of a right operand B that grows by columns or rows, as a cache of keys does.

For each row k of B three fp64 sums are stored, ``Σ_j r_j B_kj`` with random signs r,
``Σ_j B_kj²`` and ``Σ_j B_kj``, from which its checksums follow (``thresholds.rounding``). Columns
are always added in order, so sums computed at once and column by column have the same bits.
Computing them again from B therefore shows whether B changed.
"""

import torch

from holdfast.abft.checksums.rows import fingerprint
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.passes import Encoding, configured_core
from holdfast.abft.registry import native_or_reference
from holdfast.abft.thresholds import rounding

SUMS = 3


def no_sums(batches: int, inner: int) -> torch.Tensor:
    """Return the sums of matrices without columns: fp64 zeros [batches, 3, inner]."""
    return torch.zeros(batches, SUMS, inner, dtype=torch.float64)


def add_columns(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    """Add columns of B to its sums.

    Args:
        sums: fp64 [batch, 3, K]; not changed.
        b: the new columns, [batch, K, n].
        first: number of the first new column.
    """
    return ADD_COLUMNS.select()(sums, b, first) if b.numel() else sums


def add_columns_reference(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    """Add columns as ``add_columns`` does, in plain torch, with the same bits."""
    wide = b.double()
    weighted = wide * signs(first + b.shape[-1])[first:]
    terms = torch.stack([weighted, wide.square(), wide], 1)
    return torch.cat([sums.unsqueeze(-1), terms], -1).cumsum(-1)[..., -1].contiguous()


def encoding_of(sums: torch.Tensor, columns: int, dtype: torch.dtype) -> Encoding:
    """Derive the row checksums and statistics of a B with these sums, as ``passes.encode`` does.

    Args:
        sums: fp64 [batch, 3, K].
        columns: N.
        dtype: of B.

    Returns:
        fp64 [batch, K] and fp64 [batch, K + 2].
    """
    return ENCODING_OF.select()(sums, columns, dtype)


def encoding_of_reference(sums: torch.Tensor, columns: int, dtype: torch.dtype) -> Encoding:
    """Derive an encoding as ``encoding_of`` does, in plain torch."""
    row_sum, square, plain = (each.clone() for each in sums.unbind(1))
    statistics = rounding.statistics_of_sums(square, plain, columns, dtype)
    check = fingerprint(torch.cat([row_sum, statistics], -1))
    return row_sum, torch.cat([statistics, check.unsqueeze(-1)], -1)


def fingerprints(sums: torch.Tensor) -> torch.Tensor:
    """Compute the fingerprint of each matrix's sums, fp64 [batch]."""
    return FINGERPRINTS.select()(sums)


def _add_columns_native(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    added = sums.clone()
    configured_core().add_columns(added, b, first)
    return added


def _encoding_of_native(sums: torch.Tensor, columns: int, dtype: torch.dtype) -> Encoding:
    like = torch.empty((), dtype=dtype)
    row_sum, statistics = configured_core().encoding_of_sums(sums, columns, like)
    return row_sum, statistics


def _fingerprints_native(sums: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = configured_core().fingerprints(sums)
    return found


def _fingerprints_reference(sums: torch.Tensor) -> torch.Tensor:
    return fingerprint(sums.flatten(1))


ADD_COLUMNS = native_or_reference("gemm.add_columns", _add_columns_native, add_columns_reference)
ENCODING_OF = native_or_reference(
    "gemm.encoding_of_sums", _encoding_of_native, encoding_of_reference
)
FINGERPRINTS = native_or_reference(
    "gemm.fingerprints", _fingerprints_native, _fingerprints_reference
)

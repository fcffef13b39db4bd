"""Checksums of a right operand B that grows by columns or rows, as a cache of keys does.

For each row k of B three fp64 sums are stored, ``Σ_j r_j B_kj`` with random signs r,
``Σ_j B_kj²`` and ``Σ_j B_kj``, from which its checksums follow (``thresholds.rounding``). Columns
are always added in order, so sums computed at once and column by column have the same bits.
Computing them again from B therefore shows whether B changed.
"""

import torch

from holdfast.abft.checksums.rows import fingerprint
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.cpu import Encoding, configured_core
from holdfast.abft.gemm.reference import with_fingerprint
from holdfast.abft.registry import native_or_reference
from holdfast.abft.thresholds import rounding

SUMS = 3


def no_sums(batches: int, inner: int) -> torch.Tensor:
    """Return the sums of matrices without columns: fp64 zeros [batches, 3, inner]."""
    return torch.zeros(batches, SUMS, inner, dtype=torch.float64)


def add_columns_reference(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    """Add columns [batch, K, n] of B, from number ``first`` on, to a copy of sums [batch, 3, K]."""
    wide = b.double()
    weighted = wide * signs(first + b.shape[-1])[first:]
    terms = torch.stack([weighted, wide.square(), wide], 1)
    return torch.cat([sums.unsqueeze(-1), terms], -1).cumsum(-1)[..., -1].contiguous()


def encoding_of_reference(sums: torch.Tensor, columns: int, dtype: torch.dtype) -> Encoding:
    """Derive the encoding of a B of ``dtype`` from its sums over all columns, as ``cpu.encode``."""
    row_sum, square, plain = (each.clone() for each in sums.unbind(1))
    return with_fingerprint(row_sum, rounding.statistics_of_sums(square, plain, columns, dtype))


def _add_columns_native(sums: torch.Tensor, b: torch.Tensor, first: int) -> torch.Tensor:
    added = sums.clone()
    if b.numel():
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
    """Compute the fingerprint of each matrix's sums, fp64 [batch]."""
    return fingerprint(sums.flatten(1))


add_columns = native_or_reference("gemm.add_columns", _add_columns_native, add_columns_reference)
encoding_of = native_or_reference(
    "gemm.encoding_of_sums", _encoding_of_native, encoding_of_reference
)
fingerprints = native_or_reference(
    "gemm.fingerprints", _fingerprints_native, _fingerprints_reference
)

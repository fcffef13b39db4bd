"""Embedding bag lookups in which every output row is checked."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from holdfast import native, sites
from holdfast.abft.embedding_bag.batch import Batch, check_batch
from holdfast.abft.embedding_bag.reference import embedding_bag_reference
from holdfast.abft.embedding_bag.suspects import resolve
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.policy import count_false_alarms
from holdfast.abft.registry import native_or_reference
from holdfast.errors import ConfigError

KERNELS = ("best", "portable", "ours", "fbgemm")
native.agree("bag_kernels", KERNELS)
BEST, PORTABLE, OURS, FBGEMM = range(len(KERNELS))


def embedding_bag(
    table: Table,
    indices: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    dtype: torch.dtype = torch.float32,
    prefetch: bool = True,
    verify: bool = True,
) -> torch.Tensor:
    """Pool rows of a table, ``R = Σ_i w_i (α_i row_i + β_i)``, and check every output row.

    Args:
        table: rows with their checksums.
        indices: int32 or int64 on the CPU: [count] with ``offsets``, else [bags, size].
        offsets: where bags begin, int32 or int64; bags may be empty (a row of zeros).
        mode: ``"sum"`` or ``"mean"``.
        per_sample_weights: fp32, shaped as ``indices``; only of sums.
        include_last_offset: ``offsets`` has one entry more, where the last bag ends.
        padding_idx: a row that counts as absent, also in a mean; negative counts from the end.
        dtype: of the output, fp32 or fp16 (accumulated in fp32).
        prefetch: fetch rows ahead; worth it unless the table fits into the cache.
        verify: False pools without any check.

    Returns:
        [bags, dim]; without padding_idx bit for bit what FBGEMM's kernel gives (dim = 1 excepted:
        there FBGEMM adds up in another order).

    Guarantees: a fault in the pooling that moves a bag's signed sum by more than the bound that the
    README derives is seen; so is every single flipped bit of a row's scale, bias, signed sum,
    largest magnitude and their guard (of many flips there about 1 pattern in 256 passes), and every
    flipped bit of an element whose effect exceeds that bound. The CRC is not read here: only scrubs
    and second opinions see it rot. What is seen is confirmed by pooling again on another path, bit
    for bit, and by the rows' own CRCs, before it is called a fault: no false positives, NaN, INF
    and overflowing weights included. A repaired bag has the bits of a clean run.

    Not covered: an index that is wrong before it is read; changes below the bound.

    Raises:
        UncorrectableFault: a row is damaged in more than one bit and has no source; no two
            computations agree; or ``correction="detect"`` forbids the repair. Within
            ``holdfast.protection.collecting`` (a ``Guard``) it is collected instead.
        ConfigError, TypeError, ValueError, IndexError: an argument is unusable.

    Source: DLRM-ABFT, section V, algorithm 2. **Erratum**: equation 5 there lacks the brackets of
    its sum. Its bound of 1e-5 is replaced by one that follows the rows' own magnitudes.
    """
    padding = -1 if padding_idx is None else row_of(padding_idx, len(table))
    batch = Batch(
        indices, offsets, per_sample_weights, include_last_offset, mode, padding, dtype, prefetch
    )
    return pool(table, batch, verify)


def embedding_bags(
    calls: Sequence[tuple[Table, Batch]], *, verify: bool = True
) -> list[torch.Tensor]:
    """Pool the bags of many tables in one call of the native core.

    Args:
        calls: Tables, each with its indices, offsets and weights.
        verify: False pools without any check.

    Returns:
        For each table the output [bags, dim] of :func:`embedding_bag`, bit for bit.

    Guarantees, Not covered and errors are those of :func:`embedding_bag`.
    """
    for _, batch in calls:
        check_batch(batch)
    if native.core is None or sites.armed():
        return [pool(table, batch, verify) for table, batch in calls]
    asked = [(*_operands(table, batch), batch.prefetch) for table, batch in calls]
    found = native.core.embedding_bags(asked, verify)
    outputs = []
    for (table, batch), (output, suspects, cleared) in zip(calls, found, strict=True):
        outputs.append(output)
        count_false_alarms(table.module, cleared)
        if suspects:
            resolve(table, batch, output, suspects, compute)
    return outputs


def pool(table: Table, batch: Batch, verify: bool) -> torch.Tensor:
    """Sum or average the rows of each bag, with the arguments of ``embedding_bag``."""
    check_batch(batch)
    site = (lambda pooled: _visit(table, batch, pooled)) if sites.armed() else None
    output, suspects = compute(table, batch, site=site, check=verify)
    if suspects:
        resolve(table, batch, output, suspects, compute)
    return output


def compute(
    table: Table,
    batch: Batch,
    *,
    portable: bool = False,
    site: object = None,
    check: bool = True,
) -> tuple[torch.Tensor, list[int]]:
    """Pool and check; ``portable`` uses the scalar kernel, whose results have the same bits.

    Returns:
        The output, and the numbers of the bags whose check failed.
    """
    return POOL.select()(table, batch, portable, site, check)


def _pool_native(
    table: Table, batch: Batch, portable: bool, site: object, check: bool
) -> tuple[torch.Tensor, list[int]]:
    return run_kernel(table, batch, PORTABLE if portable else BEST, check=check, site=site)


def _pool_reference(
    table: Table, batch: Batch, portable: bool, site: object, check: bool
) -> tuple[torch.Tensor, list[int]]:
    return embedding_bag_reference(table, batch, site, check=check)


POOL = native_or_reference("embedding_bag", _pool_native, _pool_reference)


def run_kernel(
    table: Table, batch: Batch, kernel: int, *, check: bool = True, site: object = None
) -> tuple[torch.Tensor, list[int]]:
    """Pool by one of the native core's kernels, with or without its checks."""
    output, suspects, cleared = native.required().embedding_bag(
        *_operands(table, batch), check, batch.prefetch, kernel, site
    )
    count_false_alarms(table.module, cleared)
    return output, suspects


def _operands(table: Table, batch: Batch) -> tuple[Any, ...]:
    """Return table and batch as the native core takes them."""
    return (
        table.data,
        table.dim,
        table.kind.number,
        batch.indices,
        batch.offsets,
        batch.weights,
        batch.include_last,
        batch.padding,
        batch.mode == "mean",
        batch.dtype == torch.float16,
    )


def row_of(padding_idx: int, rows: int) -> int:
    """Return the row number that a ``padding_idx``, which may be negative, refers to.

    Raises:
        TypeError, ConfigError: It is not an integer, or not a row of the table.
    """
    try:
        row = operator.index(padding_idx)
    except TypeError:
        raise TypeError(f"padding_idx = {padding_idx!r} must be an integer or None") from None
    if not -rows <= row < rows:
        raise ConfigError(f"padding_idx = {row} is outside the table's {rows} rows")
    return row % rows


def _visit(table: Table, batch: Batch, pooled: torch.Tensor) -> None:
    """Call the fault injector's hook, if installed, after the pooling and before its check."""
    nothing = torch.empty(0, dtype=torch.float64)
    gemm = sites.Gemm(None, batch.indices, table.data, 0.0, 1.0, nothing, nothing)
    sites.visit("output", f"{table.name}/embedding_bag/forward", gemm, pooled)

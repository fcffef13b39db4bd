"""Embedding bag lookups in which every output row is checked."""

import operator
from collections.abc import Sequence

import torch

from holdfast import native, sites
from holdfast.abft.embedding_bag.batch import Batch, check_batch
from holdfast.abft.embedding_bag.cpu import compute, operands
from holdfast.abft.embedding_bag.suspects import resolve
from holdfast.abft.embedding_bag.table import Table
from holdfast.abft.policy import count_false_alarms
from holdfast.errors import ConfigError


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
    slot: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool rows of a table, ``R = Σ_i w_i (α_i row_i + β_i)``, and check every output row.

    Args:
        table: The rows and their checksums.
        indices: int32 or int64 on the table's device: [count] with ``offsets``, else [bags, size].
        offsets: Index at which each bag begins, int32 or int64. An empty bag gives zeros.
        mode: ``"sum"`` or ``"mean"``.
        per_sample_weights: fp32, of the shape of ``indices``; for sums only.
        include_last_offset: ``offsets`` ends with the index at which the last bag ends.
        padding_idx: Row that is skipped, also in the count of a mean; negative counts from the end.
        dtype: Dtype of the output, fp32 or fp16; sums are accumulated in fp32.
        prefetch: Fetch rows ahead, which pays unless the table fits into the cache.
        verify: False pools without any check.
        slot: For a table on CUDA, int32 [1] on its device, in which a failure is recorded: it
            becomes the bits of 2.0 in fp32, if it is less. Nothing is diagnosed or repaired then,
            and the host does not wait for the device. Without it the host waits once a call.

    Returns:
        [bags, dim]; without padding_idx bit for bit what FBGEMM's kernel gives (dim = 1 excepted:
        there FBGEMM adds up in another order).

    Guarantees: a fault in the pooling that moves a bag's signed sum by more than the bound that the
    README derives is found; so is every single flipped bit of a row's scale, bias, signed sum,
    largest magnitude and their guard byte (of many flips there about 1 pattern in 256 passes), and
    every flipped bit of an element whose effect exceeds that bound. A suspect bag is pooled again
    by another kernel, bit for bit, and its rows are checked by their CRCs, before a fault is
    reported; so there are no false positives, also with NaN, INF and overflowing weights. A
    repaired bag has the bits of a run without the fault.

    With a slot there is no second look: rounding errors of one row many times, or weights that are
    no numbers, may set it.

    Not covered: an index that is wrong before it is read; changes below the bound; a damaged CRC,
    which only a scrub or the diagnosis of a suspect bag reads.

    Raises:
        UncorrectableFault: A row is damaged in more than one byte and has no source; no two
            computations agree; or ``correction="detect"`` forbids the repair. Within
            ``holdfast.protection.collecting`` (a ``Guard``) it is collected instead.
        ConfigError, TypeError, ValueError, IndexError: An argument is unusable.

    Source: DLRM-ABFT, section V, algorithm 2. **Erratum**: equation 5 there lacks the brackets of
    its sum. Its bound of 1e-5 is replaced by one that follows the rows' own magnitudes.
    """
    padding = -1 if padding_idx is None else row_of(padding_idx, len(table))
    batch = Batch(
        indices, offsets, per_sample_weights, include_last_offset, mode, padding, dtype, prefetch
    )
    return pool(table, batch, verify, slot)


def embedding_bags(
    calls: Sequence[tuple[Table, Batch]], *, verify: bool = True
) -> list[torch.Tensor]:
    """Pool the bags of many tables in one call of the native core.

    Args:
        calls: Tables and the batches of bags to pool from them.
        verify: False pools without any check.

    Returns:
        For each table the output [bags, dim] of :func:`embedding_bag`, bit for bit.

    Guarantees, Not covered and errors are those of :func:`embedding_bag`.
    """
    for _, batch in calls:
        check_batch(batch)
    on_cpu = all(table.data.is_cpu for table, _ in calls)
    if native.core is None or sites.armed() or not on_cpu:
        return [pool(table, batch, verify) for table, batch in calls]
    asked = [operands(table, batch) for table, batch in calls]
    found = native.core.embedding_bags(asked, verify)
    outputs = []
    for (table, batch), (output, suspects, cleared) in zip(calls, found, strict=True):
        outputs.append(output)
        if cleared:
            count_false_alarms(table.module, cleared)
        if suspects:
            resolve(table, batch, output, suspects)
    return outputs


def pool(
    table: Table, batch: Batch, verify: bool, slot: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum or average the rows of each bag, with the arguments of ``embedding_bag``."""
    check_batch(batch)
    site = (lambda pooled: _visit(table, batch, pooled)) if sites.armed() else None
    output, suspects = compute(table, batch, site=site, check=verify, slot=slot)
    if suspects:
        resolve(table, batch, output, suspects)
    return output


def row_of(padding_idx: int, rows: int) -> int:
    """Return the row that a ``padding_idx`` refers to; raise if there is no such row."""
    try:
        row = operator.index(padding_idx)
    except TypeError:
        raise TypeError(f"padding_idx = {padding_idx!r} must be an integer or None") from None
    if not -rows <= row < rows:
        raise ConfigError(f"padding_idx = {row} is outside the table's {rows} rows")
    return row % rows


def _visit(table: Table, batch: Batch, pooled: torch.Tensor) -> None:
    """Let a fault injector change the pooled rows before they are checked."""
    nothing = torch.empty(0, dtype=torch.float64)
    gemm = sites.Gemm(None, batch.indices, table.data, 0.0, 1.0, nothing, nothing)
    sites.visit("output", f"{table.name}/embedding_bag/forward", gemm, pooled)

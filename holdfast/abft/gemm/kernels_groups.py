"""Sums of the verification kernel for products whose rows or inner dimension are in groups."""

import triton
import triton.language as tl

from holdfast.abft.gemm.kernels import GROUP, batch_rows, load_tile

OF_ROWS = tl.constexpr(1)  # groups are of rows of A, and of its columns otherwise


@triton.jit
def sums_of_groups(
    a, encoding, partials, sizes, split, groups, batch, program, VARIANT: tl.constexpr
):
    """Compute ``P`` and ``W`` of a tile's rows of A, where only columns of a group are multiplied.

    A group of rows is multiplied by its own matrix, so that a tile in two groups is read twice. Of
    groups of columns that of the batch's number is read.
    """
    dtype: tl.constexpr = partials.dtype.element_ty
    shape: tl.constexpr = (VARIANT.a_rows, VARIANT.a_columns)
    M, K = sizes[0], sizes[2]
    part, row = program % split[3], (program // split[3]) * VARIANT.a_rows
    rows = row + tl.arange(0, VARIANT.a_rows)
    dots, walks = tl.zeros(shape, dtype), tl.zeros(shape, dtype)
    if VARIANT.groups == OF_ROWS:
        first = _ended(groups, row)
        last = tl.minimum(_ended(groups, row + VARIANT.a_rows - 1) + 1, groups[1])
    else:
        first = batch.to(tl.int32)
        last = first + 1
    for group in range(first, last):
        # Nothing outside of A is read, whatever the offsets are.
        begin = tl.maximum(tl.load(groups[0] + group - 1, group > 0, other=0), 0)
        end = tl.minimum(tl.load(groups[0] + group), M if VARIANT.groups == OF_ROWS else K)
        first_step = part * split[4]
        last_step = tl.minimum(first_step + split[4], tl.cdiv(K, VARIANT.a_columns))
        known = 0 * batch
        if VARIANT.groups == OF_ROWS:
            known += group * K.to(tl.int64)
        else:
            first_step = tl.maximum(first_step, begin // VARIANT.a_columns)
            last_step = tl.minimum(last_step, tl.cdiv(end, VARIANT.a_columns))
        for step in tl.range(first_step, last_step, num_stages=VARIANT.stages):
            columns = step * VARIANT.a_columns + tl.arange(0, VARIANT.a_columns)
            if VARIANT.groups == OF_ROWS:
                inside = ((rows >= begin) & (rows < end))[:, None] & (columns < K)[None, :]
            else:
                inside = (rows < M)[:, None] & ((columns >= begin) & (columns < end))[None, :]
            values = load_tile(a, batch, rows, columns, inside, VARIANT.a_layout).to(dtype)
            of_b = encoding[0] + known + columns
            dots += values * tl.load(of_b, columns < K, other=0.0)[None, :]
            of_b = encoding[1] + known + columns
            walks += values * values * tl.load(of_b, columns < K, other=0.0)[None, :]
    out = partials + part * batch_rows(sizes) + batch * M + rows
    tl.store(out, tl.sum(dots, 1), rows < M)
    tl.store(out + split[3] * batch_rows(sizes), tl.sum(walks, 1), rows < M)
    block = row // GROUP
    return block, block + 1


@triton.jit
def _ended(groups, row):
    """Count the groups that end at a row or above it."""
    count = 0 * row
    for first in tl.range(0, groups[1], GROUP):
        group = first + tl.arange(0, GROUP)
        ends = tl.load(groups[0] + group, group < groups[1], other=2147483647)
        count += tl.sum((ends <= row).to(tl.int32), 0)
    return count

"""Triton functions of verified products: tiles, the encoding of B in blocks, the threshold."""

import triton
import triton.language as tl

from holdfast.abft.triton.rows import spread_of

WIDE = tl.constexpr(0)  # elements of a row are neighbours in memory
TALL = tl.constexpr(1)  # elements of a column are
GROUP = tl.constexpr(64)  # rows that one program judges


@triton.jit
def load_tile(matrix, batch, rows, columns, inside, LAYOUT: tl.constexpr):
    """Load a tile in the dtype of its matrix; elements outside of it are zero."""
    row_step = 1 if LAYOUT == TALL else matrix[2]
    column_step = 1 if LAYOUT == WIDE else matrix[3]
    offsets = rows[:, None].to(tl.int64) * row_step + columns[None, :].to(tl.int64) * column_step
    return tl.load(matrix[0] + batch * matrix[1] + offsets, inside, other=0.0)


@triton.jit
def batch_rows(sizes):
    """Return the number of rows in the whole batch."""
    return tl.num_programs(1).to(tl.int64) * sizes[0]


@triton.jit
def encode_kernel(
    b, signs_ptr, sums_ptr, K, N, block, drifting, repeating, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute ``Σ_j r_j b_kj`` and the spread ``z_k`` of BLOCK_K rows of B in one column block.

    The sums [batch, blocks, 2, K] are accumulated in their own dtype and in a fixed order, which
    does not depend on the scheduling of programs.
    """
    column_block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dtype = sums_ptr.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    lanes = tl.arange(0, BLOCK_N)
    row_ptrs = b.data + batch * b.strides[0] + rows[:, None].to(tl.int64) * b.strides[1]
    signed = tl.zeros((BLOCK_K, BLOCK_N), dtype)
    squares = tl.zeros((BLOCK_K, BLOCK_N), dtype)
    plain = tl.zeros((BLOCK_K, BLOCK_N), dtype)
    end = tl.minimum((column_block + 1) * block, N)
    for start in tl.range(column_block * block, end, BLOCK_N, num_stages=3):
        columns = start + lanes
        inside = (rows[:, None] < K) & (columns[None, :] < end)
        values = tl.load(row_ptrs + columns[None, :].to(tl.int64) * b.strides[2], inside, other=0.0)
        values = values.to(dtype)
        signs = tl.load(signs_ptr + columns, mask=columns < end, other=0).to(dtype)
        signed += values * signs[None, :]
        squares += values * values
        plain += values
    out = sums_ptr + (batch * tl.num_programs(1) + column_block) * 2 * K + rows
    count = (end - column_block * block).to(dtype)
    tl.store(out, tl.sum(signed, 1), rows < K)
    spread = spread_of(tl.sum(squares, 1), tl.sum(plain, 1), count, drifting, repeating, BLOCK_K)
    tl.store(out + K, spread, rows < K)


@triton.jit
def rounding_bound(energy, rest, walk, tolerance):
    """Compute the threshold of a signed residual (see ``triton.tolerance.Tolerance``).

    ``energy`` is that of C and ``rest`` that of C without its addend. All factors are divided by
    the largest one, as their squares would underflow for small rows.
    """
    scale, output, walking, drift, floor = tolerance
    unit = tl.maximum(tl.maximum(output, drift), walking)
    unit = tl.maximum(unit, 1e-30)
    output, walking, drift = output / unit, walking / unit, drift / unit
    rounded = output * output * energy
    random = walking * walking * walk
    coherent = drift * drift * tl.maximum(rest - 4 * walk, 0)
    return scale * unit * tl.sqrt(rounded + random + coherent) + floor

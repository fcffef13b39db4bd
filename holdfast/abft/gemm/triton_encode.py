"""Triton kernels that encode B: its signed row sums, row statistics and weighted checksums."""

import triton
import triton.language as tl

from holdfast.abft.thresholds import rounding

MEAN_NOISE = tl.constexpr(rounding.MEAN_NOISE)


@triton.jit
def encode_kernel(
    b_ptr,
    signs_ptr,
    sums_ptr,
    K,
    N,
    stride_batch,
    stride_k,
    stride_n,
    block,
    drifting,
    repeating,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``Σ r_j b_kj`` and the spread ``z_k`` over one column block of BLOCK_K rows of B.

    Sums [batch, blocks, 2, K] are accumulated in their own dtype, elementwise over the tiles and
    then as a tree: the result does not depend on how programs are scheduled.
    """
    column_block = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dtype = sums_ptr.dtype.element_ty
    rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    lanes = tl.arange(0, BLOCK_N)
    row_ptrs = b_ptr + batch * stride_batch + rows[:, None].to(tl.int64) * stride_k
    signed = tl.zeros((BLOCK_K, BLOCK_N), dtype)
    squares = tl.zeros((BLOCK_K, BLOCK_N), dtype)
    plain = tl.zeros((BLOCK_K, BLOCK_N), dtype)
    end = tl.minimum((column_block + 1) * block, N)
    for start in tl.range(column_block * block, end, BLOCK_N, num_stages=3):
        columns = start + lanes
        inside = (rows[:, None] < K) & (columns[None, :] < end)
        b = tl.load(row_ptrs + columns[None, :].to(tl.int64) * stride_n, mask=inside, other=0.0)
        b = b.to(dtype)
        signs = tl.load(signs_ptr + columns, mask=columns < end, other=0).to(dtype)
        signed += b * signs[None, :]
        squares += b * b
        plain += b
    out = sums_ptr + (batch * tl.num_programs(1) + column_block) * 2 * K + rows
    count = (end - column_block * block).to(dtype)
    tl.store(out, tl.sum(signed, 1), rows < K)
    spread = spread_of(tl.sum(squares, 1), tl.sum(plain, 1), count, drifting, repeating, BLOCK_K)
    tl.store(out + K, spread, rows < K)


@triton.jit
def spread_of(squares, plain, count, drifting, repeating, BLOCK_K: tl.constexpr):
    """``z = Σ b² + g · n · m²`` of rows with mean m over n columns, beyond its own noise.

    g is ``drifting``, or ``repeating`` where a row has the sums of its neighbour: rows that repeat
    have their roundings all in one direction.
    """
    same = _equals_neighbour(squares, BLOCK_K) & _equals_neighbour(plain, BLOCK_K)
    beyond_noise = tl.maximum(plain * plain - MEAN_NOISE * squares, 0)
    return squares + tl.where(same, repeating, drifting) * beyond_noise / count


@triton.jit
def _equals_neighbour(values, COUNT: tl.constexpr):
    """Whether each of the pairs (0, 1), (2, 3), … is equal, for both of its members."""
    pairs = tl.reshape(values, (COUNT // 2, 2))
    same = tl.max(pairs, 1) == tl.min(pairs, 1)
    return tl.reshape(tl.broadcast_to(same[:, None], (COUNT // 2, 2)), (COUNT,))


@triton.jit
def weigh_kernel(
    b_ptr,
    table_ptr,
    weighted_ptr,
    K,
    N,
    stride_batch,
    stride_k,
    stride_n,
    DIGITS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """All weighted checksums ``Σ_j t_dj b_kj`` (t = ±1) in one pass: [batch, DIGITS, K], fp32.

    The table is exact in every operand dtype, so the matrix units only add.
    """
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    digits = tl.arange(0, PADDED)
    row_ptrs = b_ptr + batch * stride_batch + rows[:, None].to(tl.int64) * stride_k
    total = tl.zeros((BLOCK_K, PADDED), tl.float32)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        b = tl.load(
            row_ptrs + columns[None, :].to(tl.int64) * stride_n,
            mask=(rows[:, None] < K) & (columns[None, :] < N),
            other=0.0,
        )
        table = tl.load(
            table_ptr + digits[None, :] * N + columns[:, None],
            mask=(digits[None, :] < DIGITS) & (columns[:, None] < N),
            other=0,
        )
        total = tl.dot(b.to(OPERAND), table.to(OPERAND), total, input_precision="ieee")
    out = weighted_ptr + (batch * DIGITS + digits[None, :]) * K + rows[:, None]
    tl.store(out, total, mask=(rows[:, None] < K) & (digits[None, :] < DIGITS))

"""Triton kernels that encode B, verify the rows of a finished product C and repair suspect ones.

Faults are found, repaired and counted on the device, without waiting for the host.
"""

import triton
import triton.language as tl

from holdfast.abft.triton.rows import (
    CLEAN,
    CORRECTED,
    SUSPECT,
    count_rows,
    exceeds,
    spread_of,
)

MAX_FP32 = tl.constexpr(3.4028234663852886e38)


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
def verify_kernel(
    c, a, signs_ptr, sums_ptr, verdict, sizes, tolerance, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute residual, threshold and energy of BLOCK_M rows of C, reading C and A once."""
    M, N, K = sizes.rows, sizes.columns, sizes.inner
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < M
    c_rows = _rows_of(c, batch, rows, N)
    a_rows = _rows_of(a, batch, rows, K)
    sums_ptr += batch * 2 * K
    dtype: tl.constexpr = sums_ptr.dtype.element_ty

    total, energy = _row_sums(c_rows, signs_ptr, exists, dtype, BLOCK)
    predicted, walk = _prediction(a_rows, sums_ptr, exists, BLOCK)
    residual = total - predicted
    bound = rounding_bound(energy, walk, tolerance)
    suspect = exists & exceeds(residual, bound)

    out = batch * M + rows
    plane = tl.num_programs(1).to(tl.int64) * M
    tl.store(verdict.rows + out, residual, exists)
    tl.store(verdict.rows + plane + out, bound, exists)
    tl.store(verdict.rows + 2 * plane + out, energy, exists)
    status = tl.where(suspect, SUSPECT, CLEAN)
    if tl.max(suspect.to(tl.int32), 0) > 0:
        count_rows(verdict.counts, suspect, status)
    tl.store(verdict.status + out, status, exists)


@triton.jit
def recompute_kernel(
    c, a, b, verdict, sizes, tolerance, parts, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the suspect rows of a block again and replace the parts of them that are wrong.

    A part is replaced if it differs from its recomputation by more than the rounding of both, so
    that right values keep their bits. A block without suspect rows costs one load.
    """
    M, N = sizes.rows, sizes.columns
    batch = tl.program_id(1).to(tl.int64)
    row_block = tl.program_id(0) // parts
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    status_ptrs = verdict.status + batch * M + rows
    suspect = tl.load(status_ptrs, rows < M, other=CLEAN) != CLEAN
    if tl.max(suspect.to(tl.int32), 0) > 0:
        c_rows = _rows_of(c, batch, rows, N)
        a_rows = _rows_of(a, batch, rows, sizes.inner)
        b_ptr = b.data + batch * b.strides[0]
        first = (tl.program_id(0) % parts) * BLOCK_N
        for start in range(first, N, parts * BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            product, walk = _product_and_walk(
                a_rows, b_ptr, b.strides, suspect, columns, N, PRECISION, OPERAND, BLOCK_K
            )
            c_ptrs = c_rows[0][:, None] + columns[None, :].to(tl.int64) * c_rows[1]
            wrong = _replace_wrong(c_ptrs, product, walk, suspect, columns < N, tolerance)
            old = tl.atomic_max(status_ptrs, CORRECTED, wrong)
            newly = wrong & (old == SUSPECT)
            tl.atomic_add(verdict.counts + 1, tl.sum(newly.to(tl.int32), 0))


@triton.jit
def rounding_bound(energy, walk, tolerance):
    """Compute the threshold of a signed residual (see ``triton.tolerance.Tolerance``).

    All factors are divided by the largest one, as their squares would underflow for small rows.
    """
    unit = tl.maximum(tl.maximum(tolerance.output, tolerance.drift), tolerance.walk)
    unit = tl.maximum(unit, 1e-30)
    output, walking, drift = tolerance.output / unit, tolerance.walk / unit, tolerance.drift / unit
    rounded = output * output * energy
    random = walking * walking * walk
    coherent = drift * drift * tl.maximum(energy - 4 * walk, 0)
    return tolerance.scale * unit * tl.sqrt(rounded + random + coherent) + tolerance.floor


@triton.jit
def _rows_of(matrix, batch, rows, length):
    """Return row addresses of a matrix, the stride along a row, and the row length."""
    pointers = matrix.data + batch * matrix.strides[0] + rows.to(tl.int64) * matrix.strides[1]
    return pointers, matrix.strides[2], length


@triton.jit
def _load_columns(rows, wanted, columns):
    """Load elements of the rows marked in ``wanted``; other rows are zero."""
    pointers, step, length = rows
    inside = wanted[:, None] & (columns[None, :] < length)
    return tl.load(pointers[:, None] + columns[None, :].to(tl.int64) * step, inside, other=0.0)


@triton.jit
def _row_sums(c_rows, signs_ptr, wanted, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``Σ_j r_j c_ij`` and ``Σ_j c_ij²`` of the rows marked in ``wanted``."""
    N = c_rows[2]
    total = tl.zeros((wanted.shape[0], BLOCK), dtype)
    energy = tl.zeros((wanted.shape[0], BLOCK), dtype)
    for start in tl.range(0, N, BLOCK, num_stages=3):
        columns = start + tl.arange(0, BLOCK)
        c = _load_columns(c_rows, wanted, columns).to(dtype)
        signs = tl.load(signs_ptr + columns, columns < N, other=0).to(dtype)
        total += c * signs[None, :]
        energy += c * c
    return tl.sum(total, 1), tl.sum(energy, 1)


@triton.jit
def _prediction(a_rows, sums_ptr, exists, BLOCK: tl.constexpr):
    """Compute the predicted sum ``A_i (B r)`` and the walk ``Σ_k a_ik² z_k`` of each row."""
    dtype: tl.constexpr = sums_ptr.dtype.element_ty
    K = a_rows[2]
    predicted = tl.zeros((exists.shape[0], BLOCK), dtype)
    walk = tl.zeros((exists.shape[0], BLOCK), dtype)
    for start in tl.range(0, K, BLOCK, num_stages=3):
        lanes = start + tl.arange(0, BLOCK)
        a = _load_columns(a_rows, exists, lanes).to(dtype)
        signed = tl.load(sums_ptr + lanes, lanes < K, other=0.0)
        spreads = tl.load(sums_ptr + K + lanes, lanes < K, other=0.0)
        predicted += a * signed[None, :]
        walk += a * a * spreads[None, :]
    return tl.sum(predicted, 1), tl.sum(walk, 1)


@triton.jit
def _product_and_walk(
    a_rows, b_ptr, b_strides, wanted, columns, N, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of A B in fp32, and ``Σ_k a_ik² Σ_j b_kj²`` of each row in it."""
    K = a_rows[2]
    product = tl.zeros((wanted.shape[0], columns.shape[0]), tl.float32)
    walk = tl.zeros((wanted.shape[0],), tl.float32)
    b_columns = b_ptr + columns.to(tl.int64) * b_strides[2]
    for start in range(0, K, BLOCK_K):
        lanes = start + tl.arange(0, BLOCK_K)
        in_b = (lanes[:, None] < K) & (columns[None, :] < N)
        a = _load_columns(a_rows, wanted, lanes)
        b_ptrs = b_columns[None, :] + lanes[:, None].to(tl.int64) * b_strides[1]
        b = tl.load(b_ptrs, in_b, other=0.0)
        product = tl.dot(a.to(OPERAND), b.to(OPERAND), product, input_precision=PRECISION)
        left, right = a.to(tl.float32), b.to(tl.float32)
        walk += tl.sum(left * left * tl.sum(right * right, 1)[None, :], 1)
    return product, walk


@triton.jit
def _replace_wrong(c_ptrs, product, walk, suspect, in_row, tolerance):
    """Replace the suspect rows of a tile that differ from ``product`` by more than rounding.

    The bound applies ``drift`` to all of E and W, so that right values are never replaced.
    """
    inside = suspect[:, None] & in_row[None, :]
    old = tl.load(c_ptrs, inside, other=0.0).to(tl.float32)
    new = product.to(c_ptrs.dtype.element_ty)
    again = new.to(tl.float32)
    # A NaN from an operand is in both results.
    differs = inside & (old != again) & ((old == old) | (again == again))
    change = tl.where(differs, old - again, 0)
    energy = tl.sum(product * product, 1)
    rounded = tolerance.output * tolerance.output * energy
    accumulated = tolerance.drift * tolerance.drift * (energy + walk)
    both = 2 * tl.sqrt(rounded + accumulated) + tolerance.floor
    distance = tl.sqrt(tl.sum(change * change, 1))
    # If an operand is not finite the bound is not either, and only non-finite values may differ.
    limit = tl.where(both < float("inf"), both, MAX_FP32)
    wrong = suspect & ~(distance <= limit)
    tl.store(c_ptrs, new, inside & wrong[:, None])
    return wrong

"""Triton kernel over a finished product: verifies the rows of C, and corrects suspect ones.

Nothing here waits for the host: what is wrong is found, repaired and counted on the device.
"""

import triton
import triton.language as tl

from holdfast.abft.gemm.triton_rows import (
    CLEAN,
    CORRECTED,
    SUSPECT,
    exceeds,
    prediction,
    product_with,
    rounding_bound,
    row_sums,
)


@triton.jit
def verify_kernel(
    c_ptr,
    a_ptr,
    table_ptr,
    sums_ptr,
    weighted_ptr,
    rows_ptr,
    status_ptr,
    counts_ptr,
    M,
    N,
    K,
    stride_cb,
    stride_cm,
    stride_cn,
    stride_ab,
    stride_am,
    stride_ak,
    tolerance,
    extreme,
    DIGITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Residual, threshold and energy of BLOCK_M rows; C and A are read once.

    With DIGITS weighted checksums the same program locates and corrects its suspect rows.
    """
    batch = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = rows < M
    c_rows = c_ptr + batch * stride_cb + rows.to(tl.int64) * stride_cm
    a_rows = a_ptr + batch * stride_ab + rows.to(tl.int64) * stride_am
    sums_ptr += batch * 2 * K
    dtype: tl.constexpr = sums_ptr.dtype.element_ty

    total, energy = row_sums(
        c_rows, stride_cn, table_ptr, exists, None, None, N, dtype, BLOCK_M, BLOCK_N
    )
    predicted, walk = prediction(a_rows, stride_ak, sums_ptr, exists, K, BLOCK_M, BLOCK_K)
    residual = total - predicted
    bound = rounding_bound(energy, walk, tolerance)
    suspect = exists & exceeds(residual, bound)

    out = batch * M + rows
    plane = tl.num_programs(1).to(tl.int64) * M
    tl.store(rows_ptr + out, residual, exists)
    tl.store(rows_ptr + plane + out, bound, exists)
    tl.store(rows_ptr + 2 * plane + out, energy, exists)
    status = tl.where(suspect, SUSPECT, CLEAN)
    if tl.max(suspect.to(tl.int32), 0) > 0:
        if DIGITS > 0:
            weighted_ptr += batch * DIGITS * K
            column, located = _locate(
                c_rows, stride_cn, a_rows, stride_ak, table_ptr, weighted_ptr,
                suspect, residual, extreme, N, K, DIGITS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            corrected = _correct(
                c_rows, stride_cn, a_rows, stride_ak, table_ptr, weighted_ptr,
                located, column, predicted, walk, tolerance,
                N, K, DIGITS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            status = tl.where(corrected, CORRECTED, status)
        tl.atomic_add(counts_ptr, tl.sum((status != CLEAN).to(tl.int32), 0))
        tl.atomic_add(counts_ptr + 1, tl.sum((status == CORRECTED).to(tl.int32), 0))
    tl.store(status_ptr + out, status, exists)


@triton.jit
def _extremes(
    c_rows,
    stride_cn,
    wanted,
    extreme,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """How many elements of each row are NaN, INF or above ``extreme``, and where the last is."""
    count = tl.zeros((BLOCK_M,), tl.int32)
    place = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = wanted[:, None] & (columns[None, :] < N)
        c = tl.load(c_rows[:, None] + columns[None, :].to(tl.int64) * stride_cn, inside, other=0.0)
        found = ~(tl.abs(c.to(tl.float32)) <= extreme)
        count += tl.sum(found.to(tl.int32), 1)
        place = tl.maximum(place, tl.max(tl.where(found, columns[None, :], 0), 1))
    return count, place


@triton.jit
def _weighted_residual(
    c_rows,
    stride_cn,
    a_rows,
    stride_ak,
    table_ptr,
    weighted_ptr,
    digit,
    wanted,
    column,
    value,
    N,
    K,
    dtype: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``D_d`` of each wanted row, with ``value`` in ``column`` instead of what C has there."""
    total, _ = row_sums(
        c_rows, stride_cn, table_ptr + (digit + 1) * N, wanted, column, value, N,
        dtype, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    checksum_ptr = weighted_ptr + digit * K
    return total - product_with(a_rows, stride_ak, checksum_ptr, wanted, K, dtype, BLOCK_M, BLOCK_K)


@triton.jit
def _locate(
    c_rows,
    stride_cn,
    a_rows,
    stride_ak,
    table_ptr,
    weighted_ptr,
    suspect,
    residual,
    extreme,
    N,
    K,
    DIGITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The column of the wrong element: the only extreme one, or what the weighted checksums say.

    Digit d of the position is set where ``D_d / D`` is −1: the ``bits`` code of
    ``checksums.positions``, whose last checksum is a parity.
    """
    dtype: tl.constexpr = residual.dtype
    count, column = _extremes(c_rows, stride_cn, suspect, extreme, N, BLOCK_M, BLOCK_N)
    address = tl.zeros((BLOCK_M,), tl.int32)
    for digit in range(DIGITS - 1):
        weighted = _weighted_residual(
            c_rows, stride_cn, a_rows, stride_ak, table_ptr, weighted_ptr, digit,
            suspect, None, None, N, K, dtype, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        differs = (weighted < 0) != (residual < 0)
        address += differs.to(tl.int32) << digit
    column = tl.where(count == 1, column, address)
    return column, suspect & (count <= 1) & (column < N)


@triton.jit
def _correct(
    c_rows,
    stride_cn,
    a_rows,
    stride_ak,
    table_ptr,
    weighted_ptr,
    located,
    column,
    predicted,
    walk,
    tolerance,
    N,
    K,
    DIGITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rebuild the element from the others, ``r_j (A_i (B r) − Σ_{l≠j} r_l c_il)``.

    It is stored only if then every weighted checksum agrees as well: two faults in a row, or a
    damaged checksum, leave C as it is.
    """
    dtype: tl.constexpr = predicted.dtype
    nothing = tl.zeros_like(predicted)
    rest, energy = row_sums(
        c_rows, stride_cn, table_ptr, located, column, nothing, N, dtype, BLOCK_M, BLOCK_N
    )
    sign = tl.load(table_ptr + column, located, other=1).to(dtype)
    rebuilt = (sign * (predicted - rest)).to(c_rows.dtype.element_ty)
    value = rebuilt.to(dtype)
    bound = rounding_bound(energy + value * value, walk, tolerance)
    agrees = located & ~exceeds(rest + sign * value - predicted, bound)
    for digit in range(DIGITS):
        weighted = _weighted_residual(
            c_rows, stride_cn, a_rows, stride_ak, table_ptr, weighted_ptr, digit,
            located, column, value, N, K, dtype, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        agrees &= ~exceeds(weighted, 2 * bound)
    tl.store(c_rows + column.to(tl.int64) * stride_cn, rebuilt, agrees)
    return agrees

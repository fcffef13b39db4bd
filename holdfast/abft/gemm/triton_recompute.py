"""Triton kernel that computes suspect rows of a finished product again, without asking the host."""

import triton
import triton.language as tl

from holdfast.abft.gemm.triton_rows import CLEAN, CORRECTED, SUSPECT

MAX_FP32 = tl.constexpr(3.4028234663852886e38)


@triton.jit
def recompute_kernel(
    c_ptr,
    a_ptr,
    b_ptr,
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
    stride_bb,
    stride_bk,
    stride_bn,
    tolerance,
    parts,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the suspect rows of a row block again; nothing but one load where there are none.

    A piece of a row is replaced where it differs from its recomputation by more than the rounding
    of both; a row that is only unlucky keeps its bits.
    """
    batch = tl.program_id(1).to(tl.int64)
    row_block = tl.program_id(0) // parts
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    status_ptrs = status_ptr + batch * M + rows
    suspect = tl.load(status_ptrs, rows < M, other=CLEAN) != CLEAN
    if tl.max(suspect.to(tl.int32), 0) > 0:
        c_rows = c_ptr + batch * stride_cb + rows.to(tl.int64) * stride_cm
        a_rows = a_ptr + batch * stride_ab + rows.to(tl.int64) * stride_am
        b_ptr += batch * stride_bb
        first = (tl.program_id(0) % parts) * BLOCK_N
        for start in range(first, N, parts * BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)
            product, walk = _product_and_walk(
                a_rows, stride_ak, b_ptr, stride_bk, stride_bn, suspect, columns, N, K,
                PRECISION, OPERAND, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            c_ptrs = c_rows[:, None] + columns[None, :].to(tl.int64) * stride_cn
            wrong = _replace_wrong(c_ptrs, product, walk, suspect, columns < N, tolerance)
            old = tl.atomic_max(status_ptrs, CORRECTED, wrong)
            newly = wrong & (old == SUSPECT)
            tl.atomic_add(counts_ptr + 1, tl.sum(newly.to(tl.int32), 0))


@triton.jit
def _product_and_walk(
    a_rows,
    stride_ak,
    b_ptr,
    stride_bk,
    stride_bn,
    wanted,
    columns,
    N,
    K,
    PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of A B in fp32, and ``Σ_k a_ik² Σ_j b_kj²`` of each row in it."""
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    walk = tl.zeros((BLOCK_M,), tl.float32)
    b_columns = b_ptr + columns.to(tl.int64) * stride_bn
    for start in range(0, K, BLOCK_K):
        lanes = start + tl.arange(0, BLOCK_K)
        reach = lanes.to(tl.int64)
        in_a = wanted[:, None] & (lanes[None, :] < K)
        in_b = (lanes[:, None] < K) & (columns[None, :] < N)
        a = tl.load(a_rows[:, None] + reach[None, :] * stride_ak, in_a, other=0.0)
        b = tl.load(b_columns[None, :] + reach[:, None] * stride_bk, in_b, other=0.0)
        product = tl.dot(a.to(OPERAND), b.to(OPERAND), product, input_precision=PRECISION)
        left, right = a.to(tl.float32), b.to(tl.float32)
        walk += tl.sum(left * left * tl.sum(right * right, 1)[None, :], 1)
    return product, walk


@triton.jit
def _replace_wrong(c_ptrs, product, walk, suspect, in_row, tolerance):
    """Store the suspect rows of a tile that differ from ``product`` by more than rounding.

    Here ``drift`` applies to all of both E and W: whatever the data, nothing right is called wrong.
    """
    inside = suspect[:, None] & in_row[None, :]
    old = tl.load(c_ptrs, inside, other=0.0).to(tl.float32)
    new = product.to(c_ptrs.dtype.element_ty)
    again = new.to(tl.float32)
    # A NaN that an operand brought is there both times.
    differs = inside & (old != again) & ((old == old) | (again == again))
    change = tl.where(differs, old - again, 0)
    energy = tl.sum(product * product, 1)
    rounded = tolerance.output * tolerance.output * energy
    accumulated = tolerance.drift * tolerance.drift * (energy + walk)
    both = 2 * tl.sqrt(rounded + accumulated) + tolerance.floor
    distance = tl.sqrt(tl.sum(change * change, 1))
    # Where an operand is not finite, nor is the bound: only a value that is not shows a fault.
    limit = tl.where(both < float("inf"), both, MAX_FP32)
    wrong = suspect & ~(distance <= limit)
    tl.store(c_ptrs, new, inside & wrong[:, None])
    return wrong

"""Triton GEMM that verifies its accumulator before rounding it (online ABFT).

A program owns the tile ``acc = A_rows B_tile``. With ``e_k = Σ_{j ∈ tile} r_j b_kj`` encoded
before,

    D_i = Σ_{j ∈ tile} r_j acc_ij − Σ_k a_ik e_k

is zero up to the rounding of fp32 sums. The second sum, for all tiles at once, is a product of A
with one column a tile: ``predict_kernel`` reads A once for it, and for the walk ``Σ_k a_ik² z_k``
that the threshold needs. The main loop is that of the unverified kernel; as A is read twice, damage
to a block that it multiplies is seen too.

The sum cannot ride in the main loop: Triton gives a block that both a matrix unit and other code
read one buffer too few, and overwrites it while the unit still reads (triton issue 6691).
"""

import triton
import triton.language as tl

from holdfast.abft.gemm.triton_rows import CLEAN, CORRECTED, SUSPECT, exceeds, rounding_bound


@triton.jit
def predict_kernel(
    a_ptr,
    sums_ptr,
    predicted_ptr,
    M,
    K,
    stride_am,
    stride_ak,
    blocks,
    part,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``A_i e`` and the walk of BLOCK_M rows in BLOCK_B tiles, over one part of K.

    Predicted is [2, parts, blocks, M]: the parts are summed by their reader, in a fixed order.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tiles = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    first = tl.program_id(2) * part
    a_rows = a_ptr + rows.to(tl.int64) * stride_am
    predicted = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)
    walk = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)
    for start in range(first, tl.minimum(first + part, K), BLOCK_K):
        lanes = start + tl.arange(0, BLOCK_K)
        in_a = (rows[:, None] < M) & (lanes[None, :] < K)
        a = tl.load(a_rows[:, None] + lanes[None, :].to(tl.int64) * stride_ak, in_a, other=0.0)
        a = a.to(tl.float32)
        sums_ptrs = sums_ptr + tiles[None, :].to(tl.int64) * 2 * K + lanes[:, None]
        in_sums = (tiles[None, :] < blocks) & (lanes[:, None] < K)
        signed = tl.load(sums_ptrs, in_sums, other=0.0)
        spreads = tl.load(sums_ptrs + K, in_sums, other=0.0)
        predicted = tl.dot(a, signed, predicted, input_precision=PRECISION)
        walk = tl.dot(a * a, spreads, walk, input_precision="tf32")
    out = (tl.program_id(2) * blocks + tiles[None, :]).to(tl.int64) * M + rows[:, None]
    inside = (rows[:, None] < M) & (tiles[None, :] < blocks)
    tl.store(predicted_ptr + out, predicted, inside)
    tl.store(predicted_ptr + tl.num_programs(2).to(tl.int64) * blocks * M + out, walk, inside)


@triton.jit
def gemm_kernel(
    a_desc,
    b_desc,
    c_ptr,
    signs_ptr,
    predicted_ptr,
    status_ptr,
    counts_ptr,
    faults_ptr,
    M,
    N,
    K,
    tolerance,
    PARTS: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    FAULTS: tl.constexpr,
    TRANSPOSED_A: tl.constexpr,
    TRANSPOSED_B: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of ``C = A B``, row-major; with PARTS > 0 it is verified before it is stored.

    A tile with a suspect row is computed again, ATTEMPTS times in all. Status [blocks, M] says per
    row CLEAN, CORRECTED (suspect at first and right in the end) or SUSPECT (still over).
    """
    row_block, column_block = _tile_of_program(M, N, GROUP, BLOCK_M, BLOCK_N)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    ever = tl.zeros((BLOCK_M,), tl.int32)
    now = tl.zeros((BLOCK_M,), tl.int32)
    attempt = 0
    while attempt < ATTEMPTS:
        acc = _multiply(
            a_desc, b_desc, row_block * BLOCK_M, column_block * BLOCK_N, K,
            TRANSPOSED_A, TRANSPOSED_B, PRECISION, UPCAST, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        columns = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
        if FAULTS > 0:
            acc = _inject(acc, faults_ptr, rows, columns, attempt, FAULTS)
        if PARTS > 0:
            signs = tl.load(signs_ptr + columns, columns < N, other=0).to(tl.float32)
            now = _suspect_rows(
                acc, signs, predicted_ptr, tl.cdiv(N, BLOCK_N), column_block, rows, M,
                tolerance, PARTS,
            )  # fmt: skip
            ever = tl.maximum(ever, now)
        c_ptrs = c_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), inside)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, ATTEMPTS)
    if PARTS > 0:
        status = tl.where(now > 0, SUSPECT, tl.where(ever > 0, CORRECTED, CLEAN))
        tl.store(status_ptr + column_block.to(tl.int64) * M + rows, status, rows < M)
        if tl.max(ever, 0) > 0:
            tl.atomic_add(counts_ptr, tl.sum(ever, 0))
            tl.atomic_add(counts_ptr + 1, tl.sum((status == CORRECTED).to(tl.int32), 0))


@triton.jit
def _tile_of_program(M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column block of this program; GROUP row blocks at a time share columns in the L2."""
    row_blocks, column_blocks = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * column_blocks) * GROUP
    height = tl.minimum(row_blocks - first, GROUP)
    within = program % (GROUP * column_blocks)
    return first + within % height, within // height


@triton.jit
def _multiply(
    a_desc,
    b_desc,
    row,
    column,
    K,
    TRANSPOSED_A: tl.constexpr,
    TRANSPOSED_B: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of A B in fp32; what lies outside the operands is zero."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = a_desc.load([start, row]).T if TRANSPOSED_A else a_desc.load([row, start])
        b = b_desc.load([column, start]).T if TRANSPOSED_B else b_desc.load([start, column])
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=CHUNK)
    return acc


@triton.jit
def _suspect_rows(
    acc,
    signs,
    predicted_ptr,
    blocks,
    column_block,
    rows,
    M,
    tolerance,
    PARTS: tl.constexpr,
):
    """1 for every row of the accumulator that is over its threshold, int32 [BLOCK_M]."""
    residual = tl.sum(acc * signs[None, :], 1)
    walk = tl.zeros_like(residual)
    for part in tl.static_range(PARTS):
        ptrs = predicted_ptr + (part * blocks + column_block).to(tl.int64) * M + rows
        residual -= tl.load(ptrs, rows < M, other=0.0)
        walk += tl.load(ptrs + PARTS * blocks.to(tl.int64) * M, rows < M, other=0.0)
    bound = rounding_bound(tl.sum(acc * acc, 1), walk, tolerance)
    return ((rows < M) & exceeds(residual, bound)).to(tl.int32)


@triton.jit
def _inject(acc, faults_ptr, rows, columns, attempt, FAULTS: tl.constexpr):
    """Replace accumulator elements; a fault is (row, column, value, attempts it lasts), fp32."""
    for index in range(FAULTS):
        fault = faults_ptr + 4 * index
        row = tl.load(fault).to(tl.int32)
        column = tl.load(fault + 1).to(tl.int32)
        hit = (rows[:, None] == row) & (columns[None, :] == column)
        lasting = attempt < tl.load(fault + 3).to(tl.int32)
        acc = tl.where(hit & lasting, tl.load(fault + 2), acc)
    return acc

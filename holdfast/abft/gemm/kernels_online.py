"""Triton GEMM that verifies its accumulator before rounding it (online ABFT).

A program computes the tile ``acc = A_rows B_tile``, whose encoding ``e_k = Σ_{j ∈ tile} r_j b_kj``
is known. Then

    D_i = Σ_{j ∈ tile} r_j acc_ij − Σ_k a_ik e_k

is zero up to the rounding of fp32 sums. The second sum is, for all tiles together, a product of A
with one column per tile. ``predict_kernel`` computes it, and the walk ``Σ_k a_ik² z_k`` of the
threshold, in one pass over A. As A is read twice, damage to a block of A that the main loop
multiplies is found too.

The sum is not part of the main loop because for a block that both a matrix unit and other code
read, Triton allocates one buffer too few and overwrites it while the unit still reads (triton issue
6691).
"""

import triton
import triton.language as tl

from holdfast.abft.gemm.kernels import rounding_bound
from holdfast.abft.triton.rows import count_rows, exceeds, status_of


@triton.jit
def predict_kernel(
    a, sums_ptr, predicted_ptr, M, K, blocks, part, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``A_i e`` and the walk of BLOCK_M rows in BLOCK_B tiles, over one part of K.

    The result is [2, parts, blocks, M]; ``gemm_kernel`` sums the parts in a fixed order.
    """
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tiles = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    first = tl.program_id(2) * part
    a_rows = a.data + rows.to(tl.int64) * a.strides[0]
    predicted = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)
    walk = tl.zeros((BLOCK_M, BLOCK_B), tl.float32)
    for start in range(first, tl.minimum(first + part, K), BLOCK_K):
        lanes = start + tl.arange(0, BLOCK_K)
        in_a = (rows[:, None] < M) & (lanes[None, :] < K)
        a_ptrs = a_rows[:, None] + lanes[None, :].to(tl.int64) * a.strides[1]
        values = tl.load(a_ptrs, in_a, other=0.0).to(tl.float32)
        sums_ptrs = sums_ptr + tiles[None, :].to(tl.int64) * 2 * K + lanes[:, None]
        in_sums = (tiles[None, :] < blocks) & (lanes[:, None] < K)
        signed = tl.load(sums_ptrs, in_sums, other=0.0)
        spreads = tl.load(sums_ptrs + K, in_sums, other=0.0)
        predicted = tl.dot(values, signed, predicted, input_precision=PRECISION)
        walk = tl.dot(values * values, spreads, walk, input_precision="tf32")
    out = (tl.program_id(2) * blocks + tiles[None, :]).to(tl.int64) * M + rows[:, None]
    inside = (rows[:, None] < M) & (tiles[None, :] < blocks)
    tl.store(predicted_ptr + out, predicted, inside)
    tl.store(predicted_ptr + tl.num_programs(2).to(tl.int64) * blocks * M + out, walk, inside)


@triton.jit
def gemm_kernel(a_desc, b_desc, c_ptr, checks, sizes, settings: tl.constexpr):
    """Compute one tile of ``C = A B``, row-major; with ``checks`` verify it before storing it.

    A tile with a suspect row is computed again, ``settings.attempts`` times in all. A row's status,
    [blocks, M], is CLEAN, CORRECTED (suspect at first, and right when computed again) or SUSPECT.
    """
    M, N = sizes.rows, sizes.columns
    block_rows: tl.constexpr = settings.rows
    block_columns: tl.constexpr = settings.columns
    row_block, column_block = _tile_of_program(M, N, settings)
    rows = row_block * block_rows + tl.arange(0, block_rows)
    ever = tl.zeros((block_rows,), tl.int32)
    now = tl.zeros((block_rows,), tl.int32)
    attempt = 0
    while attempt < settings.attempts:
        acc = _multiply(
            a_desc, b_desc, row_block * block_rows, column_block * block_columns, sizes.inner,
            settings,
        )  # fmt: skip
        columns = column_block * block_columns + tl.arange(0, block_columns)
        if settings.faults > 0:
            acc = _inject(acc, checks.faults, rows, columns, attempt, settings.faults)
        if settings.parts > 0:
            signs = tl.load(checks.signs + columns, columns < N, other=0).to(tl.float32)
            now = _suspect_rows(
                acc, signs, checks.predicted, tl.cdiv(N, block_columns), column_block, rows, M,
                checks.tolerance, settings.parts,
            )  # fmt: skip
            ever = tl.maximum(ever, now)
        c_ptrs = c_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), inside)
        attempt = tl.where(tl.max(now, 0) > 0, attempt + 1, settings.attempts)
    if settings.parts > 0:
        status = status_of(now, ever)
        tl.store(checks.verdict.status + column_block.to(tl.int64) * M + rows, status, rows < M)
        if tl.max(ever, 0) > 0:
            count_rows(checks.verdict.counts, ever, status)


@triton.jit
def _tile_of_program(M, N, settings: tl.constexpr):
    """Return this program's row and column block, ordered to reuse columns in the L2 cache."""
    row_blocks, column_blocks = tl.cdiv(M, settings.rows), tl.cdiv(N, settings.columns)
    group: tl.constexpr = settings.group
    program = tl.program_id(0)
    first = program // (group * column_blocks) * group
    height = tl.minimum(row_blocks - first, group)
    within = program % (group * column_blocks)
    return first + within % height, within // height


@triton.jit
def _multiply(a_desc, b_desc, row, column, K, settings: tl.constexpr):
    """Compute a tile of A B in fp32, with zeros outside of the operands."""
    block_rows: tl.constexpr = settings.rows
    block_columns: tl.constexpr = settings.columns
    acc = tl.zeros((block_rows, block_columns), tl.float32)
    for start in range(0, K, settings.inner):
        a = a_desc.load([start, row]).T if settings.transposed_a else a_desc.load([row, start])
        b = (
            b_desc.load([column, start]).T
            if settings.transposed_b
            else b_desc.load([start, column])
        )
        if settings.upcast:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(
            a, b, acc, input_precision=settings.precision, max_num_imprecise_acc=settings.chunk
        )
    return acc


@triton.jit
def _suspect_rows(
    acc, signs, predicted_ptr, blocks, column_block, rows, M, tolerance, PARTS: tl.constexpr
):
    """Mark with 1 every row of the accumulator that is over its threshold, int32 [BLOCK_M]."""
    residual = tl.sum(acc * signs[None, :], 1)
    walk = tl.zeros_like(residual)
    for part in tl.static_range(PARTS):
        ptrs = predicted_ptr + (part * blocks + column_block).to(tl.int64) * M + rows
        residual -= tl.load(ptrs, rows < M, other=0.0)
        walk += tl.load(ptrs + PARTS * blocks.to(tl.int64) * M, rows < M, other=0.0)
    energy = tl.sum(acc * acc, 1)
    bound = rounding_bound(energy, energy, walk, tolerance)
    return ((rows < M) & exceeds(residual, bound)).to(tl.int32)


@triton.jit
def _inject(acc, faults_ptr, rows, columns, attempt, FAULTS: tl.constexpr):
    """Inject faults into the accumulator; each is (row, column, value, number of attempts)."""
    for index in range(FAULTS):
        fault = faults_ptr + 4 * index
        row = tl.load(fault).to(tl.int32)
        column = tl.load(fault + 1).to(tl.int32)
        hit = (rows[:, None] == row) & (columns[None, :] == column)
        lasting = attempt < tl.load(fault + 3).to(tl.int32)
        acc = tl.where(hit & lasting, tl.load(fault + 2), acc)
    return acc

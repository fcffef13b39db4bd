"""Verified products on a GPU, in Triton: encode B, verify C, or verify in the accumulator.

No call waits for the device, and all can be captured in a CUDA graph after one call outside it
(which compiles the kernels and puts the signs on the device). With ``TRITON_INTERPRET=1`` set
before Triton is imported the same kernels run on CPU tensors, slowly.

Not covered: addends, alpha and beta; fp64, integer and complex operands; autograd.
"""

# First, as it says what to install where Triton is missing.
import holdfast.abft.triton  # noqa: F401  # isort: skip

from dataclasses import replace
from typing import NamedTuple

import torch
import triton

from holdfast.abft.gemm.cuda_layout import (
    Settings,
    Sizes,
    descriptor,
    product_plan,
    readable,
    stream_tile,
    table_on,
)
from holdfast.abft.gemm.cuda_types import (
    Checksums,
    Mode,
    Verdict,
    check_encoding,
    check_online,
    check_output,
    check_product,
    check_verification,
)
from holdfast.abft.gemm.kernels import (
    encode_kernel,
    recompute_kernel,
    verify_kernel,
    weigh_kernel,
)
from holdfast.abft.gemm.kernels_online import gemm_kernel, predict_kernel
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds.extreme import EXTREME
from holdfast.abft.triton.launch import (
    ATTEMPTS,
    INTERPRETED,
    Matrix,
    RowStatus,
    check_faults,
    counts_on,
    dot_dtype,
    on,
    signs_on,
)
from holdfast.abft.triton.tolerance import FLOAT8, Precision, Tolerance, drift_growth

__all__ = [
    "Checksums",
    "RowStatus",
    "Tolerance",
    "Verdict",
    "encode",
    "matmul",
    "matmul_online",
    "online_block",
    "verify",
]

STREAM_WARPS = 8
GROUP = 8  # row blocks that share columns of B in the L2 cache
FAULT_NUMBERS = 4  # that describe a fault: row, column, value, attempts
RECOMPUTE_TILE, RECOMPUTE_DEPTH, RECOMPUTE_PARTS = (64, 64), 32, 8
PREDICT_ROWS, PREDICT_DEPTH = 32, 64
PREDICT_PARTS, ENOUGH_DEPTH = 4, 512  # parts of K, where K is long enough


def encode(b: torch.Tensor, *, block: int | None = None, weighted: bool = False) -> Checksums:
    """Compute signed row checksums and row statistics of B, in one pass over it.

    ``Σ_j r_j b_kj`` with the random signs r of ``abft.checksums.weights``; and ``Σ_j b_kj²`` and
    ``Σ_j b_kj``, joined to the spread ``z_k`` that ``Tolerance`` takes.

    Args:
        b: [K, N] or [batch, K, N], any strides; fp32, fp16, bf16 or fp8.
        block: columns summed together: None for whole rows (``verify``), ``online_block`` of the
            product for ``matmul_online``.
        weighted: also the checksums that locate an element, for ``verify(mode="checksum")``; a
            second pass.

    Guarantees: the same bits whatever the device's scheduling. Not covered: what was wrong in B
    before it was encoded.

    Raises:
        TypeError: b's dtype. ValueError: its device or shape, or a block that is no power of two
            from 16 up, or weighted checksums of blocks.

    Source: Huang and Abraham; the signs are ours.
    """
    check_encoding(b, block, weighted)
    batch = as_batch(b)
    size, inner, columns = batch.shape
    width = block or max(columns, 1)
    exact = b.dtype == torch.float32 and block is None
    dtype = torch.float64 if exact else torch.float32
    sums = b.new_empty((size, -(-columns // width), 2, inner), dtype=dtype)
    if sums.numel():
        block_k, block_n = stream_tile(width, batch)
        with on(b):
            encode_kernel[(triton.cdiv(inner, block_k), sums.shape[1], size)](
                Matrix.of(batch),
                signs_on(columns, b.device),
                sums,
                inner,
                columns,
                width,
                *drift_growth(inner),
                BLOCK_K=block_k,
                BLOCK_N=block_n,
                num_warps=STREAM_WARPS,
            )
    return Checksums(sums, _weigh(batch) if weighted else None, columns, width)


def verify(
    c: torch.Tensor,
    a: torch.Tensor,
    checksums: Checksums,
    b: torch.Tensor | None = None,
    *,
    mode: Mode = "recompute",
    precision: Precision | None = None,
    tolerance: Tolerance | None = None,
    counts: torch.Tensor | None = None,
) -> Verdict:
    """Verify the rows of ``C = A B``, whoever computed it, reading C and A once.

    ``D_i = Σ_j r_j c_ij − Σ_k a_ik (Σ_j r_j b_kj)``; a row is suspect where |D_i| exceeds its
    rounding tolerance or is NaN. Suspect rows of C are repaired in place:

    - ``recompute``: computed again by this module's own kernel; a piece of the row that differs by
      more than the rounding of both is replaced, else the row keeps its bits.
    - ``checksum``: its one wrong element is located and rebuilt from the others (EEC), if every
      weighted checksum then agrees; else the row keeps its bits.
    - ``detect``: left.

    Args:
        c: [M, N] or [batch, M, N], fp32, fp16 or bf16; any strides.
        a: [.., M, K], any strides.
        checksums: of B, by ``encode(b)``, for ``checksum`` with ``weighted=True``.
        b: [.., K, N], needed to recompute.
        mode: what is done with a suspect row, as above.
        precision: how C was multiplied where operands are fp32, by default as torch is set.
        tolerance: by default ``Tolerance.of`` the dtypes and sizes.
        counts: int32 [2] on the device, to add to; by default a new one.

    Guarantees: a change of one element by more than ``T_i`` plus the row's own rounding is
    suspected. No host synchronisation. Not covered: errors that cancel under the signs, faults in
    A before the product, and in B before encoding.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, or a mode without what it needs.

    Source: Huang and Abraham; ATTNChecker, section 4.2 (EEC).
    """
    check_verification(c, a, checksums, b, mode)
    used = precision or _torch_precision()
    if tolerance is None:
        tolerance = Tolerance.of(a.dtype, c.dtype, a.shape[-1], c.shape[-1], used)
    product, left = as_batch(c), as_batch(a)
    rows = checksums.sums.new_empty((3, *product.shape[:2]))
    status = c.new_empty(product.shape[:2], dtype=torch.int32)
    verdict = Verdict(status, counts_on(c.device, counts), rows)
    if not c.numel():
        status.zero_()
        rows.zero_()
        return verdict
    _verify_rows(product, left, checksums, verdict, tolerance, correct=mode == "checksum")
    if b is not None and mode == "recompute":
        _recompute_rows(product, left, as_batch(b), verdict, tolerance, used)
    return verdict


def matmul_online(
    a: torch.Tensor,
    b: torch.Tensor,
    checksums: Checksums | None = None,
    *,
    mode: Mode = "recompute",
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
    tolerance: Tolerance | None = None,
    counts: torch.Tensor | None = None,
    faults: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Verdict]:
    """Compute ``A B``, verified tile by tile in its fp32 accumulator, before it is rounded.

    The maths is in ``kernels_online``. A tile with a suspect row is computed again at once, by the
    same instructions, and stored as it is then: bit for bit what ``matmul`` gives on healthy
    hardware.

    Args:
        a: [M, K], fp32, fp16, bf16 or fp8, any strides; a layout that the copy engine cannot read
            is copied first.
        b: [K, N], of the same dtype.
        checksums: ``encode(b, block=…)``, for a B that is used more than once.
        mode: ``recompute`` or ``detect``.
        out_dtype: of C; by default that of the operands, bf16 for fp8.
        precision: of fp32 operands in the matrix units: ``ieee`` uses none.
        tolerance: as for ``verify``.
        counts: as for ``verify``.
        faults: fp32 [F, 4], for tests: (row, column, value, attempts): each replaces an element of
            the accumulator in that many attempts. None costs nothing: the code is left out.

    Returns:
        C [M, N], contiguous, and the verdict, whose status is [blocks, M].

    Guarantees: a change of one accumulator element by more than T plus rounding, T being that of
    fp32 sums even where C is bf16, is found and in mode ``recompute`` repaired. A row that stays
    suspect is SUSPECT. No host synchronisation. Not covered: a fault after the accumulator is
    verified, in the rounding or the store; A damaged in shared memory or before; B before encoding.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, blocks or mode.

    Source: V-ABFT, "online" verification; the estimate of the walk is ours.
    """
    check_product("matmul_online", a, b)
    if checksums is None:
        checksums = encode(b, block=online_block(a.shape[0], b.shape[1], b.dtype))
    check_online(a, b, checksums, mode)
    check_faults(faults, FAULT_NUMBERS, a.device)
    if tolerance is None:
        tolerance = Tolerance.of(a.dtype, None, a.shape[1], checksums.block, precision)
    status = a.new_empty((checksums.sums.shape[1], a.shape[0]), dtype=torch.int32)
    verdict = Verdict(status, counts_on(a.device, counts), None)
    online = _Online(checksums, verdict, tolerance, ATTEMPTS if mode == "recompute" else 1, faults)
    return _multiply(a, b, checksums.block, out_dtype, precision, online), verdict


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    block: int | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
) -> torch.Tensor:
    """Run the kernel of ``matmul_online`` without verification: the baseline of its cost.

    The arguments are those of ``matmul_online``, and ``block``, the columns of a tile.

    Guarantees: none; nothing is verified.

    Raises:
        TypeError, ValueError: as ``matmul_online``.
    """
    check_product("matmul", a, b)
    width = block or online_block(a.shape[0], b.shape[1], b.dtype)
    return _multiply(a, b, width, out_dtype, precision, None)


def online_block(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Columns of a tile of ``matmul_online`` for C [rows, columns], and so of its encoding."""
    return product_plan(rows, columns, dtype, "ieee").block_n


class _Online(NamedTuple):
    """Verification of a product in its accumulator."""

    checksums: Checksums
    verdict: Verdict
    tolerance: Tolerance
    attempts: int
    faults: torch.Tensor | None


class _Checks(NamedTuple):
    """Tensors with which ``gemm_kernel`` verifies."""

    signs: torch.Tensor
    predicted: torch.Tensor
    verdict: Verdict
    faults: torch.Tensor | None


def _weigh(b: torch.Tensor) -> torch.Tensor:
    """Compute the weighted checksums of b [batch, K, N], fp32 [batch, D, K]."""
    size, inner, columns = b.shape
    table = table_on(columns, b.device)[1:] if columns else signs_on(0, b.device)
    weighted = b.new_empty((size, len(table), inner), dtype=torch.float32)
    if not weighted.numel():
        return weighted
    with on(b):
        weigh_kernel[(triton.cdiv(inner, 32), size)](
            Matrix.of(b),
            table,
            weighted,
            inner,
            columns,
            OPERAND=dot_dtype(b.dtype),
            DIGITS=len(table),
            PADDED=max(16, triton.next_power_of_2(len(table))),
            BLOCK_K=32,
            BLOCK_N=64,
        )
    return weighted


def _verify_rows(
    c: torch.Tensor, a: torch.Tensor, checksums: Checksums, verdict: Verdict, tolerance: Tolerance,
    *, correct: bool,
) -> None:  # fmt: skip
    """Verify c [batch, M, N] = a [batch, M, K] B; ``correct`` repairs by weighted checksums."""
    sizes = Sizes(c.shape[1], c.shape[2], a.shape[2])
    weighted = checksums.weighted if correct else None
    on_device = signs_on if weighted is None else table_on
    block_m, width = stream_tile(max(sizes.columns, sizes.inner), c, a)
    with on(c):
        verify_kernel[(triton.cdiv(sizes.rows, block_m), len(c))](
            Matrix.of(c),
            Matrix.of(a),
            on_device(sizes.columns, c.device),
            checksums.sums,
            weighted,
            verdict,
            sizes,
            tolerance,
            EXTREME,
            DIGITS=0 if weighted is None else weighted.shape[1],
            BLOCK_M=block_m,
            BLOCK=width,
            num_warps=STREAM_WARPS,
        )


def _recompute_rows(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, verdict: Verdict, tolerance: Tolerance,
    precision: Precision,
) -> None:  # fmt: skip
    """Compute the suspect rows of c [batch, M, N] again, from a and b."""
    block_m, block_n = RECOMPUTE_TILE
    with on(c):
        recompute_kernel[(triton.cdiv(c.shape[1], block_m) * RECOMPUTE_PARTS, len(c))](
            *(Matrix.of(each) for each in (c, a, b)),
            verdict,
            Sizes(c.shape[1], c.shape[2], a.shape[2]),
            tolerance,
            RECOMPUTE_PARTS,
            PRECISION=precision,
            OPERAND=dot_dtype(a.dtype),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=RECOMPUTE_DEPTH,
            # Its blocks are multiplied and squared: pipelined, they would be overwritten meanwhile.
            num_stages=1,
        )


def _multiply(
    a: torch.Tensor, b: torch.Tensor, block: int, out_dtype: torch.dtype | None,
    precision: Precision, online: _Online | None,
) -> torch.Tensor:  # fmt: skip
    """Multiply in tiles of ``block`` columns, verified in the accumulator with ``online``."""
    dtype = out_dtype or (torch.bfloat16 if a.dtype in FLOAT8 else a.dtype)
    check_output("matmul", dtype)
    sizes = Sizes(a.shape[0], b.shape[1], a.shape[1])
    c = a.new_empty((sizes.rows, sizes.columns), dtype=dtype)
    if not c.numel() or not a.numel():
        c.zero_()
        if online is not None:
            online.verdict.status.zero_()
        return c
    plan = product_plan(sizes.rows, sizes.columns, a.dtype, precision, block)
    left, transposed_a = readable(a)
    right, transposed_b = readable(b)
    settings = Settings(
        rows=plan.block_m,
        columns=block,
        inner=plan.block_k,
        group=GROUP,
        transposed_a=transposed_a,
        transposed_b=transposed_b,
        precision=precision,
        upcast=INTERPRETED,
        chunk=plan.block_k if a.dtype in FLOAT8 else 0,
    )
    checks = None
    if online is not None:
        predicted = _predict(a, online.checksums, precision)
        signs = signs_on(sizes.columns, a.device)
        checks = _Checks(signs, predicted, online.verdict, online.faults)
        faults = 0 if online.faults is None else len(online.faults)
        parts = predicted.shape[1]
        settings = replace(settings, parts=parts, attempts=online.attempts, faults=faults)
    block_a, block_b = (plan.block_m, plan.block_k), (plan.block_k, block)
    with on(a):
        gemm_kernel[(triton.cdiv(sizes.rows, plan.block_m) * triton.cdiv(sizes.columns, block),)](
            descriptor(left, block_a[::-1] if transposed_a else block_a),
            descriptor(right, block_b[::-1] if transposed_b else block_b),
            c,
            checks,
            sizes,
            online.tolerance if online else None,
            settings,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
    return c


def _predict(a: torch.Tensor, checksums: Checksums, precision: Precision) -> torch.Tensor:
    """Compute predicted sums and variance terms of all tile rows: fp32 [2, parts, blocks, M].

    Operands of up to 16 bits are exact in TF32, so only the checksums are split in two.
    """
    rows, inner = a.shape
    blocks = checksums.sums.shape[1]
    parts = PREDICT_PARTS if inner >= PREDICT_PARTS * ENOUGH_DEPTH else 1
    part = triton.cdiv(triton.cdiv(inner, parts), PREDICT_DEPTH) * PREDICT_DEPTH
    predicted = a.new_empty((2, parts, blocks, rows), dtype=torch.float32)
    block_b = max(16, min(64, triton.next_power_of_2(blocks)))
    with on(a):
        predict_kernel[(triton.cdiv(rows, PREDICT_ROWS), triton.cdiv(blocks, block_b), parts)](
            Matrix.of(a),
            checksums.sums,
            predicted,
            rows,
            inner,
            blocks,
            part,
            PRECISION="ieee" if a.dtype == torch.float32 and precision == "ieee" else "tf32x3",
            BLOCK_M=PREDICT_ROWS,
            BLOCK_B=block_b,
            BLOCK_K=PREDICT_DEPTH,
        )
    return predicted


def _torch_precision() -> Precision:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"

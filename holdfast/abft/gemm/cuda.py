"""Products on a GPU that Triton verifies in the accumulator, before it is rounded.

No call except ``verified_matmul`` waits for the device, and these can be captured in a CUDA graph
after one call outside it (which compiles the kernels and puts the signs on the device). With
``TRITON_INTERPRET=1`` set before Triton is imported the same kernels run on CPU tensors, slowly.

Not covered: addends, alpha and beta; fp64, integer and complex operands; autograd.
"""

# First, as it says what to install where Triton is missing.
import holdfast.abft.triton  # noqa: F401  # isort: skip

import math
from typing import NamedTuple

import torch
import triton

from holdfast.abft.gemm import cpu
from holdfast.abft.gemm.cuda_layout import (
    Settings,
    Sizes,
    descriptor,
    product_plan,
    readable,
    stream_tile,
)
from holdfast.abft.gemm.cuda_types import (
    Checksums,
    Mode,
    Verdict,
    check_encoding,
    check_online,
    check_output,
    check_product,
)
from holdfast.abft.gemm.kernels import encode_kernel
from holdfast.abft.gemm.kernels_online import gemm_kernel, predict_kernel
from holdfast.abft.gemm.reference import as_batch, folded
from holdfast.abft.gemm.row_tolerances import other, tile_tolerances
from holdfast.abft.gemm.suspects import SuspectProduct, resolve
from holdfast.abft.policy import policy_of
from holdfast.abft.thresholds import Threshold
from holdfast.abft.thresholds.rounding import FLOAT8
from holdfast.abft.triton.launch import (
    ATTEMPTS,
    INTERPRETED,
    Matrix,
    RowStatus,
    check_faults,
    counts_on,
    on,
    signs_on,
)
from holdfast.abft.triton.tolerance import Precision, Tolerance, drift_growth
from holdfast.sites import Gemm

__all__ = [
    "Checksums",
    "RowStatus",
    "Tolerance",
    "Verdict",
    "encode",
    "matmul",
    "matmul_online",
    "online_block",
    "verified_matmul",
]

STREAM_WARPS = 8
GROUP = 8  # row blocks that share columns of B in the L2 cache
FAULT_NUMBERS = 4  # numbers that describe a fault: row, column, value, attempts
PREDICT_ROWS, PREDICT_DEPTH = 32, 64
PREDICT_PARTS, ENOUGH_DEPTH = 4, 512  # parts of K, where K is long enough
_WALK_ALONE = Tolerance(scale=1.0, output=0.0, walk=1.0, drift=0.0, floor=0.0)  # T is √walk


def encode(b: torch.Tensor, *, block: int) -> Checksums:
    """Compute signed row checksums and row statistics of blocks of B's columns, in one pass.

    ``Σ_j r_j b_kj`` with the random signs r of ``abft.checksums.weights``; and ``Σ_j b_kj²`` and
    ``Σ_j b_kj``, joined to the spread ``z_k`` that ``Tolerance`` takes.

    Args:
        b: [K, N] or [batch, K, N], any strides; fp32, fp16, bf16 or fp8.
        block: Number of columns that are summed together, the ``online_block`` of the product.

    Guarantees: the bits do not depend on the device's scheduling. Not covered: errors in B from
    before it was encoded.

    Raises:
        TypeError: The dtype of b is not supported. ValueError: Its device or shape is not, or the
            block is no power of two from 16 up.

    Source: Huang and Abraham; the signs are ours.
    """
    check_encoding(b, block)
    batch = as_batch(b)
    size, inner, columns = batch.shape
    sums = b.new_empty((size, -(-columns // block), 2, inner), dtype=torch.float32)
    if sums.numel():
        block_k, block_n = stream_tile(block, batch)
        with on(b):
            encode_kernel[(triton.cdiv(inner, block_k), sums.shape[1], size)](
                Matrix.of(batch),
                signs_on(columns, b.device),
                sums,
                inner,
                columns,
                block,
                *drift_growth(inner),
                BLOCK_K=block_k,
                BLOCK_N=block_n,
                num_warps=STREAM_WARPS,
            )
    return Checksums(sums, columns, block)


def matmul_online(
    a: torch.Tensor,
    b: torch.Tensor,
    checksums: Checksums | None = None,
    *,
    mode: Mode = "recompute",
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
    tolerance: Tolerance | None = None,
    threshold: Threshold | None = None,
    counts: torch.Tensor | None = None,
    faults: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Verdict]:
    """Compute ``A B``, verified tile by tile in its fp32 accumulator, before it is rounded.

    The equations are in ``kernels_online``. A tile with a suspect row is computed again at once by
    the same instructions and then stored, with the bits of ``matmul`` if the fault does not recur.

    Args:
        a: [M, K], fp32, fp16, bf16 or fp8, any strides; a layout that the copy engine cannot read
            is copied first.
        b: [K, N], in the dtype of a.
        checksums: Checksums from ``encode(b, block=…)``, for a B that is used more than once.
        mode: ``recompute`` or ``detect``.
        out_dtype: Dtype of C; by default that of the operands, bf16 for fp8.
        precision: Precision of products of fp32 operands; ``ieee`` does not use matrix units.
        tolerance: By default ``Tolerance.of`` the dtypes and sizes.
        threshold: A threshold of ``holdfast.thresholds`` to take in place of ``tolerance``, applied
            to each tile and its accumulator; ``Rounding`` cannot be, as ``tolerance`` is its model.
            Bounds below 1e-19 count as zero. It reads A and B once more for each block.
        counts: int32 [2] on the device, to which the counts are added; by default new counters.
        faults: Faults for tests, fp32 [F, 4]: (row, column, value, attempts). Each replaces an
            element of the accumulator in so many attempts. Without faults the kernel is compiled
            without that code.

    Returns:
        C [M, N], contiguous, and the verdict, whose status is [blocks, M].

    Guarantees: a change of one accumulator element by more than T plus rounding is found, with the
    T of fp32 sums even if C is bf16, and repaired in mode ``recompute``. A row that stays suspect
    is SUSPECT. No host synchronisation. Not covered: faults after the accumulator is verified, in
    the rounding or the store; damage of A in shared memory or before, and of B before it is
    encoded.

    Raises:
        TypeError: A dtype is not supported. ValueError: Shapes, devices, blocks or mode do not fit.

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
    verdict = Verdict(status, counts_on(a.device, counts))
    checks = None
    if a.numel() and b.numel():
        signs = signs_on(b.shape[1], a.device)
        predicted = _predict(a, checksums, precision)
        if threshold is not None:
            output = torch.bfloat16 if a.dtype in FLOAT8 else a.dtype
            bounds = tile_tolerances(a, b, checksums.block, threshold, output)
            predicted[1] = 0
            predicted[1, 0] = bounds.square()
            tolerance = _WALK_ALONE
        checks = _Checks(signs, predicted, verdict, tolerance, faults)
    else:
        status.zero_()
    attempts = ATTEMPTS if mode == "recompute" else 1
    return _multiply(a, b, checksums.block, out_dtype, precision, checks, attempts), verdict


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    block: int | None = None,
    out_dtype: torch.dtype | None = None,
    precision: Precision = "ieee",
) -> torch.Tensor:
    """Run the kernel of ``matmul_online`` without verification, to measure what that costs.

    The arguments are those of ``matmul_online``, and ``block``, the number of columns of a tile.

    Guarantees: none, as nothing is verified. Errors are those of ``matmul_online``.
    """
    check_product("matmul", a, b)
    width = block or online_block(a.shape[0], b.shape[1], b.dtype)
    return _multiply(a, b, width, out_dtype, precision, None)


def online_block(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the columns of a tile of ``matmul_online`` for C [rows, columns]."""
    return product_plan(rows, columns, dtype, "ieee").block_n


def verified_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply as ``torch.matmul`` does and hand suspect rows to ``abft.policy``.

    This is the implementation of ``holdfast.matmul`` for CUDA, for operands of two dimensions or
    more. Each product is verified in its accumulator; suspect rows are diagnosed on CPU as those of
    the CPU implementations are, and repaired with the bits of ``matmul`` unless the policy is to
    detect only. The host waits for the device once per matrix.

    Guarantees and what is not covered: as ``matmul_online``.

    Raises:
        UncorrectableFault: A fault was not repaired, and no caller is collecting faults.
    """
    left, right = folded(a, b)
    if left.dim() == 2:
        return _resolved(left, right).reshape(*a.shape[:-1], b.shape[-1])
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    output = a.new_empty((len(left), a.shape[-2], b.shape[-1]))
    for each, operands in zip(output, zip(left, right, strict=True), strict=True):
        each.copy_(_resolved(*operands))
    return output.reshape(*lead, *output.shape[1:])


def _resolved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute one verified product; have ``gemm.suspects`` diagnose and repair suspect rows."""
    output, verdict = matmul_online(a, b, mode="detect", threshold=other())
    suspects = (verdict.status != RowStatus.CLEAN).any(0).cpu()
    if suspects.any():
        left, right, found = (each.cpu() for each in (a, b, output))
        gemm = Gemm(None, left, right, 1.0, 1.0, *cpu.encode(right))
        rows = cpu.verify_gemm(gemm, found)
        # A fault of the accumulator may be too small for the check of the rounded row.
        rows[0, :, suspects] = math.inf
        resolve(
            SuspectProduct(
                (0, "mm", 0, 0),
                gemm,
                found,
                rows,
                kept=False,
                rerun=lambda: matmul(a, b).cpu(),
                # Nor can the checksums of whole rows correct it.
                correction="detect" if policy_of(0).correction == "detect" else "recompute",
                device=str(output.device),
            )
        )
        output.copy_(found)
    return output


class _Checks(NamedTuple):
    """Tensors and tolerance with which ``gemm_kernel`` verifies its accumulator."""

    signs: torch.Tensor
    predicted: torch.Tensor
    verdict: Verdict
    tolerance: Tolerance
    faults: torch.Tensor | None


def _multiply(
    a: torch.Tensor, b: torch.Tensor, block: int, out_dtype: torch.dtype | None,
    precision: Precision, checks: _Checks | None = None, attempts: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Multiply in tiles of ``block`` columns; with ``checks`` verify each in its accumulator."""
    dtype = out_dtype or (torch.bfloat16 if a.dtype in FLOAT8 else a.dtype)
    check_output("matmul", dtype)
    sizes = Sizes(a.shape[0], b.shape[1], a.shape[1])
    if not (a.numel() and b.numel()):
        return a.new_zeros((sizes.rows, sizes.columns), dtype=dtype)
    c = a.new_empty((sizes.rows, sizes.columns), dtype=dtype)
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
        parts=0 if checks is None else checks.predicted.shape[1],
        attempts=attempts if checks is not None else 1,
        faults=0 if checks is None or checks.faults is None else len(checks.faults),
    )
    block_a, block_b = (plan.block_m, plan.block_k), (plan.block_k, block)
    with on(a):
        gemm_kernel[(triton.cdiv(sizes.rows, plan.block_m) * triton.cdiv(sizes.columns, block),)](
            descriptor(left, block_a[::-1] if transposed_a else block_a),
            descriptor(right, block_b[::-1] if transposed_b else block_b),
            c,
            checks,
            sizes,
            settings,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
    return c


def _predict(a: torch.Tensor, checksums: Checksums, precision: Precision) -> torch.Tensor:
    """Compute predicted sums and walks of the rows of all tiles, fp32 [2, parts, blocks, M].

    Operands of up to 16 bits are exact in TF32, so that only the checksums need TF32x3.
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

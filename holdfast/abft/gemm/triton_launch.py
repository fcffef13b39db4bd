"""Launches of the Triton kernels."""

from typing import Any, NamedTuple

import torch
import triton

from holdfast.abft.gemm.triton_encode import encode_kernel, weigh_kernel
from holdfast.abft.gemm.triton_layout import (
    INTERPRETED,
    descriptor,
    dot_dtype,
    on,
    product_plan,
    readable,
    signs_on,
    stream_tile,
    table_on,
)
from holdfast.abft.gemm.triton_online import gemm_kernel, predict_kernel
from holdfast.abft.gemm.triton_recompute import recompute_kernel
from holdfast.abft.gemm.triton_types import (
    FLOAT8,
    Checksums,
    Precision,
    Tolerance,
    Verdict,
    drift_growth,
)
from holdfast.abft.gemm.triton_verify import verify_kernel
from holdfast.abft.thresholds.extreme import EXTREME

STREAM_WARPS = 8
GROUP = 8  # row blocks that share columns of B in the L2 cache
RECOMPUTE_TILE, RECOMPUTE_DEPTH, RECOMPUTE_PARTS = (64, 64), 32, 8
PREDICT_ROWS, PREDICT_DEPTH = 32, 64
PREDICT_PARTS, ENOUGH_DEPTH = 4, 512  # parts of K, where K is long enough


class Online(NamedTuple):
    """What ``gemm_kernel`` verifies with."""

    checksums: Checksums
    verdict: Verdict
    tolerance: Tolerance
    attempts: int
    faults: torch.Tensor | None


def encode(b: torch.Tensor, sums: torch.Tensor, block: int) -> None:
    """Fill sums [batch, blocks, 2, K] of b [batch, K, N]."""
    size, inner, columns = b.shape
    block_k, block_n = stream_tile(block, b)
    drifting, repeating = drift_growth(inner)
    with on(b):
        encode_kernel[(triton.cdiv(inner, block_k), sums.shape[1], size)](
            b,
            signs_on(columns, b.device),
            sums,
            inner,
            columns,
            *b.stride(),
            block,
            drifting,
            repeating,
            BLOCK_K=block_k,
            BLOCK_N=block_n,
            num_warps=STREAM_WARPS,
        )


def weigh(b: torch.Tensor) -> torch.Tensor:
    """The weighted checksums of b [batch, K, N], fp32 [batch, D, K]."""
    size, inner, columns = b.shape
    table = table_on(columns, b.device)[1:] if columns else signs_on(0, b.device)
    weighted = b.new_empty((size, len(table), inner), dtype=torch.float32)
    if not weighted.numel():
        return weighted
    with on(b):
        weigh_kernel[(triton.cdiv(inner, 32), size)](
            b,
            table,
            weighted,
            inner,
            columns,
            *b.stride(),
            DIGITS=len(table),
            PADDED=max(16, triton.next_power_of_2(len(table))),
            BLOCK_K=32,
            BLOCK_N=64,
            OPERAND=dot_dtype(b.dtype),
        )
    return weighted


def verify(
    c: torch.Tensor, a: torch.Tensor, checksums: Checksums, verdict: Verdict, tolerance: Tolerance,
    *, correct: bool,
) -> None:  # fmt: skip
    """Verify c [batch, M, N] = a [batch, M, K] B; ``correct`` repairs by weighted checksums."""
    size, rows, columns = c.shape
    weighted = checksums.weighted if correct else None
    table = signs_on(columns, c.device) if weighted is None else table_on(columns, c.device)
    block_m, width = stream_tile(max(columns, a.shape[2]), c, a)
    with on(c):
        verify_kernel[(triton.cdiv(rows, block_m), size)](
            c,
            a,
            table,
            checksums.sums,
            weighted,
            verdict.rows,
            verdict.status,
            verdict.counts,
            rows,
            columns,
            a.shape[2],
            *c.stride(),
            *a.stride(),
            tolerance,
            EXTREME,
            DIGITS=0 if weighted is None else weighted.shape[1],
            BLOCK_M=block_m,
            BLOCK_N=width,
            BLOCK_K=width,
            num_warps=STREAM_WARPS,
        )


def recompute(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, verdict: Verdict, tolerance: Tolerance,
    precision: Precision,
) -> None:  # fmt: skip
    """Compute the suspect rows of c [batch, M, N] again, from a and b."""
    size, rows, columns = c.shape
    block_m, block_n = RECOMPUTE_TILE
    with on(c):
        recompute_kernel[(triton.cdiv(rows, block_m) * RECOMPUTE_PARTS, size)](
            c,
            a,
            b,
            verdict.status,
            verdict.counts,
            rows,
            columns,
            a.shape[2],
            *c.stride(),
            *a.stride(),
            *b.stride(),
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


def multiply(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, block: int, precision: Precision,
    online: Online | None,
) -> None:  # fmt: skip
    """``c = a b`` in tiles of ``block`` columns, verified in the accumulator with ``online``."""
    (rows, inner), columns = a.shape, b.shape[1]
    plan = product_plan(rows, columns, a.dtype, precision, block)
    left, transposed_a = readable(a)
    right, transposed_b = readable(b)
    checks: Any = (None,) * 5
    parts = 0
    if online is not None:
        predicted = predict(a, online.checksums, precision)
        parts = predicted.shape[1]
        verdict = online.verdict
        signs = signs_on(columns, a.device)
        checks = (signs, predicted, verdict.status, verdict.counts, online.faults)
    with on(a):
        gemm_kernel[(triton.cdiv(rows, plan.block_m) * triton.cdiv(columns, block),)](
            descriptor(
                left, (plan.block_k, plan.block_m) if transposed_a else (plan.block_m, plan.block_k)
            ),
            descriptor(right, (block, plan.block_k) if transposed_b else (plan.block_k, block)),
            c,
            *checks,
            rows,
            columns,
            inner,
            online.tolerance if online else None,
            PARTS=parts,
            ATTEMPTS=online.attempts if online else 1,
            FAULTS=len(online.faults) if online and online.faults is not None else 0,
            TRANSPOSED_A=transposed_a,
            TRANSPOSED_B=transposed_b,
            PRECISION=precision,
            UPCAST=INTERPRETED,
            CHUNK=plan.block_k if a.dtype in FLOAT8 else 0,
            GROUP=GROUP,
            BLOCK_M=plan.block_m,
            BLOCK_N=block,
            BLOCK_K=plan.block_k,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )


def predict(a: torch.Tensor, checksums: Checksums, precision: Precision) -> torch.Tensor:
    """The signed sums and walks that every row of A has in every tile: fp32 [2, parts, blocks, M].

    All values of 16 bits or fewer are TF32 values, so only the checksums are split.
    """
    rows, inner = a.shape
    blocks = checksums.sums.shape[1]
    parts = PREDICT_PARTS if inner >= PREDICT_PARTS * ENOUGH_DEPTH else 1
    part = triton.cdiv(triton.cdiv(inner, parts), PREDICT_DEPTH) * PREDICT_DEPTH
    predicted = a.new_empty((2, parts, blocks, rows), dtype=torch.float32)
    block_b = max(16, min(64, triton.next_power_of_2(blocks)))
    with on(a):
        predict_kernel[(triton.cdiv(rows, PREDICT_ROWS), triton.cdiv(blocks, block_b), parts)](
            a,
            checksums.sums,
            predicted,
            rows,
            inner,
            *a.stride(),
            blocks,
            part,
            PRECISION="ieee" if a.dtype == torch.float32 and precision == "ieee" else "tf32x3",
            BLOCK_M=PREDICT_ROWS,
            BLOCK_B=block_b,
            BLOCK_K=PREDICT_DEPTH,
        )
    return predicted

"""Verified attention on a GPU, in Triton: forward and backward, checked inside the tile loops.

No call waits for the device, and all can be captured in a CUDA graph after one call outside it
(which compiles the kernels and puts the signs on the device). With ``TRITON_INTERPRET=1`` set
before Triton is imported the same kernels run on CPU tensors, slowly. README.md has the maths.

Not behind ``protect``: call it. Not covered: dropout, fp64, head sizes above 256.
"""

# First, as it says what to install where Triton is missing.
import holdfast.abft.triton  # noqa: F401  # isort: skip

from typing import Any

import torch
import triton
from torch.autograd.function import FunctionCtx, once_differentiable

from holdfast.abft.attention.kernels import attention_encode_kernel, attention_forward_kernel
from holdfast.abft.attention.kernels_backward import grad_key_value_kernel, grad_query_kernel
from holdfast.abft.attention.problem import (
    BACKWARD_PLANS,
    FAULT_NUMBERS,
    FORWARD_PLANS,
    Checks,
    Encoding,
    Part,
    Place,
    Plan,
    Problem,
    Settings,
    Verdict,
)
from holdfast.abft.attention.tiles import LOG2_E, TILE_VALUES
from holdfast.abft.triton.launch import (
    Matrix,
    RowStatus,
    check_faults,
    counts_on,
    on,
    signs_on,
)
from holdfast.abft.triton.tolerance import Precision, drift_growth

__all__ = [
    "Part",
    "Place",
    "RowStatus",
    "Verdict",
    "attention_backward",
    "attention_forward",
    "fused_attention",
]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    counts: torch.Tensor | None = None,
    precision: Precision = "ieee",
    unverified: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``softmax(scale · q kᵀ + mask) v`` and the logarithm of the softmax's denominator.

    Differentiable by q, k and v; the gradients are computed and verified likewise. The scores are
    never stored.

    Args:
        q: [batch, heads, Lq, d], fp32, fp16 or bf16, any strides, d from 1 to 256.
        k: [batch, kv heads, Lk, d], with heads a multiple of kv heads: query head h reads key head
            h · kv heads // heads.
        v: [batch, kv heads, Lk, d].
        causal: query i attends to keys 0 … i.
        mask: added to the scores, or bool (False: not attended to); broadcastable to
            [batch, heads, Lq, Lk], without a gradient.
        scale: of the scores; 1/√d without one.
        counts: int32 [2] on the device, to which the rows found suspect and the rows corrected are
            added, those of the backward pass as well.
        precision: of fp32 operands in the matrix units: ``ieee`` uses none.
        unverified: the same kernels with all checks left out: the baseline of their cost.

    Returns:
        [batch, heads, Lq, d] in q's dtype, contiguous, and fp32 [batch, heads, Lq], which is not
        differentiable. A row that attends to nothing gives zeros
        and a logarithm of 0.

    Guarantees: a change of one element of Q Kᵀ, of dO Vᵀ or of an accumulator by more than its
    rounding tolerance, and a running maximum or sum that is not what its copy is, is suspected
    before anything is stored; the tile is computed again, and on healthy hardware then is bit for
    bit what it would have been. A row that stays suspect is SUSPECT in the verdict
    (``attention_forward``), and counted as not corrected. No host synchronisation. Not covered:
    README.md.

    Raises:
        TypeError: dtypes. ValueError: shapes, devices, a mask that requires grad.

    Source: FlashAttention's online softmax; checksums after Huang and Abraham, the signs are ours.
    """
    options = {
        "causal": causal,
        "scale": scale,
        "counts": _counted(q, counts, unverified),
        "precision": precision,
        "unverified": unverified,
    }
    result: tuple[torch.Tensor, torch.Tensor] = _FusedAttention.apply(q, k, v, mask, options)
    return result


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    counts: torch.Tensor | None = None,
    precision: Precision = "ieee",
    unverified: bool = False,
    faults: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Verdict | None]:
    """Run ``fused_attention`` without autograd, and return the verdict on every row.

    The arguments are those of ``fused_attention``, and ``faults``, fp32 [F, 7], for tests, which
    ``Place`` describes. Without faults their code is left out.

    Returns:
        Output, logarithm, and a verdict whose status and parts are [batch, heads, Lq]; None if
        unverified.

    Guarantees, raises: as ``fused_attention``.
    """
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, precision=precision, unverified=unverified
    )
    check_faults(faults, FAULT_NUMBERS, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    found = _verdict(q, _counted(q, counts, unverified))
    if out.numel() and k.shape[2]:
        plan = problem.plan(FORWARD_PLANS, q)
        with on(q):
            attention_forward_kernel[_grid(q, plan)](
                problem.operands,
                Matrix.of(out),
                lse,
                _checks(found, k, v, plan),
                faults,
                problem.sizes,
                problem.scale * LOG2_E.value,
                1.0,
                problem.tolerances(k.shape[2], plan.stream),
                problem.settings(plan, faults),
                num_warps=plan.warps,
                num_stages=plan.stages,
            )
    else:
        _clear(found, out, lse)
    return out, lse, found


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    counts: torch.Tensor | None = None,
    precision: Precision = "ieee",
    unverified: bool = False,
    query_faults: torch.Tensor | None = None,
    key_faults: torch.Tensor | None = None,
) -> tuple[Gradients, tuple[Verdict, Verdict] | None]:
    """Compute the gradients of q, k and v, given that of the output.

    ``grad`` and ``out`` are [batch, heads, Lq, d] in q's dtype, ``lse`` is fp32 [batch, heads, Lq]:
    output and logarithm as ``attention_forward`` gave them for the same arguments. A logarithm over
    other keys than these (partial, ring attention) is suspected: its rows of P do not sum to 1.
    ``query_faults`` and ``key_faults`` are faults for the kernel of dQ and that of dK and dV.

    Returns:
        The gradients, contiguous, and verdicts over the rows of q [batch, heads, Lq], and of k and
        v [batch, kv heads, Lk]; None if unverified.

    Guarantees, raises: as ``fused_attention``.
    """
    problem = Problem.of(
        q, k, v, mask=mask, causal=causal, scale=scale, precision=precision, unverified=unverified
    )
    problem.check_output("grad", grad)
    problem.check_output("out", out)
    problem.check_output("lse", lse, torch.float32)
    check_faults(query_faults, FAULT_NUMBERS, q.device)
    check_faults(key_faults, FAULT_NUMBERS, q.device)
    layout = torch.contiguous_format
    of_q, of_k, of_v = (torch.empty_like(each, memory_format=layout) for each in (q, k, v))
    counted = _counted(q, counts, unverified)
    of_queries, of_keys = _verdict(q, counted), _verdict(k, counted)
    if of_q.numel() and of_k.numel():
        lse, delta = lse.contiguous(), torch.empty_like(lse, memory_format=layout)
        plan = problem.plan(BACKWARD_PLANS, q)
        with on(q):
            grad_query_kernel[_grid(q, plan)](
                problem.operands,
                *(Matrix.of(each) for each in (out, grad, of_q)),
                lse,
                delta,
                _checks(of_queries, k, v, plan),
                query_faults,
                problem.sizes,
                problem.scale,
                1.0,
                problem.tolerances(k.shape[2], plan.stream),
                problem.settings(plan, query_faults),
                num_warps=plan.warps,
                num_stages=plan.stages,
            )
            plan = problem.plan(BACKWARD_PLANS, k)
            grad_key_value_kernel[_grid(k, plan)](
                problem.operands,
                *(Matrix.of(each) for each in (grad, of_k, of_v)),
                lse,
                delta,
                _checks(of_keys, q, grad, plan),
                key_faults,
                problem.sizes,
                problem.scale,
                problem.tolerances(q.shape[2] * problem.sizes.group, plan.stream),
                problem.settings(plan, key_faults),
                num_warps=plan.warps,
                num_stages=plan.stages,
            )
    else:
        _clear(of_queries, of_q)
        _clear(of_keys, of_k, of_v)
    found = None if of_queries is None or of_keys is None else (of_queries, of_keys)
    return (of_q, of_k, of_v), found


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = attention_forward(q, k, v, mask=mask, **options)
        ctx.save_for_backward(q, k, v, mask, out, lse)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(lse)
        ctx.options = options  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        gradients, _found = attention_backward(grad, q, k, v, out, lse, mask=mask, **ctx.options)
        return (*gradients, None, None)


def encode(matrix: torch.Tensor, stream: int) -> Encoding:
    """Encode a matrix [batch, heads, L, d] in tiles of ``stream`` rows."""
    batch, heads, length, width = matrix.shape
    tiles = triton.cdiv(length, stream)
    settings = Settings.of_matrix(matrix, stream)
    encoding = Encoding(
        matrix.new_empty((batch, heads, tiles, settings.terms, width)),
        matrix.new_empty((batch, heads, length), dtype=torch.float32),
        matrix.new_empty((batch, heads, tiles, TILE_VALUES.value), dtype=torch.float32),
    )
    signs = signs_on(max(length, width), matrix.device)
    with on(matrix):
        attention_encode_kernel[(batch * heads * tiles,)](
            Matrix.of(matrix),
            signs,
            encoding,
            heads,
            length,
            *drift_growth(width),
            settings,
            num_warps=4,
        )
    return encoding


def _grid(owned: torch.Tensor, plan: Plan) -> tuple[int]:
    return (owned.shape[0] * owned.shape[1] * triton.cdiv(owned.shape[2], plan.rows),)


def _checks(
    verdict: Verdict | None, first: torch.Tensor, second: torch.Tensor, plan: Plan
) -> Checks | None:
    """Encode the two matrices that a kernel streams through; None if it verifies nothing."""
    if verdict is None:
        return None
    signs = signs_on(max(first.shape[2], first.shape[3]), first.device)
    return Checks(signs, encode(first, plan.stream), encode(second, plan.stream), verdict)


def _counted(
    like: torch.Tensor, counts: torch.Tensor | None, unverified: bool
) -> torch.Tensor | None:
    if not unverified:
        return counts_on(like.device, counts)
    if counts is not None:
        raise ValueError("attention: counts is given and nothing is counted: leave one out")
    return None


def _verdict(like: torch.Tensor, counts: torch.Tensor | None) -> Verdict | None:
    """Allocate a verdict over the rows of a tensor [batch, heads, L, d]."""
    if counts is None:
        return None
    status, parts = (like.new_empty(like.shape[:3], dtype=torch.int32) for _ in range(2))
    return Verdict(status, parts, counts)


def _clear(found: Verdict | None, *tensors: torch.Tensor) -> None:
    for tensor in (*tensors, *(found[:2] if found is not None else ())):
        tensor.zero_()

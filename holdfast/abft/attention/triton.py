"""Verified attention on a GPU, in Triton: forward and backward, checked inside the tile loops.

No call waits for the device, and all can be captured in a CUDA graph after one call outside it
(which compiles the kernels and puts the signs on the device). With ``TRITON_INTERPRET=1`` set
before Triton is imported the same kernels run on CPU tensors, slowly. README.md has the maths.

Not behind ``protect``: call it. Not covered: dropout, fp64, head sizes above 256.
"""

import math
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from holdfast.abft.attention.triton_types import Part, Place, Verdict
from holdfast.abft.gemm.triton import RowStatus
from holdfast.abft.gemm.triton_types import Precision

from holdfast.abft.attention import triton_check as check  # isort: skip
from holdfast.abft.attention import triton_launch as launch  # isort: skip
from holdfast.abft.gemm import triton_check  # isort: skip

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
    """``softmax(scale · q kᵀ + mask) v`` and the logarithm of the softmax's denominator.

    Differentiable by q, k and v; the gradients are computed and verified likewise. The scores are
    never stored.

    Args:
        q: [batch, heads, Lq, d]; k, v: [batch, kv heads, Lk, d], with heads a multiple of kv heads
            (query head h reads key head h · kv heads // heads); fp32, fp16 or bf16, any strides,
            d from 1 to 256.
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
    found = _counts_unless(unverified, counts, q)
    return _FusedAttention.apply(q, k, v, mask, causal, scale, precision, found)  # type: ignore[no-any-return]


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
    """``fused_attention`` without autograd, and with the verdict on every row.

    Args:
        as ``fused_attention``; and faults: fp32 [F, 7], for tests, as ``Place`` describes them.
            None costs nothing: the code is left out.

    Returns:
        Output, logarithm, and a verdict whose status and parts are [batch, heads, Lq]; None if
        unverified.

    Guarantees, raises: as ``fused_attention``.
    """
    problem = _problem(q, k, v, mask, causal, scale, precision, not unverified)
    check.faults(faults, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    counted = _counts_unless(unverified, counts, q)
    found = None if counted is None else launch.verdict(q, counted)
    if out.numel() and k.shape[2]:
        launch.forward(problem, out, lse, found, faults)
    else:
        _clear(out, lse, found)
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
    """Gradients of q, k and v, given that of the output.

    Args:
        grad, out: [batch, heads, Lq, d] in q's dtype; lse: fp32 [batch, heads, Lq]; as
            ``attention_forward`` gave them for the same arguments. A logarithm over other keys than
            these (partial, ring attention) is suspected: its rows of P do not sum to 1.
        query_faults, key_faults: as faults, for the kernel of dQ and that of dK and dV.

    Returns:
        The gradients, contiguous, and verdicts over the rows of q [batch, heads, Lq], and of k and
        v [batch, kv heads, Lk]; None if unverified.

    Guarantees, raises: as ``fused_attention``.
    """
    problem = _problem(q, k, v, mask, causal, scale, precision, not unverified)
    check.gradient(grad, out, lse, q)
    check.faults(query_faults, q.device)
    check.faults(key_faults, q.device)
    layout = torch.contiguous_format
    of_q, of_k, of_v = (torch.empty_like(each, memory_format=layout) for each in (q, k, v))
    counted = _counts_unless(unverified, counts, q)
    found = None
    if counted is not None:
        found = (launch.verdict(q, counted), launch.verdict(k, counted))
    if of_q.numel() and of_k.numel():
        gradients = (of_q, of_k, of_v)
        faults = (query_faults, key_faults)
        launch.backward(problem, grad, out, lse.contiguous(), gradients, found, faults)
    else:
        _clear(of_q, of_k, None if found is None else found[0])
        _clear(of_v, of_v, None if found is None else found[1])
    return (of_q, of_k, of_v), found


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float | None,
        precision: Precision,
        counts: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {
            "causal": causal,
            "scale": scale,
            "counts": counts,
            "precision": precision,
            "unverified": counts is None,
        }
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
        return (*gradients, None, None, None, None, None)


def _problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    precision: Precision,
    verify: bool,
) -> launch.Problem:
    check.operands(q, k, v)
    added = None if mask is None else check.mask(mask, q, k)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    return launch.Problem(q, k, v, added, causal, factor, precision, verify)


def _counts_unless(
    unverified: bool, given: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    if not unverified:
        return _counts(given, like)
    if given is not None:
        raise ValueError("attention: counts is given and nothing is counted: leave one out")
    return None


def _counts(given: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if given is None:
        return like.new_zeros(2, dtype=torch.int32)
    triton_check.counts(given, like.device)
    return given


def _clear(first: torch.Tensor, second: torch.Tensor, found: Verdict | None) -> None:
    for tensor in (first, second, *(found[:2] if found is not None else ())):
        tensor.zero_()

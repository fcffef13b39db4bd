"""Verified attention on a GPU, in Triton: forward and backward, checked inside the tile loops.

No call waits for the device, and all can be captured in a CUDA graph after one call outside it
(which compiles the kernels and puts the signs on the device). With ``TRITON_INTERPRET=1`` set
before Triton is imported the same kernels run on CPU tensors, slowly. README.md has the maths.

``protect(model, attention="fused")`` calls it for ``scaled_dot_product_attention``
(``interception.py``); packed sequences call ``fused_attention_varlen``. Not covered: dropout, fp64,
head sizes above 256.
"""

# First, as it says what to install where Triton is missing.
import holdfast.abft.triton  # noqa: F401  # isort: skip

from collections.abc import Callable
from typing import Any, Unpack

import torch
import triton
from torch.autograd.function import FunctionCtx, once_differentiable

from holdfast.abft.attention.kernels import attention_encode_kernel, attention_forward_kernel
from holdfast.abft.attention.kernels_backward import grad_key_value_kernel, grad_query_kernel
from holdfast.abft.attention.packing import Packing, Span, order_of
from holdfast.abft.attention.problem import (
    BACKWARD_PLANS,
    FAULT_NUMBERS,
    FORWARD_PLANS,
    TERMS,
    Checks,
    Encoding,
    Options,
    Part,
    Place,
    Plan,
    Problem,
    Settings,
    Verdict,
    padded,
)
from holdfast.abft.attention.tiles import LOG2_E, TILE_VALUES
from holdfast.abft.triton.launch import Matrix, RowStatus, check_faults, counts_on, on, signs_on
from holdfast.abft.triton.tolerance import Precision, drift_growth

__all__ = [
    "Part",
    "Place",
    "RowStatus",
    "Verdict",
    "attention_backward",
    "attention_forward",
    "fused_attention",
    "fused_attention_varlen",
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
    slot: torch.Tensor | None = None,
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
        causal: Query i attends only to keys 0 … i.
        mask: Values added to the scores, or bool (False: not attended to); broadcastable to
            [batch, heads, Lq, Lk], without a gradient. Tiles that it hides are not computed.
        scale: Factor of the scores; by default 1/√d.
        counts: int32 [2] on the device, to which the rows found suspect and the rows corrected are
            added, those of the backward pass as well.
        slot: int32 [1] on the device, a slot of a ledger: a row that stays suspect raises it to the
            bits of 2.0, and with NaN to those of INF.
        precision: Precision of products of fp32 operands; ``ieee`` does not use matrix units.
        unverified: Leave out all checks, to measure what they cost.

    Returns:
        [batch, heads, Lq, d] in q's dtype, with its order of strides, and fp32 [batch, heads, Lq],
        which is not differentiable. A row that attends to nothing gives zeros and a logarithm of 0.

    Guarantees: a change of one element of Q Kᵀ, of dO Vᵀ or of an accumulator by more than its
    rounding tolerance, and a running maximum or sum that differs from its copy, is found before
    anything is stored; the tile is computed again, and if the fault does not recur the result has
    the bits of a run without it. A row that stays suspect is SUSPECT in the verdict
    (``attention_forward``), and counted as not corrected. No host synchronisation. Not covered:
    README.md.

    Raises:
        TypeError: A dtype is not verified. ValueError: Shapes or devices do not fit, or the mask
            requires grad.

    Source: FlashAttention's online softmax; checksums after Huang and Abraham, the signs are ours.
    """
    options = Options(causal=causal, scale=scale, slot=slot, precision=precision)
    return _apply(q, k, v, mask, options | _checks(q, counts, unverified))


def fused_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    counts: torch.Tensor | None = None,
    slot: torch.Tensor | None = None,
    precision: Precision = "ieee",
    unverified: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each of several sequences that are packed one after the other.

    The arguments are those of ``torch.nn.attention.varlen.varlen_attn`` and of ``fused_attention``,
    whose guarantees hold.

    Args:
        q: [total queries, heads, d], fp32, fp16 or bf16, any strides, d from 1 to 256.
        k: [total keys, kv heads, d], with heads a multiple of kv heads.
        v: [total keys, kv heads, d].
        cu_seq_q: int32 [batch + 1] on the device, cumulative lengths: from 0 to the total. They are
            not checked, as that would wait for the device.
        cu_seq_k: int32 [batch + 1], likewise of the keys.
        max_q: Length of the longest sequence of queries, or more.
        max_k: Length of the longest sequence of keys, or more.
        causal: The last query of a sequence attends to all of its keys, and each earlier one to one
            fewer, as in torch's kernels for packed sequences.
        scale: Factor of the scores; by default 1/√d.
        counts: As for ``fused_attention``, as are ``slot``, ``precision`` and ``unverified``.
        slot: See there.
        precision: See there.
        unverified: See there.

    Returns:
        [total queries, heads, d] in q's dtype, and fp32 [heads, total queries], not differentiable.

    Raises:
        TypeError: A dtype is not verified. ValueError: Shapes or devices do not fit.
    """
    packing = Packing(cu_seq_q, cu_seq_k, max_q, max_k)
    options = Options(causal=causal, scale=scale, slot=slot, packing=packing, precision=precision)
    return _apply(q, k, v, None, options | _checks(q, counts, unverified))


def _checks(q: torch.Tensor, counts: torch.Tensor | None, unverified: bool) -> Options:
    """Return options with one pair of counters for both passes, or with the caller's mistake."""
    if not unverified:
        counts = counts_on(q.device, counts)
    return Options(counts=counts, unverified=unverified)


def _apply(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor] = _FusedAttention.apply(q, k, v, mask, options)
    return result


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    faults: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor, Verdict | None]:
    """Run ``fused_attention`` without autograd, and return the verdict on every row.

    The options are those of ``fused_attention``. ``faults``, fp32 [F, 7], are injected in tests
    (see ``Place``); if there are none, the kernel is compiled without that code.

    Returns:
        Output, logarithm, and a verdict whose status and parts are [batch, heads, Lq]; None if
        unverified.

    Guarantees and errors are those of ``fused_attention``.
    """
    problem = Problem.of(q, k, v, **options)
    check_faults(faults, FAULT_NUMBERS, q.device)
    out = problem.empty_like(problem.q)
    lse = q.new_empty(problem.vector(problem.q), dtype=torch.float32)
    found = problem.verdict(problem.q)
    if out.numel() and k.numel():
        launch = _launcher(problem, FORWARD_PLANS, (problem.k, problem.v), found, faults)
        factors = problem.scale * LOG2_E.value, 1.0
        launch(attention_forward_kernel, (problem.matrix(out), lse), factors)
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
    query_faults: torch.Tensor | None = None,
    key_faults: torch.Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Gradients, tuple[Verdict, Verdict] | None]:
    """Compute the gradients of q, k and v, given that of the output.

    ``grad`` and ``out`` are [batch, heads, Lq, d] in q's dtype, ``lse`` is fp32 [batch, heads, Lq]:
    output and logarithm as ``attention_forward`` returned them for the same arguments. A logarithm
    over other keys than these (partial or ring attention) is suspected, as its rows of P do not sum
    to 1. ``query_faults`` and ``key_faults`` are injected into the kernel of dQ and that of dK and
    dV.

    Returns:
        The gradients, contiguous, and verdicts over the rows of q [batch, heads, Lq], and of k and
        v [batch, kv heads, Lk]; None if unverified.

    Guarantees and errors are those of ``fused_attention``.
    """
    problem = Problem.of(q, k, v, **options)
    problem.check_output("grad", grad)
    problem.check_output("out", out)
    problem.check_output("lse", lse, torch.float32)
    check_faults(query_faults, FAULT_NUMBERS, q.device)
    check_faults(key_faults, FAULT_NUMBERS, q.device)
    of_q, of_k, of_v = map(problem.empty_like, (problem.q, problem.k, problem.v))
    of_queries, of_keys = problem.verdict(problem.q), problem.verdict(problem.k)
    if of_q.numel() and of_k.numel():
        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        launch = _launcher(
            problem, BACKWARD_PLANS, (problem.k, problem.v), of_queries, query_faults
        )
        tensors = (*map(problem.matrix, (out, grad, of_q)), lse, delta)
        launch(grad_query_kernel, tensors, (problem.scale, 1.0))
        streamed = problem.q, problem.unpacked(grad)
        launch = _launcher(problem, BACKWARD_PLANS, streamed, of_keys, key_faults, of_queries=False)
        tensors = (*map(problem.matrix, (grad, of_k, of_v)), lse, delta)
        launch(grad_key_value_kernel, tensors, (problem.scale,))
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
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, _ = attention_forward(q, k, v, **options | {"mask": mask})
        ctx.save_for_backward(q, k, v, mask, out, lse)  # type: ignore[arg-type]
        ctx.mark_non_differentiable(lse)
        ctx.options = options  # type: ignore[attr-defined]
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        options = ctx.options | {"mask": mask}
        gradients, _found = attention_backward(grad, q, k, v, out, lse, **options)
        return (*gradients, None, None)


def encode(matrix: torch.Tensor, stream: int, span: Span, length: int) -> Encoding:
    """Encode a matrix [batch, heads, L, d] in tiles of ``stream`` rows of up to ``length`` rows."""
    batch, heads, total, width = matrix.shape
    tiles, packed = triton.cdiv(length, stream), span.first is not None
    settings = Settings(width, padded(width), stream, TERMS[matrix.dtype], packed=packed)
    encoding = Encoding(
        matrix.new_empty((batch, heads, tiles, settings.terms, width)),
        matrix.new_empty((1 if packed else batch, heads, total), dtype=torch.float32),
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
            span,
            *drift_growth(width),
            settings,
            num_warps=4,
        )
    return encoding


def _launcher(
    problem: Problem,
    plans: dict[int, Plan],
    streamed: tuple[torch.Tensor, torch.Tensor],
    verdict: Verdict | None,
    faults: torch.Tensor | None,
    *,
    of_queries: bool = True,
) -> Callable[[Any, tuple[Any, ...], tuple[float, ...]], None]:
    """Prepare the launch of a kernel whose programs own tiles of rows and stream two tensors.

    Args:
        problem: The attention.
        plans: Tiles of the kernel.
        streamed: [batch, heads, L, d]: K and V, or Q and dO.
        verdict: Verdict on the rows; None if unverified.
        faults: Faults to inject.
        of_queries: The rows are those of q; else those of k and v.

    Returns:
        A function of the kernel, its operands and results beside Q, K, V and the mask, and the
        factors that it takes after the sizes.
    """
    owned, sizes, mask = problem.q if of_queries else problem.k, problem.sizes, problem.mask
    rows, length = sizes.queries, sizes.keys
    if not of_queries:
        rows, length = length, rows
        mask = None if mask is None else mask.mT
    plan = problem.plan(plans, rows)
    batch, heads, _, width = owned.shape
    checks = None
    if verdict is not None:
        signs = signs_on(max(length, width), owned.device)
        span = problem.starts.keys if of_queries else problem.starts.queries
        first, second = (encode(each, plan.stream, span, length) for each in streamed)
        checks = Checks(signs, first, second, verdict)
    order = None if mask is None else order_of(mask, plan.rows, plan.stream)
    grid = (batch * heads * triton.cdiv(rows, plan.rows),)
    # A key head is read by a group of query heads.
    tolerances = problem.tolerances(length * max(1, streamed[0].shape[1] // heads), plan.stream)

    def launch(kernel: Any, tensors: tuple[Any, ...], factors: tuple[float, ...]) -> None:
        with on(owned):
            kernel[grid](
                problem.operands,
                *tensors,
                checks,
                faults,
                sizes,
                problem.starts,
                order,
                *factors,
                tolerances,
                problem.settings(plan, faults),
                num_warps=plan.warps,
                num_stages=plan.stages,
            )

    return launch


def _clear(found: Verdict | None, *tensors: torch.Tensor) -> None:
    for tensor in (*tensors, *(found[:2] if found is not None else ())):
        tensor.zero_()

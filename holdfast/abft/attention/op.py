"""Attention in three protection sections, each checked once, at its end.

``Q = X Wq + bq``, ``K = X Wk + bk``, ``V = X Wv + bv``; ``AS = Q Kᵀ``; ``AP = softmax(scale · AS +
mask)``; ``CL = AP V``; ``O = CL Wo + bo``. S_AS = {Q, K, AS}, S_CL = {V, AP, CL}, S_O = {O}.
Source: ATTNChecker, section 4.4; README.md says what is done differently, and why.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from holdfast.abft.attention.section_passes import OPERANDS, Backward, Forward
from holdfast.abft.attention.section_passes import Call as Call
from holdfast.abft.gemm.raw import raw

SECTIONS = ("S_AS", "S_CL", "S_O")


@dataclass(frozen=True)
class Projection:
    """A linear layer: weight [outputs, inputs] and bias [outputs], as ``nn.Linear`` has them."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Projection":
        """Convert the layer to another dtype, differentiably."""
        return Projection(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Projections = tuple[Projection, Projection, Projection, Projection]


def cast(
    operands: Operands, projections: Projections, dtype: torch.dtype
) -> tuple[Operands, Projections]:
    """Convert everything to one dtype; operands that were one tensor stay one."""
    made = {id(x): x.to(dtype) for x in operands}
    query, key, value = (made[id(x)] for x in operands)
    of_query, of_key, of_value, of_output = (projection.to(dtype) for projection in projections)
    return (query, key, value), (of_query, of_key, of_value, of_output)


# Tensors that the backward pass reads.
_SAVED = (
    *("query", "key", "value", "Q.weight", "K.weight", "V.weight", "O.weight", "bias"),
    *("queries", "keys", "values", "probabilities", "noise", "context"),
)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    projections: Projections | None,
    call: Call,
    *,
    bias: torch.Tensor | None = None,
    blocked: torch.Tensor | None = None,
    past: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute multi-head attention; verify its six GEMMs and the twelve of their gradients.

    Each product is computed as without protection, by the same kernel from the same operands. The
    products of a section are checked at its end, by signed row checksums against the ``rounding``
    threshold.

    Args:
        query: [batch, L, E], on CPU.
        key: [batch, S, Ek], in the dtype of the queries.
        value: [batch, S, Ev], in the dtype of the queries.
        projections: Layers for queries, keys, values and output; None if the caller projects: the
            operands are those of one head each, a batch of batch · heads, and the output is the
            context. As in ``torch.matmul`` their layout is kept.
        call: Sizes and settings of the call.
        bias: Values added to the scaled scores, broadcastable to [batch, heads, L, P + S].
        blocked: True where a key may not be attended to, bool, broadcastable likewise.
        past: Keys [batch · kv_heads, d, P], after rotation, and values [batch · kv_heads, P, d] of
            earlier positions.

    Returns:
        The output [batch, L, outputs], and the keys and values (without gradient) that a later
        call may take as its past. A query to which every key is blocked has zero context: its
        output is the bias of the last projection.

    Guarantees: in a section that is due, a change of a product's row by more than twice its
    threshold is found. ``recompute`` restores the bits of the unprotected code, ``checksum`` the
    values to within the threshold and one rounding. Not covered: see README.md.

    Raises:
        UncorrectableFault: A fault cannot be corrected (a ``Guard`` collects it).
    """
    weights = [t for p in projections or () for t in (p.weight, p.bias)] or [None] * 8
    past_key, past_value = past or (None, None)
    operands = (query, key, value, *weights, bias, blocked, past_key, past_value)
    apply = _Attention.apply
    if torch.compiler.is_compiling():  # a compiler would fuse, and not see the checks
        apply = torch.compiler.disable(apply)
    output, keys, values = apply(call, *operands)
    return output, keys, values


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Call, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given = zip(OPERANDS, operands, strict=True)
        tensors = {name: tensor for name, tensor in given if tensor is not None}
        with raw():
            forward = Forward(call, tensors)
            output = forward.run()
        ctx.state = replace(forward.state, tensors={})  # type: ignore[attr-defined]
        if call.differentiable:
            ctx.saved = [name for name in _SAVED if name in tensors]  # type: ignore[attr-defined]
            ctx.save_for_backward(*(tensors[name] for name in ctx.saved))  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(tensors["keys"], tensors["values"])
        return output, tensors["keys"], tensors["values"]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        wanted = {
            name for name, need in zip(OPERANDS, ctx.needs_input_grad[1:], strict=True) if need
        }
        with raw():
            gradients = Backward(replace(ctx.state, tensors=tensors), wanted).run(grad)
        return None, *(gradients.get(name) for name in OPERANDS)

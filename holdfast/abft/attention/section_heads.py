"""The sections S_AS = {AS} and S_CL = {AP, CL} of attention whose projections are done elsewhere.

``AS = Q Kᵀ``; ``AP = softmax(scale · AS + bias)``; ``CL = AP V``, head by head. Models that leave
their attention to a function, such as those of transformers, hand over Q, K and V.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from holdfast.abft.attention import section_softmax
from holdfast.abft.attention.section_passes import INPUTS, Backward, Call, Forward, State
from holdfast.abft.attention.section_product import Section, multiply
from holdfast.abft.gemm.raw import raw

_SAVED = ("queries", "keys", "values", "probabilities", "noise", "bias")
_WANTED = ("query", "key", "value", "bias")


def heads_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of heads; verify its two GEMMs and the four of their gradients.

    Args:
        query: [batch, heads, L, d], on CPU; key and value are [batch, heads, S, d], likewise.
        key: See ``query``.
        value: See ``query``.
        call: Sizes and settings; of its sections the first two are used.
        bias: Values added to the scaled scores, broadcastable to [batch, heads, L, S].

    Returns:
        The context [batch, heads, L, d] and the probabilities [batch, heads, L, S] (after dropout,
        without gradient), with the bits of ``torch.matmul``, ``softmax`` and ``dropout``.

    Guarantees, Raises: as ``op.attention`` for these products.
    """
    apply = _Heads.apply
    if torch.compiler.is_compiling():  # a compiler would fuse, and not see the checks
        apply = torch.compiler.disable(apply)
    context, probabilities = apply(call, query, key, value, bias)
    return context, probabilities


class _Forward(Forward):
    """The forward pass of one call, by queries, keys and values of each head."""

    def __init__(self, call: Call, tensors: dict[str, torch.Tensor]) -> None:
        layout = call.layout(len(tensors["queries"]) // call.heads)
        self.state = State(call, layout, tensors, {})
        self.call, self.layout, self.tensors, self.empty = call, layout, tensors, None

    def run(self) -> torch.Tensor:
        of_scores, of_context, _ = self.call.sections
        scores = multiply(of_scores, "AS", self.tensors["queries"], self.tensors["keys"])
        scores.settle()
        self._keep("keys", self.tensors["keys"].mT, of_scores)
        self._mask(scores.output)
        return self._context(of_context, scores.output)

    def _context(self, section: Section, scores: torch.Tensor) -> torch.Tensor:
        probabilities = section_softmax.softmax(scores, None)
        section_softmax.visit(section, probabilities)
        self.tensors["probabilities"] = probabilities
        self._draw_dropout(probabilities)
        values = self.tensors["values"]
        context = multiply(section, "CL", self.state.dropped(), values)
        again = lambda: section_softmax.softmax(scores, None)  # noqa: E731
        if section_softmax.settle(section, probabilities, None, again):
            context = context.renewed(self.state.dropped(), values)
        self._settle(context, "probabilities")
        self._keep("values.T", values.mT, section)
        return context.output


class _Backward(Backward):
    """The backward pass of one call: four products."""

    def _of_input(self, section: Section, matrix: str, by_head: torch.Tensor, groups: int) -> None:
        self.gradients[INPUTS[matrix]] = by_head

    def _new(self, by_head: torch.Tensor) -> torch.Tensor:
        return by_head

    def run(self, grad: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return self._of_heads(grad)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, bias = operands
        shape = (*query.shape[:3], value.shape[3])
        tensors = {
            "queries": query.reshape(-1, *query.shape[2:]),
            "keys": key.mT.reshape(-1, key.shape[3], key.shape[2]),  # laid out as by torch.matmul
            "values": value.reshape(-1, *value.shape[2:]),
        }
        tensors |= {} if bias is None else {"bias": bias}
        with raw():
            forward = _Forward(call, tensors)
            context = forward.run().view(shape)
            probabilities = forward.layout.whole(forward.state.dropped())
        ctx.state = replace(forward.state, tensors={})
        if call.differentiable:
            ctx.saved = [name for name in _SAVED if name in tensors]
            ctx.save_for_backward(*(tensors[name] for name in ctx.saved))
            ctx.shapes = query.shape, key.shape, value.shape
        ctx.mark_non_differentiable(probabilities)
        return context, probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = dict(zip(ctx.saved, ctx.saved_tensors, strict=True))
        wanted = {n for n, need in zip(_WANTED, ctx.needs_input_grad[1:], strict=True) if need}
        with raw():
            backward = _Backward(replace(ctx.state, tensors=tensors), wanted)
            gradients = backward.run(grad.reshape(-1, *grad.shape[2:]))
        shapes = dict(zip(_WANTED, ctx.shapes, strict=False))
        shaped = {n: g.view(shapes[n]) if n in shapes else g for n, g in gradients.items()}
        return None, *(shaped.get(name) for name in _WANTED)

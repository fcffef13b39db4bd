"""Attention in three protection sections, each checked once, at its end.

``Q = X Wq + bq``, ``K = X Wk + bk``, ``V = X Wv + bv``; ``AS = Q Kᵀ``; ``AP = softmax(scale · AS +
mask)``; ``CL = AP V``; ``O = CL Wo + bo``. S_AS = {Q, K, AS}, S_CL = {V, AP, CL}, S_O = {O}.
Source: ATTNChecker, section 4.4; README.md says what is done differently, and why.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from holdfast.abft.attention import section_softmax
from holdfast.abft.attention.section_cache import Growing
from holdfast.abft.attention.section_product import Encoding, Product, Section, multiply
from holdfast.abft.attention.section_shapes import Heads, Rotary
from holdfast.abft.attention.sections_backward import Gradients, Kept
from holdfast.abft.gemm.passes import encode
from holdfast.abft.gemm.raw import raw

SECTIONS = ("S_AS", "S_CL", "S_O")


@dataclass(frozen=True)
class Projection:
    """A linear layer: weight [outputs, inputs] and bias [outputs], as ``nn.Linear`` has them."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Projection":
        """The same layer in another dtype, differentiable."""
        return Projection(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Projections = tuple[Projection, Projection, Projection, Projection]


def cast(
    operands: Operands, projections: Projections, dtype: torch.dtype
) -> tuple[Operands, Projections]:
    """Everything in one dtype; operands that were one tensor stay one."""
    made = {id(x): x.to(dtype) for x in operands}
    query, key, value = (made[id(x)] for x in operands)
    of_query, of_key, of_value, of_output = (projection.to(dtype) for projection in projections)
    return (query, key, value), (of_query, of_key, of_value, of_output)


@dataclass(frozen=True)
class Call:
    """What one attention is besides its operands.

    Attributes:
        heads: H; kv_heads: heads of K and V, a divisor of H; size: d, of each head.
        scale: of the scores; dropout: probability of dropping a probability.
        sections: S_AS, S_CL and S_O, for this call.
        turn_query, turn_key: rotary embeddings, both or neither.
        differentiable: whether a backward pass may follow.
        growing: checksums of the past keys and values, if these are kept; grows with the call.
    """

    heads: int
    kv_heads: int
    size: int
    scale: float
    sections: tuple[Section, Section, Section]
    dropout: float = 0.0
    turn_query: Rotary | None = None
    turn_key: Rotary | None = None
    differentiable: bool = False
    growing: Growing | None = None

    def layout(self, batch: int) -> Heads:
        """The heads of a batch."""
        return Heads(batch, self.kv_heads, self.heads // self.kv_heads, self.size)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    projections: Projections,
    call: Call,
    *,
    bias: torch.Tensor | None = None,
    blocked: torch.Tensor | None = None,
    past: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multi-head attention whose six GEMMs, and the twelve of their gradients, are verified.

    Each product is that of the unprotected code, the same kernel on the same operands; a section's
    are checked at its end, by signed row checksums against the ``rounding`` threshold.

    Args:
        query: [batch, L, E]; key, value: [batch, S, Ek], [batch, S, Ev]; one dtype, on CPU.
        projections: of queries, keys, values, and of the output.
        bias: added to the scaled scores, broadcastable to [batch, heads, L, P + S].
        blocked: bool, likewise; True where a key may not be attended to.
        past: of earlier positions, keys [batch · kv_heads, d, P], rotated, and values
            [batch · kv_heads, P, d].

    Returns:
        The output [batch, L, outputs], and the keys and values (without gradient) that a later
        call may take as its past. A query to which every key is blocked has zero context: its
        output is the bias of the last projection.

    Guarantees: in a section that is due, a change of a product's row by more than twice its
    threshold is found; ``recompute`` gives the bits of the unprotected code back, ``checksum``
    what the threshold and one rounding allow. Not covered: see README.md.

    Raises:
        UncorrectableFault: a fault cannot be corrected (deferred under a ``Guard``).
    """
    weights = [t for p in projections for t in (p.weight, p.bias)]
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
        with raw():
            forward = Forward(call, *operands)  # type: ignore[arg-type]
            output, kept = forward.run()
        ctx.kept = kept  # type: ignore[attr-defined]
        ctx.save_for_backward(*forward.saved())  # type: ignore[arg-type]
        results = output, forward.keys, forward.values
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        with raw():
            gradients = Gradients(ctx.kept, ctx.saved_tensors, ctx.needs_input_grad[1:])
            return None, *gradients.run(grad)


class Forward:
    """One forward pass; its attributes are the operands of ``attention``."""

    def __init__(
        self,
        call: Call,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: torch.Tensor | None,
    ) -> None:
        self.call = call
        self.inputs = (query, key, value)
        self.weights, (self.bias, self.blocked, past_key, past_value) = rest[:8], rest[8:]
        self.past = (past_key, past_value)
        self.layout = call.layout(query.shape[0])
        self.checksums: dict[str, Encoding] = {}
        # Inputs that are one tensor have one name, and are encoded once.
        self.names = "query", "query" if key is query else "key", _name(value, query, key)
        self.noise: torch.Tensor | None = None
        self.empty: torch.Tensor | None = None

    def run(self) -> tuple[torch.Tensor, Kept]:
        """The output [batch, L, outputs], and what the backward pass needs besides tensors."""
        query = self.inputs[0]
        scores = self._scores(self.call.sections[0])
        self._mask(scores)
        context = self._context(self.call.sections[1], scores)
        output = self._linear(self.call.sections[2], "O", context, 3)
        self._settle(output, "context")
        self.context = context
        kept = Kept(self.call, self.layout, self.names, self.checksums)
        return output.output.view(*query.shape[:2], output.output.shape[1]), kept

    def saved(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors of the backward pass, in the order of ``Gradients``."""
        if not self.call.differentiable:
            return ()
        weights = self.weights[::2]
        heads = (self.queries, self.keys, self.values, self.probabilities, self.noise)
        return *self.inputs, *weights, *heads, self.context, self.bias

    def _linear(self, section: Section, matrix: str, x: torch.Tensor, which: int) -> Product:
        weight, bias = self.weights[2 * which : 2 * which + 2]
        assert weight is not None
        flat = x.reshape(-1, x.shape[-1])
        return multiply(section, matrix, flat, weight.t(), bias, weight=True)

    def _scores(self, section: Section) -> torch.Tensor:
        """S_AS: AS [batch · kv_heads, groups · L, P + S], checked."""
        query = self._linear(section, "Q", self.inputs[0], 0)
        key = self._linear(section, "K", self.inputs[1], 1)
        self._split_queries_and_keys(query, key)
        growing = self.call.growing
        cached = None if growing is None else growing.keys
        scores = multiply(section, "AS", self.queries, self.keys, cached=cached)
        changed = self._settle(query, self.names[0]), self._settle(key, self.names[1])
        if any(changed):
            self._split_queries_and_keys(query, key)
            scores = scores.renewed(self.queries, self.keys)
        scores.settle()
        self._keep("keys", self.keys.mT, section)
        return scores.output

    def _split_queries_and_keys(self, query: Product, key: Product) -> None:
        groups, call = self.layout.groups, self.call
        self.queries = self.layout.split(query.output, groups)
        keys = self.layout.split(key.output, 1)
        if call.turn_query is not None and call.turn_key is not None:
            self.queries = call.turn_query.turn(self.queries, groups)
            keys = call.turn_key.turn(keys, 1)
        # As torch.matmul lays out the transposed keys of [batch, heads, length, d].
        self.keys = _after(self.past[0], keys.mT.contiguous(), 2)

    def _mask(self, scores: torch.Tensor) -> None:
        """Scale, bias and mask the scores in place; note which rows are blocked throughout."""
        whole = self.layout.whole(scores.mul_(self.call.scale))
        if self.bias is not None:
            whole.add_(self.bias)
        if self.blocked is None:
            return
        whole.masked_fill_(self.blocked, -torch.inf)
        empty = self.blocked.all(-1, keepdim=True)
        if empty.any():
            shape = (*whole.shape[:3], 1)
            self.empty = empty.expand(shape).reshape(*scores.shape[:2], 1)

    def _context(self, section: Section, scores: torch.Tensor) -> torch.Tensor:
        """S_CL: CL [batch · L, heads · d], checked."""
        value = self._linear(section, "V", self.inputs[2], 2)
        self.values = _after(self.past[1], self.layout.split(value.output, 1), 1)
        self.probabilities = section_softmax.softmax(scores, self.empty)
        section_softmax.visit(section, self.probabilities)
        dropped = self._dropped()
        growing = self.call.growing
        cached = None if growing is None else growing.values
        context = multiply(section, "CL", dropped, self.values, cached=cached)
        changed = [self._settle(value, self.names[2])]
        if changed[0]:
            self.values = _after(self.past[1], self.layout.split(value.output, 1), 1)
        changed.append(
            section_softmax.settle(
                section,
                self.probabilities,
                self.empty,
                lambda: section_softmax.softmax(scores, self.empty),
            )
        )
        if any(changed):
            context = context.renewed(self._dropped(), self.values)
        self._settle(context, "probabilities")
        self._keep("values.T", self.values.mT, section)
        return self.layout.merge(context.output, self.layout.groups)

    def _dropped(self) -> torch.Tensor:
        """AP after dropout; the mask is drawn once."""
        p = self.call.dropout
        if not p:
            return self.probabilities
        if self.noise is None:
            kept = torch.empty_like(self.probabilities).bernoulli_(1 - p)
            self.noise = kept.div_(1 - p) if p < 1 else kept
        return self.probabilities * self.noise

    def _settle(self, product: Product, name: str) -> bool:
        """Settle a product; keep the checksums of its left operand for the backward pass."""
        changed = product.settle(encode_a=self.call.differentiable and name not in self.checksums)
        if product.of_a is not None:
            self.checksums[name] = product.of_a
        return changed

    def _keep(self, name: str, b: torch.Tensor, section: Section) -> None:
        if self.call.differentiable and section.due and b.numel():
            self.checksums[name] = encode(b)


def _after(past: torch.Tensor | None, new: torch.Tensor, dim: int) -> torch.Tensor:
    return new if past is None else torch.cat([past, new], dim)


def _name(value: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> str:
    if value is key:
        return "query" if key is query else "key"
    return "query" if value is query else "value"

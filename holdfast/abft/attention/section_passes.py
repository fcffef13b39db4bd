"""Forward and backward pass of attention in three protection sections."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch

from holdfast.abft.attention import section_softmax
from holdfast.abft.attention.section_cache import Growing
from holdfast.abft.attention.section_product import (
    GRAD_A,
    GRAD_B,
    Encoding,
    Product,
    Section,
    multiply,
)
from holdfast.abft.attention.section_shapes import Heads, Rotary
from holdfast.abft.gemm.cpu import encode

# Names of the input of each projection, and of all operands in the order of the autograd function.
INPUTS = {"Q": "query", "K": "key", "V": "value", "O": "context"}
OPERANDS = (
    *("query", "key", "value"),
    *(f"{matrix}.{part}" for matrix in INPUTS for part in ("weight", "bias")),
    *("bias", "blocked", "past keys", "past values"),
)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """Sizes and settings of one call of attention.

    Attributes:
        heads: Number of query heads, a multiple of ``kv_heads``.
        size: Elements d of each head.
        scale: Factor of the scores.
        sections: Protection settings of the sections S_AS, S_CL and S_O in this call.
        dropout: Probability of dropping an attention probability.
        turn_query, turn_key: Rotary embeddings of queries and keys, both or neither.
        differentiable: True if a backward pass may follow.
        growing: Checksums of cached keys and values, to which the call adds its own.
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
        """Lay out the heads of a batch."""
        return Heads(batch, self.kv_heads, self.heads // self.kv_heads, self.size)


@dataclass
class State:
    """Tensors and checksums that the forward pass keeps for the backward pass of one call.

    Attributes:
        tensors: Operands of the call and results of the forward pass, by name.
        sources: Name under which the checksums of each input are stored; inputs that are the same
            tensor are encoded once.
        checksums: Row checksums by matrix: inputs of the projections, "keys" and "values.T" by
            head, "probabilities" after dropout, "context".
    """

    call: Call
    layout: Heads
    tensors: Tensors
    sources: dict[str, str]
    checksums: dict[str, Encoding] = field(default_factory=dict)

    def dropped(self) -> torch.Tensor:
        """Apply the dropout that the forward pass drew to the probabilities AP."""
        probabilities, noise = self.tensors["probabilities"], self.tensors.get("noise")
        return probabilities if noise is None else probabilities * noise


class Forward:
    """The forward pass of one call of attention."""

    def __init__(self, call: Call, tensors: Tensors) -> None:
        inputs = {name: tensors[name] for name in ("query", "key", "value")}
        sources = {"context": "context"}
        for name, x in inputs.items():
            sources[name] = next(other for other, y in inputs.items() if y is x)
        self.state = State(call, call.layout(inputs["query"].shape[0]), tensors, sources)
        self.call, self.layout, self.tensors = call, self.state.layout, tensors
        self.empty: torch.Tensor | None = None  # rows of the scores that are blocked throughout

    def run(self) -> torch.Tensor:
        """Compute the output [batch, L, outputs], and fill ``state`` for the backward pass."""
        of_scores, of_context, of_output = self.call.sections
        scores = self._scores(of_scores)
        self._mask(scores)
        self.tensors["context"] = self._context(of_context, scores)
        output = self._projection(of_output, "O")
        self._settle(output, "context")
        return output.output.view(*self.tensors["query"].shape[:2], output.output.shape[1])

    def _projection(self, section: Section, matrix: str) -> Product:
        x, weight = self.tensors[INPUTS[matrix]], self.tensors.get(f"{matrix}.weight")
        if weight is None:  # the caller projects, and splits the heads
            return Product(section, section.site(matrix), None, x, lambda: x)
        bias = self.tensors.get(f"{matrix}.bias")
        return multiply(section, matrix, _flat(x), weight.t(), bias, weight=True)

    def _scores(self, section: Section) -> torch.Tensor:
        """Compute and check section S_AS; return scores [batch · kv_heads, groups · L, P + S]."""
        query, key = self._projection(section, "Q"), self._projection(section, "K")
        queries, keys = self._split_queries_and_keys(query, key)
        growing = self.call.growing
        cached = None if growing is None else growing.keys
        scores = multiply(section, "AS", queries, keys, cached=cached)
        changed = self._settle(query, "query"), self._settle(key, "key")
        if any(changed):
            scores = scores.renewed(*self._split_queries_and_keys(query, key))
        scores.settle()
        self._keep("keys", self.tensors["keys"].mT, section)
        return scores.output

    def _split_queries_and_keys(
        self, query: Product, key: Product
    ) -> tuple[torch.Tensor, torch.Tensor]:
        groups, call = self.layout.groups, self.call
        queries, keys = self._split(query, groups), self._split(key, 1)
        if call.turn_query is not None and call.turn_key is not None:
            queries = call.turn_query.turn(queries, groups)
            keys = call.turn_key.turn(keys, 1)
        # As torch.matmul lays out the transposed keys of [batch, heads, length, d].
        new = keys.mT.contiguous() if "K.weight" in self.tensors else keys.mT
        keys = self._after("past keys", new, 2)
        self.tensors |= {"queries": queries, "keys": keys}
        return queries, keys

    def _split(self, product: Product, groups: int) -> torch.Tensor:
        x = product.output
        return x if x.dim() == 3 else self.layout.split(x, groups)

    def _after(self, past: str, new: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([self.tensors[past], new], dim) if past in self.tensors else new

    def _mask(self, scores: torch.Tensor) -> None:
        """Scale, bias and mask the scores in place; note which rows are blocked throughout."""
        whole = self.layout.whole(scores.mul_(self.call.scale))
        if "bias" in self.tensors:
            whole.add_(self.tensors["bias"])
        if "blocked" not in self.tensors:
            return
        blocked = self.tensors["blocked"]
        whole.masked_fill_(blocked, -torch.inf)
        empty = blocked.all(-1, keepdim=True)
        if empty.any():
            shape = (*whole.shape[:3], 1)
            self.empty = empty.expand(shape).reshape(*scores.shape[:2], 1)

    def _context(self, section: Section, scores: torch.Tensor) -> torch.Tensor:
        """Compute and check section S_CL; return the context [batch · L, heads · d]."""
        value = self._projection(section, "V")
        probabilities = section_softmax.softmax(scores, self.empty)
        section_softmax.visit(section, probabilities)
        self.tensors["probabilities"] = probabilities
        self._draw_dropout(probabilities)
        growing = self.call.growing
        cached = None if growing is None else growing.values
        operands = self.state.dropped(), self._split_values(value)
        context = multiply(section, "CL", *operands, cached=cached)
        changed = self._settle(value, "value")
        if changed:
            self._split_values(value)
        changed |= section_softmax.settle(
            section, probabilities, self.empty, lambda: section_softmax.softmax(scores, self.empty)
        )
        if changed:
            context = context.renewed(self.state.dropped(), self.tensors["values"])
        self._settle(context, "probabilities")
        self._keep("values.T", self.tensors["values"].mT, section)
        return self.layout.merge(context.output, self.layout.groups)

    def _split_values(self, value: Product) -> torch.Tensor:
        values = self._after("past values", self._split(value, 1), 1)
        self.tensors["values"] = values
        return values

    def _draw_dropout(self, probabilities: torch.Tensor) -> None:
        p = self.call.dropout
        if p:
            kept = torch.empty_like(probabilities).bernoulli_(1 - p)
            self.tensors["noise"] = kept.div_(1 - p) if p < 1 else kept

    def _settle(self, product: Product, name: str) -> bool:
        """Check and correct a product; keep the checksums of A for the backward pass."""
        source, checksums = self.state.sources.get(name, name), self.state.checksums
        changed = product.settle(encode_a=self.call.differentiable and source not in checksums)
        if product.of_a is not None:
            checksums[source] = product.of_a
        return changed

    def _keep(self, name: str, b: torch.Tensor, section: Section) -> None:
        if self.call.differentiable and section.due and b.numel():
            self.state.checksums[name] = encode(b)


class Backward:
    """The backward pass of one call: twelve products, checked by checksums of the forward pass."""

    def __init__(self, state: State, wanted: Set[str]) -> None:
        self.state, self.tensors, self.layout = state, state.tensors, state.layout
        self.wanted = wanted  # names of operands
        self.gradients: Tensors = {}

    def run(self, grad: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Compute the gradients of the operands that want one, by name."""
        grad_context = self._projection(self.state.call.sections[2], "O", _flat(grad))
        if grad_context is None:
            return self.gradients
        return self._of_heads(self.layout.split(grad_context, self.layout.groups))

    def _of_heads(self, by_head: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Compute the gradients behind that of the context of each head."""
        of_scores, of_context, _ = self.state.call.sections
        if self._wants("V"):
            self._of_value(of_context, by_head)
        if self._wants("Q") or self._wants("K") or "bias" in self.wanted:
            grad_scores = self._of_scores(of_context, by_head)
            if "bias" in self.wanted:
                shape = self.tensors["bias"].shape
                self.gradients["bias"] = self.layout.whole(grad_scores).sum_to_size(shape)
            self._of_queries_and_keys(of_scores, grad_scores)
        return self.gradients

    def _wants(self, matrix: str) -> bool:
        """Check whether Q, K or V needs a gradient."""
        return not self.wanted.isdisjoint((INPUTS[matrix], f"{matrix}.weight", f"{matrix}.bias"))

    def _projection(self, section: Section, matrix: str, grad: torch.Tensor) -> torch.Tensor | None:
        """Compute the gradients of weight and bias; return that of the input [rows, inputs]."""
        source, of_input = INPUTS[matrix], None
        needed = source in self.wanted
        if matrix == "O":
            needed = "bias" in self.wanted or any(self._wants(earlier) for earlier in "QKV")
        if needed:
            weight, of_input = self.tensors.get(f"{matrix}.weight"), grad
            if weight is not None:
                of_input = _settled(section, matrix, grad, weight, GRAD_A, weight=True)
        if f"{matrix}.weight" in self.wanted:
            known = self.state.checksums.get(self.state.sources[source])
            x = _flat(self.tensors[source])
            of_weight = _settled(section, matrix, grad.t(), x, GRAD_B, known)
            self.gradients[f"{matrix}.weight"] = of_weight
        if f"{matrix}.bias" in self.wanted:
            self.gradients[f"{matrix}.bias"] = grad.sum(0)
        return of_input

    def _of_input(self, section: Section, matrix: str, by_head: torch.Tensor, groups: int) -> None:
        """Compute the gradients of input, weight and bias behind Q, K or V."""
        of_input = self._projection(section, matrix, self.layout.merge(by_head, groups))
        if of_input is not None:
            name = INPUTS[matrix]
            self.gradients[name] = of_input.view(self.tensors[name].shape)

    def _of_value(self, section: Section, by_head: torch.Tensor) -> None:
        """Compute ``dV = APᵀ dCL``, checked by ``dVᵀ r = dCLᵀ (AP r)`` with a stored ``AP r``."""
        probabilities = self.state.dropped()
        transposed = multiply(
            section,
            "CL",
            by_head.mT,
            probabilities,
            role=GRAD_B,
            encoding=self.state.checksums.get("probabilities"),
            kernel=lambda: torch.bmm(probabilities.mT, by_head).mT,
        )
        transposed.settle()
        self._of_input(section, "V", self._new(transposed.output.mT), 1)

    def _of_scores(self, section: Section, by_head: torch.Tensor) -> torch.Tensor:
        """Compute ``dAP = dCL Vᵀ`` and from it the gradient of the scores."""
        known, probabilities = self.state.checksums.get("values.T"), self.tensors["probabilities"]
        grad = _settled(section, "CL", by_head, self.tensors["values"].mT, GRAD_A, known)
        if "noise" in self.tensors:
            grad = grad * self.tensors["noise"]
        return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)

    def _of_queries_and_keys(self, section: Section, of_scores: torch.Tensor) -> None:
        """Compute and check the gradients ``dQ = dAS K`` and ``dKᵀ = Qᵀ dAS``."""
        call, groups = self.state.call, self.layout.groups
        grad = of_scores.mul_(call.scale)
        of_grad: Encoding | None = None
        if self._wants("Q"):
            known = self.state.checksums.get("keys")
            keys = self.tensors["keys"].mT
            product = multiply(section, "AS", grad, keys, role=GRAD_A, encoding=known)
            product.settle(encode_a=self._wants("K"))
            of_grad = product.of_a
            queries = _turned_back(call.turn_query, product.output, groups)
            self._of_input(section, "Q", queries, groups)
        if self._wants("K"):
            queries = self.tensors["queries"].mT
            of_keys = self._new(_settled(section, "AS", queries, grad, GRAD_B, of_grad).mT)
            self._of_input(section, "K", _turned_back(call.turn_key, of_keys, 1), 1)

    def _new(self, by_head: torch.Tensor) -> torch.Tensor:
        """Return the gradient without the cached earlier positions, which get none."""
        return by_head[:, by_head.shape[1] - self.tensors["key"].shape[1] :]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _settled(
    section: Section,
    matrix: str,
    a: torch.Tensor,
    b: torch.Tensor,
    role: int,
    encoding: Encoding | None = None,
    *,
    weight: bool = False,
) -> torch.Tensor:
    product = multiply(section, matrix, a, b, role=role, encoding=encoding, weight=weight)
    product.settle()
    return product.output


def _turned_back(turn: Rotary | None, by_head: torch.Tensor, groups: int) -> torch.Tensor:
    return by_head if turn is None else turn.turn(by_head, groups, back=True)

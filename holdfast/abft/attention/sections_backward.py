"""The gradients of attention: twelve GEMMs, checked by checksums that the forward pass left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from holdfast.abft.attention.section_product import GRAD_A, GRAD_B, Encoding, Section, multiply
from holdfast.abft.attention.section_shapes import Heads, Rotary

if TYPE_CHECKING:
    from holdfast.abft.attention.sections import Call

Gradient = torch.Tensor | None


class Kept(NamedTuple):
    """What a forward pass leaves besides tensors.

    Attributes:
        names: of the inputs of Q, K and V, in ``checksums``; checksums: row checksums by matrix:
            those inputs, "keys" and "values.T" by head, "probabilities" after dropout, "context".
    """

    call: Call
    layout: Heads
    names: tuple[str, ...]
    checksums: dict[str, Encoding]


class Gradients:
    """One backward pass."""

    def __init__(
        self, kept: Kept, saved: Sequence[torch.Tensor | None], wanted: Sequence[bool]
    ) -> None:
        self.call, self.layout, names, self.checksums = kept
        self.names = *names, "context"
        self.inputs, self.weights = saved[:3], saved[3:7]
        self.queries, self.keys, self.values, self.probabilities, self.noise = saved[7:12]
        self.context, self.bias = saved[12:]
        self.wanted = wanted  # of query, key, value, eight weights and biases, and the score bias

    def run(self, grad: torch.Tensor) -> Iterable[Gradient]:
        """Gradients of ``attention``'s operands, in their order; None where none is wanted."""
        scores, context, output = self.call.sections
        of_context, of_output = self._linear(
            output, "O", grad.reshape(-1, grad.shape[-1]), self.context, 3, self._upstream(3)
        )
        of_scores: Gradient = None
        of_value: list[Gradient] = [None, None, None]
        if of_context is not None:
            by_head = self.layout.split(of_context, self.layout.groups)
            of_value = self._of_value(context, by_head)
            of_scores = self._of_scores(context, by_head)
        of_bias = self._of_bias(of_scores)
        of_query, of_key = self._of_queries_and_keys(scores, of_scores)
        inputs = [of_query[0], of_key[0], of_value[0]]
        weights = [*of_query[1:], *of_key[1:], *of_value[1:], *of_output]
        return *inputs, *weights, of_bias, None, None, None

    def _upstream(self, which: int) -> bool:
        """Whether the input of a projection needs a gradient; 3 is CL."""
        if which < 3:
            return self.wanted[which]
        return any(self.wanted[:9]) or self.wanted[11]

    def _linear(
        self,
        section: Section,
        matrix: str,
        grad: torch.Tensor,
        x: torch.Tensor | None,
        which: int,
        of_input: bool,
    ) -> tuple[Gradient, list[Gradient]]:
        """Gradients of a projection's input [rows, inputs], and of its weight and bias."""
        weight = self.weights[which]
        assert x is not None
        assert weight is not None
        of_weight, of_bias = self.wanted[3 + 2 * which : 5 + 2 * which]
        dx: Gradient = None
        dw: Gradient = None
        if of_input:
            product = multiply(section, matrix, grad, weight, role=GRAD_A, weight=True)
            product.settle()
            dx = product.output
        if of_weight:
            flat, known = x.reshape(-1, x.shape[-1]), self.checksums.get(self.names[which])
            dw = _settled(section, matrix, grad.t(), flat, GRAD_B, known)
        return dx, [dw, grad.sum(0) if of_bias else None]

    def _projected(
        self, section: Section, matrix: str, by_head: torch.Tensor, which: int, groups: int
    ) -> list[Gradient]:
        """Gradients of input, weight and bias behind Q, K or V."""
        flat = self.layout.merge(by_head, groups)
        x = self.inputs[which]
        assert x is not None
        of_input, rest = self._linear(section, matrix, flat, x, which, self._upstream(which))
        return [None if of_input is None else of_input.view(x.shape), *rest]

    def _wants(self, which: int) -> bool:
        return self.wanted[which] or any(self.wanted[3 + 2 * which : 5 + 2 * which])

    def _of_value(self, section: Section, by_head: torch.Tensor) -> list[Gradient]:
        """dV = APᵀ dCL, checked from the other side: ``dVᵀ r = dCLᵀ (AP r)`` reads AP no more."""
        if not self._wants(2):
            return [None, None, None]
        probabilities = self._dropped()
        transposed = multiply(
            section,
            "CL",
            by_head.mT,
            probabilities,
            role=GRAD_B,
            encoding=self.checksums.get("probabilities"),
            kernel=lambda: torch.bmm(probabilities.mT, by_head).mT,
        )
        transposed.settle()
        return self._projected(section, "V", self._new(transposed.output.mT), 2, 1)

    def _of_scores(self, section: Section, by_head: torch.Tensor) -> Gradient:
        """dAP = dCL Vᵀ, through dropout and softmax."""
        if not (self._wants(0) or self._wants(1) or self.wanted[11]):
            return None
        assert self.values is not None
        assert self.probabilities is not None
        known = self.checksums.get("values.T")
        grad = _settled(section, "CL", by_head, self.values.mT, GRAD_A, known)
        if self.noise is not None:
            grad = grad * self.noise
        dtype = self.probabilities.dtype
        return torch._softmax_backward_data(grad, self.probabilities, -1, dtype)

    def _of_bias(self, of_scores: Gradient) -> Gradient:
        if of_scores is None or self.bias is None or not self.wanted[11]:
            return None
        return self.layout.whole(of_scores).sum_to_size(self.bias.shape)

    def _of_queries_and_keys(
        self, section: Section, of_scores: Gradient
    ) -> tuple[list[Gradient], list[Gradient]]:
        """dQ = dAS K and dKᵀ = Qᵀ dAS."""
        of_query: list[Gradient] = [None, None, None]
        of_key: list[Gradient] = [None, None, None]
        if of_scores is None:
            return of_query, of_key
        assert self.keys is not None
        assert self.queries is not None
        grad, groups = of_scores.mul_(self.call.scale), self.layout.groups
        of_grad: Encoding | None = None
        if self._wants(0):
            known = self.checksums.get("keys")
            product = multiply(section, "AS", grad, self.keys.mT, role=GRAD_A, encoding=known)
            product.settle(encode_a=self._wants(1))
            of_grad = product.of_a
            queries = _turned_back(self.call.turn_query, product.output, groups)
            of_query = self._projected(section, "Q", queries, 0, groups)
        if self._wants(1):
            keys = _settled(section, "AS", self.queries.mT, grad, GRAD_B, of_grad).mT
            keys = _turned_back(self.call.turn_key, self._new(keys), 1)
            of_key = self._projected(section, "K", keys, 1, 1)
        return of_query, of_key

    def _new(self, by_head: torch.Tensor) -> torch.Tensor:
        """Without the positions of the past, which get no gradient."""
        x = self.inputs[1]
        assert x is not None
        return by_head[:, by_head.shape[1] - x.shape[1] :]

    def _dropped(self) -> torch.Tensor:
        assert self.probabilities is not None
        return self.probabilities if self.noise is None else self.probabilities * self.noise


def _settled(
    section: Section,
    matrix: str,
    a: torch.Tensor,
    b: torch.Tensor,
    role: int,
    encoding: Encoding | None = None,
) -> torch.Tensor:
    product = multiply(section, matrix, a, b, role=role, encoding=encoding)
    product.settle()
    return product.output


def _turned_back(turn: Rotary | None, by_head: torch.Tensor, groups: int) -> torch.Tensor:
    return by_head if turn is None else turn.turn(by_head, groups, back=True)

"""Operands that healthy programs multiply: the injector's, and some more that are coherent."""

import torch

from holdfast_lab.distributions import COHERENT, RANDOM, Distribution, Operands, normal


def _constants(left: float, right: float) -> Distribution:
    """Two constant matrices."""

    def operands(
        m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Operands:
        return torch.full((m, k), left, dtype=dtype), torch.full((k, n), right, dtype=dtype)

    return operands


def _uniform_attention(
    m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> Operands:
    _, b = normal(0.0)(m, k, n, dtype, generator)
    return torch.full((m, k), 1 / k, dtype=dtype), b


def _one_hot_of_a_constant(
    m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> Operands:
    a, _ = COHERENT["one_hot"](m, k, n, dtype, generator)
    return a, torch.full((k, n), 0.1, dtype=dtype)


def _tiny_gradients(
    m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
) -> Operands:
    a, b = normal(0.0)(m, k, n, dtype, generator)
    return a * 1e-6, b


def _relu(m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    a, b = normal(0.0)(m, k, n, dtype, generator)
    return a.relu(), b


DISTRIBUTIONS: dict[str, Distribution] = {
    **RANDOM,
    **COHERENT,
    "repeated_fractions": _constants(-3.0, 1 / 3),
    "one_hot_of_a_constant": _one_hot_of_a_constant,
    "uniform_attention": _uniform_attention,
    "tiny_gradients": _tiny_gradients,
    "relu": _relu,
}

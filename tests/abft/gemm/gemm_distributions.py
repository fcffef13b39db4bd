"""Operands that healthy programs multiply: the injector's, and some more that are coherent."""

from collections.abc import Callable

import torch

from holdfast_lab.distributions import COHERENT, RANDOM, Distribution, Operands, normal

RANDOM_NORMAL = normal(0.0)


def changed(
    change: Callable[[torch.Tensor, torch.Tensor], Operands],
    source: Distribution = RANDOM_NORMAL,
) -> Distribution:
    """Operands made of those of another distribution."""

    def operands(
        m: int, k: int, n: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Operands:
        return change(*source(m, k, n, dtype, generator))

    return operands


DISTRIBUTIONS: dict[str, Distribution] = {
    **RANDOM,
    **COHERENT,
    "repeated_fractions": changed(
        lambda a, b: (torch.full_like(a, -3.0), torch.full_like(b, 1 / 3))
    ),
    "one_hot_of_a_constant": changed(
        lambda a, b: (a, torch.full_like(b, 0.1)), COHERENT["one_hot"]
    ),
    "uniform_attention": changed(lambda a, b: (torch.full_like(a, 1 / a.shape[1]), b)),
    "tiny_gradients": changed(lambda a, b: (a * 1e-6, b)),
    "relu": changed(lambda a, b: (a.relu(), b)),
}

"""Products checked by separate operators: the cost of protection without any optimisation."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.abft.checksums.weights import signs
from holdfast.errors import UncorrectableFault

LIMIT = 16.0  # standard deviations; the bound is this study's, not the paper's

aten = torch.ops.aten
_WITH_ADDEND = (aten.addmm.default, aten.baddbmm.default)
_PLAIN = (aten.mm.default, aten.bmm.default)


class Unfused(TorchDispatchMode):
    """While the context is open, the products of this thread are checked by torch operators alone.

    Each checksum is a product or sum of its own, in the operands' dtype: ``B r`` and ``A (B r)`` to
    predict, ``C r`` to compare, and norms of A and B for the limit. Nothing is kept or corrected.
    ``checked`` counts the products.

    Guarantees: an fp32 element that is INF, NaN or larger than the norms allow is detected.

    Raises:
        UncorrectableFault: A product is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator, forward or backward, and check its result if it is a product."""
        output = func(*args, **kwargs or {})
        if func in _PLAIN:
            self._check(output, None, *args)
        elif func in _WITH_ADDEND and not kwargs:
            self._check(output, *args)
        return output

    def _check(
        self, c: torch.Tensor, addend: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor
    ) -> None:
        weights = signs(b.shape[-1]).to(b)
        predicted = a @ (b @ weights).unsqueeze(-1)
        found = c @ weights
        norms = a.norm(dim=-1) * b.norm(dim=(-2, -1)).unsqueeze(-1)
        if addend is not None:
            predicted = predicted + (addend.expand(c.shape) @ weights).unsqueeze(-1)
            norms = norms + addend.norm()
        sizes = sqrt(a.shape[-1] + b.shape[-1])
        limit = LIMIT * sizes * torch.finfo(c.dtype).eps * norms
        wrong = ~((found - predicted.squeeze(-1)).abs() <= limit)
        self.checked += 1
        if wrong.any():
            raise UncorrectableFault(f"{int(wrong.sum())} rows of a product {tuple(c.shape)}")

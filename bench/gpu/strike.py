"""Faults for the stages: a site hook that adds to one element, and thresholds from fp64."""

from collections.abc import Callable

import torch

from holdfast.abft.triton.tolerance import Precision, Tolerance
from holdfast.sites import Gemm

Amount = Callable[[Gemm, torch.Tensor], torch.Tensor | float]


class Added:
    """Site hook that adds an amount to one element of the results of some sites.

    ``only`` is the first number of results that it strikes; None for all. It copies nothing to the
    host, so that it can be captured in a graph.
    """

    def __init__(
        self,
        amount: Amount,
        *,
        site: str = "",
        row: int = 0,
        column: int = 0,
        only: int | None = None,
    ) -> None:
        self.amount, self.site, self.only = amount, site, only
        self.row, self.column = row, column
        self.struck = 0

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if stage != "output" or not site.endswith(self.site) or self.struck == self.only:
            return
        assert output is not None
        self.struck += 1
        with torch.no_grad():
            amount = self.amount(gemm, output)
            output.data[..., self.row, self.column] += amount


def beyond_all(gemm: Gemm, output: torch.Tensor) -> torch.Tensor:
    """Return a thousand times the largest element, which no threshold covers."""
    return 1e3 * output.detach().abs().max()


def thresholds(gemm: Gemm, c: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Compute T of every row of C [M, N], fp64 [M], from the encoding of B (backend.h)."""
    a, inner = gemm.a.double(), gemm.a.shape[-1]
    by = Tolerance.of(gemm.a.dtype, c.dtype, inner, c.shape[-1], precision)
    walk = a.square() @ gemm.statistics.double().reshape(-1)[:inner]
    energy = c.double().square().sum(-1)
    drift = by.drift**2 * (energy - 4 * walk).clamp_min(0)
    return by.scale * (by.output**2 * energy + by.walk**2 * walk + drift).sqrt() + by.floor

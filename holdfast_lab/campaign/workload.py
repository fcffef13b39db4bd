"""The matrix products that faults are injected into, computed once and verified many times."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from holdfast.abft.gemm.cpu import count_suspects, encode, verify
from holdfast.abft.gemm.reference import as_batch, suspect_rows
from holdfast.sites import Gemm
from holdfast_lab.campaign.effects import Scale, scale_of
from holdfast_lab.campaign.plan import DISTRIBUTIONS, DTYPES, Shape
from holdfast_lab.campaign.programs import Program, make_program

MOST_PRODUCTS, ENOUGH_ROWS = 8, 512

Encoding = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Computed:
    """A computed matrix product C = A B.

    Attributes:
        gemm: Operands as interception sees them, with their strides.
        c: Clean product, [batch, M, N].
    """

    gemm: Gemm
    c: torch.Tensor

    @property
    def a(self) -> torch.Tensor:
        """Left operand, [batch, M, K]."""
        return as_batch(self.gemm.a.detach())

    @property
    def b(self) -> torch.Tensor:
        """Right operand, [batch, K, N]."""
        return as_batch(self.gemm.b.detach())

    @cached_property
    def encoding(self) -> Encoding:
        """Checksum [batch, K] and statistics [batch, …] of B."""
        return encode(self.gemm.b)

    @cached_property
    def scale(self) -> Scale:
        """The scale by which the effect of a fault is measured."""
        gemm, added = self.gemm, None
        if gemm.addend is not None and gemm.beta != 0:
            added = gemm.beta * gemm.addend.detach().expand(self.c.shape).double()
        return scale_of(self.c, gemm.alpha * self.a, self.b, added)

    @torch.no_grad()
    def suspects(self, c: torch.Tensor, a: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows that the verification pass suspects, bool [batch, M].

        ``c`` is the product with faults, [batch, M, N], and ``a`` the left operand if it has a
        fault, too.
        """
        gemm = self.gemm
        left = self.a if a is None else a
        rows = verify(c, left, *self.encoding, gemm.addend, gemm.beta, gemm.alpha, self.b)
        return suspect_rows(rows)

    @torch.no_grad()
    def suspected(self, c: torch.Tensor, encoding: Encoding | None = None) -> bool:
        """Return whether any row is suspect, with the same call as the interception makes.

        ``encoding`` is the checksum and the statistics of B if they have a fault.
        """
        row_sum, statistics = encoding or self.encoding
        gemm = replace(self.gemm, a=self.a, b=self.b, row_sum=row_sum, statistics=statistics)
        return bool(count_suspects(gemm, c)[0])


@dataclass(frozen=True, eq=False)
class Problem(Computed):
    """A matrix product of a program, with its operands as verification sees them."""

    program: Program

    @cached_property
    def clean_digest(self) -> str:
        """Digest of all results of the program without faults."""
        return self.program.digest()


def make_problem(program: Program) -> Problem:
    """Run a program once and keep the product that gets the faults."""
    gemm, output = program.product()
    return Problem(gemm, as_batch(output), program)


@lru_cache(maxsize=1)
def workload(
    operator: str, dtype: str, shape: Shape, distribution: str, seed: int
) -> tuple[Problem, ...]:
    """Make the products that cells of one operator, dtype, shape and distribution share.

    There are several of them, as rows of one product share B and are not quite independent.
    """
    generator = torch.Generator().manual_seed(seed)
    count = max(1, min(MOST_PRODUCTS, ENOUGH_ROWS // shape[0]))
    draw = DISTRIBUTIONS[distribution]
    return tuple(
        make_problem(make_program(operator, shape, DTYPES[dtype], draw, generator))
        for _ in range(count)
    )

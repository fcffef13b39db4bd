"""Rows of a matrix product in fp64: their repair by checksums, and their exact values."""

import torch

from holdfast.abft.checksums.extreme import correct_vectors
from holdfast.abft.checksums.patterns import Side
from holdfast.abft.checksums.positions import encoding
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.analytic import element_bound
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.sites import Gemm


def full_addend(gemm: Gemm) -> torch.Tensor:
    """Expand the addend of ``C = beta · addend + alpha · A B`` to the shape of C."""
    assert gemm.addend is not None
    return gemm.addend.expand(torch.Size([*gemm.a.shape[:-1], gemm.b.shape[-1]]))


def _row_operands(
    gemm: Gemm, batch: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rows of A, B, and ``beta`` times rows of the addend if there is one, in fp64."""
    a, b = as_batch(gemm.a)[batch, rows].double(), as_batch(gemm.b)[batch].double()
    if gemm.addend is None or gemm.beta == 0:
        return a, b, None
    return a, b, gemm.beta * as_batch(full_addend(gemm))[batch, rows].double()


def predicted(
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None,
    output: torch.dtype,
    operand: torch.dtype,
    alpha: float = 1.0,
    dim: int = -1,
) -> Side:
    """Predict all checksums of the rows of ``alpha · a b + addend``, and bound their rounding.

    The operands are in fp64; ``output`` and ``operand`` are the dtypes in which the product was
    computed. With ``dim=-2`` the product is the transpose of the matrix to be checked.
    """
    inner, columns = b.shape
    positions = encoding(columns, accumulate=torch.float64)
    # One pass over b, whose fp64 elements no setting rounds.
    sums, added = alpha * (a @ (b @ positions.table.mT)), torch.zeros((), dtype=torch.float64)
    if addend is not None:
        sums, added = sums + positions.sums(addend), addend.square().sum(-1)
    statistics = rounding.statistics(b, operand)
    walk = alpha**2 * rounding.walked(a, statistics[:-1])

    def threshold(c: torch.Tensor) -> torch.Tensor:
        # All checksums, plain and position-weighted, include the random signs.
        energy = c.double().square().sum(dim)
        dtypes = output, ACCUMULATION[output]
        return rounding.threshold(
            walk, energy, statistics[-1:], columns, inner, *dtypes, added, abs(alpha)
        )

    return Side(sums[:, 0], sums[:, 1:], threshold, positions)


def correct_rows(gemm: Gemm, output: torch.Tensor, suspects: torch.Tensor) -> torch.Tensor:
    """Rebuild one wrong element of each suspect row of C from the row's checksums (EEC-ABFT).

    ``suspects`` is bool [batch, M]; only these rows are read.

    Returns:
        A new tensor. Repaired elements are right to within the row's threshold plus one rounding;
        a row with more than one wrong element is as it was.
    """
    repaired = output.clone()
    for batch in suspects.any(1).nonzero().flatten().tolist():
        rows = suspects[batch].nonzero().flatten()
        operands = _row_operands(gemm, batch, rows)
        side = predicted(*operands, output.dtype, gemm.b.dtype, gemm.alpha)
        as_batch(repaired)[batch, rows] = correct_vectors(
            as_batch(output)[batch, rows], *side
        ).matrix
    return repaired


def exact_rows(
    gemm: Gemm, batch: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute rows of C in fp64, with their sums of magnitudes and a bound on a kernel's error."""
    a, b, addend = _row_operands(gemm, batch, rows)
    exact, magnitude = gemm.alpha * (a @ b), abs(gemm.alpha) * (a.abs() @ b.abs())
    if addend is not None:
        exact, magnitude = exact + addend, magnitude + addend.abs()
    factor = max(1.0, abs(gemm.alpha), abs(gemm.beta))
    bound = element_bound(magnitude, a.shape[-1], gemm.a.dtype, factor)
    return exact, magnitude, bound


def flushed(gemm: Gemm, batch: int, rows: torch.Tensor) -> torch.Tensor:
    """Bound the error in rows of C of a kernel that flushes subnormal operands to zero."""
    a, b, _ = _row_operands(gemm, batch, rows)
    left, right = a.abs(), b.abs()
    smallest = torch.finfo(gemm.a.dtype).smallest_normal
    return left.where(left < smallest, 0) @ right + left @ right.where(right < smallest, 0)

"""Repair of wrong rows of a matrix product by their checksums, without computing it again."""

import torch

from holdfast.abft.checksums.extreme import correct_vectors
from holdfast.abft.checksums.positions import encoding
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.sites import Gemm


def full_addend(gemm: Gemm) -> torch.Tensor:
    """Expand the addend of ``C = beta · addend + alpha · A B`` to the shape of C."""
    assert gemm.addend is not None
    return gemm.addend.expand(torch.Size([*gemm.a.shape[:-1], gemm.b.shape[-1]]))


def row_operands(
    gemm: Gemm, batch: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rows of A, B, and ``beta`` times rows of the addend if there is one, in fp64."""
    a, b = as_batch(gemm.a)[batch, rows].double(), as_batch(gemm.b)[batch].double()
    if gemm.addend is None or gemm.beta == 0:
        return a, b, None
    return a, b, gemm.beta * as_batch(full_addend(gemm))[batch, rows].double()


def correct_rows(gemm: Gemm, output: torch.Tensor, suspects: torch.Tensor) -> torch.Tensor:
    """Rebuild one wrong element of each suspect row of C from the row's checksums (EEC-ABFT).

    Only suspect rows are read: their plain and position-weighted checksums are predicted from A
    and B in fp64.

    Args:
        gemm: The product and the checksums of B.
        output: C, not changed.
        suspects: bool [batch, M], the rows to correct.

    Returns:
        A new tensor. Repaired elements are right to within the row's threshold plus one rounding;
        a row with more than one wrong element is as it was.
    """
    repaired = output.clone()
    for batch in suspects.any(1).nonzero().flatten().tolist():
        rows = suspects[batch].nonzero().flatten()
        as_batch(repaired)[batch, rows] = _corrected(
            gemm, as_batch(output)[batch, rows], batch, rows
        )
    return repaired


def _corrected(gemm: Gemm, wrong: torch.Tensor, batch: int, rows: torch.Tensor) -> torch.Tensor:
    a, b, addend = row_operands(gemm, batch, rows)
    inner, columns = b.shape
    positions = encoding(columns, accumulate=torch.float64)
    sums = gemm.alpha * (a @ positions.sums(b))
    added = torch.zeros(len(rows), dtype=torch.float64)
    if addend is not None:
        sums, added = sums + positions.sums(addend), addend.square().sum(-1)
    statistics = rounding.b_statistics(as_batch(gemm.b)[batch])
    walk = gemm.alpha**2 * rounding.walked(a, statistics[:-1])

    def threshold(c: torch.Tensor) -> torch.Tensor:
        # All checksums, plain and position-weighted, include the random signs.
        energy = c.double().square().sum(-1)
        dtypes = wrong.dtype, ACCUMULATION[wrong.dtype]
        return rounding.threshold(
            walk, energy, statistics[-1:], columns, inner, *dtypes, added, abs(gemm.alpha)
        )

    return correct_vectors(wrong, sums[:, 0], sums[:, 1:], threshold, positions).matrix

"""Correction of a section's product by checksums of both directions, whatever the pattern.

Source: ATTNChecker, sections 4.2 to 4.4.
"""

from collections.abc import Iterator
from functools import partial

import torch

from holdfast.abft.checksums.patterns import Side, correct_matrix
from holdfast.abft.checksums.positions import encoding
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.policy import FaultContext, Repair, decide_each
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.protocol import ACCUMULATION
from holdfast.events import EventKind
from holdfast.sites import Gemm, SiteTuple


def repair_by_checksums(
    site: SiteTuple, gemm: Gemm, output: torch.Tensor, suspects: torch.Tensor
) -> bool:
    """Correct the suspect matrices of a product in place; return whether any was corrected.

    Rows are predicted as ``A (B t)``, columns as ``(tᵀ A) B``, with the plain and the position
    weights t of EEC-ABFT, in fp64, and only now: a healthy product needs the plain checksum alone.

    Args:
        site: of the product.
        gemm: its operands.
        output: C, [M, N] or [batch, M, N].
        suspects: rows that failed, bool [batch, M].

    Guarantees: one wrong element, one wrong row and one wrong column of a matrix, of INF, NaN,
    near-INF and moderate values and any mixture of them, become right to within the threshold of
    the direction that repairs them plus one rounding of their dtype; a matrix for which the two
    directions do not agree in the end is left as it was.

    Not covered: matrices one of whose operands holds NaN or INF.
    """
    repairs = list(_repairs(gemm, output, suspects))
    decide_each(FaultContext(site, override="checksum", device=str(output.device)), repairs)
    return bool(repairs)


def _repairs(gemm: Gemm, output: torch.Tensor, suspects: torch.Tensor) -> Iterator[Repair]:
    for batch in suspects.any(1).nonzero().flatten().tolist():
        matrix = as_batch(output)[batch]
        a, b = as_batch(gemm.a)[batch].double(), as_batch(gemm.b)[batch].double()
        if not (a.isfinite().all() and b.isfinite().all()):
            continue
        addend = None if gemm.addend is None else gemm.addend.expand(matrix.shape).double()
        done = correct_matrix(
            matrix.contiguous(),
            rows=_side(a, b, addend, matrix.dtype),
            columns=_side(b.mT, a.mT, None if addend is None else addend.mT, matrix.dtype, -2),
        )
        wrong = _differs(done.matrix, matrix)
        if bool(done.repaired) and wrong.any():
            detail = _difference(batch, matrix, done.matrix, wrong)
            apply = partial(matrix.copy_, done.matrix)
            yield Repair(EventKind.GEMM_FAULT, detail, apply, "checksums locate a wrong element")


def _side(
    a: torch.Tensor,
    b: torch.Tensor,
    addend: torch.Tensor | None,
    dtype: torch.dtype,
    dim: int = -1,
) -> Side:
    """Predict the checksums of the rows of ``addend + a b`` (fp64), and bound their rounding."""
    inner, columns = b.shape
    positions = encoding(columns, accumulate=torch.float64)
    sums, added = a @ positions.sums(b), torch.zeros(())
    if addend is not None:
        sums, added = sums + positions.sums(addend), addend.square().sum(-1)
    statistics = rounding.b_statistics(b)
    walk = rounding.walked(a, statistics[:-1])

    def threshold(c: torch.Tensor) -> torch.Tensor:
        energy = c.double().square().sum(dim)
        return rounding.threshold(
            walk, energy, statistics[-1:], columns, inner, dtype, ACCUMULATION[dtype], added
        )

    return Side(sums[:, 0], sums[:, 1:], threshold, positions)


def pattern(wrong: torch.Tensor) -> str:
    """Name how the wrong elements of a matrix lie: ``0D``, ``1R``, ``1C`` or ``2D``."""
    rows, columns = int(wrong.any(1).sum()), int(wrong.any(0).sum())
    if rows == 1:
        return "0D" if columns == 1 else "1R"
    return "1C" if columns == 1 else "2D"


def _differs(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left != right) & ~(left.isnan() & right.isnan())


def _difference(
    batch: int, before: torch.Tensor, after: torch.Tensor, wrong: torch.Tensor
) -> dict[str, object]:
    row, column = wrong.nonzero()[0].tolist()
    return {
        "method": "checksum",
        "pattern": pattern(wrong),
        "rows": int(wrong.any(1).sum()),
        "index": [batch, row, column],
        "corrupted": float(before[row, column]),
        "repaired": float(after[row, column]),
    }

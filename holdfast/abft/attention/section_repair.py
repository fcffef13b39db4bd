"""Correction of a section's product by the checksums of its rows and of its columns.

Source: ATTNChecker, sections 4.2 to 4.4.
"""

from collections.abc import Iterator
from functools import partial

import torch

from holdfast.abft.checksums.patterns import correct_matrix
from holdfast.abft.gemm.correction import predicted
from holdfast.abft.gemm.reference import as_batch
from holdfast.abft.policy import FaultContext, Repair, decide_each
from holdfast.events import EventKind
from holdfast.sites import Gemm, SiteTuple


def repair_by_checksums(
    site: SiteTuple, gemm: Gemm, output: torch.Tensor, suspects: torch.Tensor
) -> bool:
    """Correct the suspect matrices of a product in place; return whether any was corrected.

    Checksums of rows are predicted as ``A (B t)`` and those of columns as ``(tᵀ A) B``, with the
    plain and the position weights t of EEC-ABFT. This is done only now, as checking a product needs
    the plain checksums of its rows alone. ``suspects`` marks the rows that failed, bool [batch, M].

    Guarantees: one wrong element, one wrong row or one wrong column of a matrix, whether INF, NaN,
    near-INF, moderate or a mixture of these, becomes right to within the threshold of the direction
    that repairs it plus one rounding of its dtype. A matrix for which the two directions do not
    agree in the end is not changed.

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
        dtypes = matrix.dtype, torch.float64
        transposed = b.mT, a.mT, None if addend is None else addend.mT
        done = correct_matrix(
            matrix.contiguous(),
            rows=predicted(a, b, addend, *dtypes),
            columns=predicted(*transposed, *dtypes, dim=-2),
        )
        wrong = (done.matrix != matrix) & ~(done.matrix.isnan() & matrix.isnan())
        if bool(done.repaired) and wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            detail: dict[str, object] = {
                "method": "checksum",
                "pattern": _pattern(wrong),
                "rows": int(wrong.any(1).sum()),
                "index": [batch, row, column],
                "corrupted": float(matrix[row, column]),
                "repaired": float(done.matrix[row, column]),
            }
            apply = partial(matrix.copy_, done.matrix)
            yield Repair(EventKind.GEMM_FAULT, detail, apply, "checksums locate a wrong element")


def _pattern(wrong: torch.Tensor) -> str:
    """Name the pattern of a matrix's wrong elements: ``0D``, ``1R``, ``1C`` or ``2D``."""
    rows, columns = int(wrong.any(1).sum()), int(wrong.any(0).sum())
    if rows == 1:
        return "0D" if columns == 1 else "1R"
    return "1C" if columns == 1 else "2D"

"""Repair of matrices in which a fault spread over a row or a column, from the other direction.

A wrong element of A makes one row of C = A B and that row's checksums wrong (1R), and one of B a
column and its checksums (1C). Source: ATTNChecker, section 4.3 and figure 4.
"""

from typing import NamedTuple

import torch

from holdfast.abft.checksums.extreme import Bound, Correction, Status, correct_vectors
from holdfast.abft.checksums.positions import Encoding


class Side(NamedTuple):
    """The checksums of the rows of a matrix, or of its columns, as ``correct_vectors`` takes them.

    Attributes:
        checksum: Plain checksums of the V vectors, [.., V].
        weighted: Weighted checksums, [.., V, D].
        threshold: Bound on the rounding noise, [.., V], or a function from a matrix to it.
        encoding: Checksum vectors of the length of these vectors.
    """

    checksum: torch.Tensor
    weighted: torch.Tensor
    threshold: Bound
    encoding: Encoding


class MatrixCorrection(NamedTuple):
    """The result of ``correct_matrix``.

    Attributes:
        matrix: The matrix [.., M, N] after all repairs.
        rows, columns: Results of the passes over rows and over columns. Their checksums fit the
            repaired matrix, except in the remaining rows and columns.
        remaining_rows, remaining_columns: Rows and columns that still disagree with their
            checksums, bool [.., M] and [.., N]. Faults may remain where both cross, or anywhere
            in them if only one direction has any.
    """

    matrix: torch.Tensor
    rows: Correction
    columns: Correction
    remaining_rows: torch.Tensor
    remaining_columns: torch.Tensor

    @property
    def repaired(self) -> torch.Tensor:
        """Mark the matrices that agree with all of their checksums, bool [..]."""
        return ~(self.remaining_rows.any(-1) | self.remaining_columns.any(-1))


def correct_matrix(
    matrix: torch.Tensor,
    *,
    rows: Side,
    columns: Side,
    extreme: float | None = None,
) -> MatrixCorrection:
    """Repair up to one wrong element in each row, or in each column.

    Columns are corrected first, then rows. A column that a fault of B made wrong is left to the
    rows, either as its extreme values count as propagated or as it agrees with its equally wrong
    checksums. Checksums that the fault made wrong are computed again from the repaired matrix.

    Args:
        matrix: [.., M, N].
        rows: Checksums of its rows.
        columns: Checksums of its columns.
        extreme: Magnitude that counts as near-INF; by default ``near_inf`` of the matrix's dtype.

    Guarantees: those of ``correct_vectors`` in each direction. One wrong element (0D), row (1R) or
    column (1C) is repaired, and so are several faults if no row has two of them after the columns'
    repair; otherwise the remaining rows and columns are reported. Neither pass undoes a repair of
    the other; where they contradict each other, the row and the column are reported.

    Not covered: two wrong elements in one row of B, or in one column of A, make two columns, or two
    rows, wrong together with their checksums. All vectors that cross them are then reported as
    remaining, and nothing is repaired.

    Raises:
        ValueError: Shapes do not fit. TypeError: Dtypes do not.

    Source: ATTNChecker, section 4.3.
    """
    if matrix.dim() < 2:
        raise ValueError(
            f"a matrix has two dimensions, this tensor has shape {tuple(matrix.shape)}"
        )
    by_column = correct_vectors(matrix, *columns, -2, extreme=extreme)
    fixed_by_column = _repaired_elements(by_column, -2)
    wider_rows = _widen(rows, _carried(fixed_by_column, columns, by_column.matrix, -1))
    by_row = correct_vectors(by_column.matrix, *wider_rows, -1, extreme=extreme)
    # If both passes change the same element, the first repair is kept and the row is reported.
    disputed = fixed_by_column & _repaired_elements(by_row, -1)
    by_row = _withdraw(by_row, disputed.any(-1))
    repaired = torch.where(disputed, by_column.matrix, by_row.matrix)
    fixed_by_row = _repaired_elements(by_row, -1)
    wider_columns = _widen(columns, _carried(fixed_by_row, wider_rows, repaired, -2))
    bad_rows = _disagree(repaired, by_row, wider_rows, -1)
    bad_columns = _disagree(repaired, by_column, wider_columns, -2)
    stale_rows = _stale(bad_rows, fixed_by_column.any(-1), bad_columns)
    stale_columns = _stale(bad_columns, fixed_by_row.any(-2), bad_rows)
    return MatrixCorrection(
        repaired,
        _encode_again(by_row, repaired, rows, -1, stale_rows),
        _encode_again(by_column, repaired, columns, -2, stale_columns),
        bad_rows & ~stale_rows,
        bad_columns & ~stale_columns,
    )


def _repaired_elements(correction: Correction, dim: int) -> torch.Tensor:
    """Mark the elements that a pass replaced, bool [.., M, N]."""
    index = torch.arange(correction.matrix.shape[dim], device=correction.position.device)
    return (index == correction.position.unsqueeze(-1)).movedim(-1, dim)


def _carried(fixed: torch.Tensor, by: Side, matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Bound the error that repairs by the other direction may leave in each vector, [.., V]."""
    bound = _bound(by, matrix).unsqueeze(-3 - dim)
    return torch.where(fixed, bound, 0).sum(dim)


def _widen(side: Side, noise: torch.Tensor) -> Side:
    return side._replace(threshold=lambda matrix: _bound(side, matrix) + noise)


def _bound(side: Side, matrix: torch.Tensor) -> torch.Tensor:
    return side.threshold(matrix) if callable(side.threshold) else side.threshold


def _withdraw(correction: Correction, vectors: torch.Tensor) -> Correction:
    return correction._replace(
        status=torch.where(vectors, Status.UNLOCATABLE, correction.status).to(torch.int8),
        position=torch.where(vectors, -1, correction.position),
    )


def _disagree(matrix: torch.Tensor, done: Correction, side: Side, dim: int) -> torch.Tensor:
    """Mark the vectors whose checksums do not fit the repaired matrix, bool [.., V]."""
    plain, weighted = side.encoding.encode(matrix, dim)
    bound = _bound(side, matrix)
    # A repair moves the plain checksum's noise into the weighted checksums.
    weighted_bound = torch.where(done.corrected, side.encoding.code.spread * bound, bound)
    fits = ((done.checksum - plain).abs() <= bound) & bound.isfinite()
    return ~(fits & ((done.weighted - weighted).abs().amax(-1) <= weighted_bound))


def _stale(bad: torch.Tensor, repaired: torch.Tensor, others_bad: torch.Tensor) -> torch.Tensor:
    """Mark disagreeing vectors whose checksums are wrong and whose data are right, bool [.., V].

    This holds if all vectors of the other direction agree and repaired an element in each of the
    disagreeing ones. If they repaired nothing in one of these, they may have missed its fault.
    """
    blind = (bad & ~repaired).any(-1, keepdim=True)
    return bad & ~blind & ~others_bad.any(-1, keepdim=True)


def _encode_again(
    done: Correction, matrix: torch.Tensor, side: Side, dim: int, stale: torch.Tensor
) -> Correction:
    checksum, weighted = side.encoding.encode(matrix, dim)
    return done._replace(
        matrix=matrix,
        status=torch.where(stale, Status.CHECKSUM_FAULT, done.status).to(torch.int8),
        checksum=torch.where(stale, checksum.to(done.checksum.dtype), done.checksum),
        weighted=torch.where(stale.unsqueeze(-1), weighted.to(done.weighted.dtype), done.weighted),
    )

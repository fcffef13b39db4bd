"""Whole matrices: faults that spread over a row or a column, repaired from the other direction.

A wrong element of A spoils one row of C = A B and that row's checksums (1R), one of B a column and
its checksums (1C). Source: ATTNChecker, section 4.3 and figure 4.
"""

from typing import NamedTuple

import torch

from holdfast.abft.checksums.extreme import Bound, Correction, Status, correct_vectors
from holdfast.abft.checksums.positions import Encoding


class Side(NamedTuple):
    """The checksums of one direction: of the rows, or of the columns.

    Attributes:
        checksum: [.., V]; weighted: [.., V, D]; threshold: [.., V] or a function to it, as
            ``correct_vectors`` takes them.
        encoding: for the length of these vectors.
    """

    checksum: torch.Tensor
    weighted: torch.Tensor
    threshold: Bound
    encoding: Encoding


class MatrixCorrection(NamedTuple):
    """The record of ``correct_matrix``.

    Attributes:
        matrix: [.., M, N], repaired where one direction vouches for it.
        rows, columns: what each pass saw and did. The checksums in it fit the repaired matrix,
            except in the rows and columns that remain.
        remaining_rows: bool [.., M], remaining_columns: bool [.., N]: they disagree with their
            checksums still. Faults may remain where a remaining row meets a remaining column, or
            anywhere in them if only one direction has any.
    """

    matrix: torch.Tensor
    rows: Correction
    columns: Correction
    remaining_rows: torch.Tensor
    remaining_columns: torch.Tensor

    @property
    def repaired(self) -> torch.Tensor:
        """True, [..], where nothing remains."""
        return ~(self.remaining_rows.any(-1) | self.remaining_columns.any(-1))


def correct_matrix(
    matrix: torch.Tensor,
    *,
    rows: Side,
    columns: Side,
    extreme: float | None = None,
) -> MatrixCorrection:
    """Repair up to one wrong element a row, or one a column.

    Columns go first, then rows; extreme values of a spoiled column count as propagated, moderate
    ones agree with the equally spoiled column checksums, and the rows repair both. The checksums
    that the fault had spoiled are then encoded again from the repaired matrix.

    Args:
        matrix: [.., M, N].
        rows: Checksums of its rows.
        columns: Checksums of its columns.
        extreme: Magnitude that counts as near-INF; by default ``near_inf`` of the matrix's dtype.

    Guarantees: those of ``correct_vectors`` in each direction. One wrong element (0D), row (1R) or
    column (1C) is repaired without being told which, and several faults if no row has two left
    after the columns' repair; otherwise the remaining rows and columns are returned. Neither pass
    undoes the other: where they contradict, both are returned.

    Not covered: two wrong elements in one row of B, or in one column of A, spoil two columns, or
    two rows, together with their checksums: every vector across is named, nothing is repaired.

    Raises:
        ValueError: shapes that do not fit; TypeError: dtypes.

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
    # Two passes that want the same element different contradict: the first stands, to be named.
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
    """Mark the elements that this pass has replaced, bool [.., M, N]."""
    index = torch.arange(correction.matrix.shape[dim], device=correction.position.device)
    return (index == correction.position.unsqueeze(-1)).movedim(-1, dim)


def _carried(fixed: torch.Tensor, by: Side, matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum how far repairs from across may be off, each up to its own bound: [.., V]."""
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
    """Mark the checksums that do not fit the matrix as it is now, bool [.., V]."""
    plain, weighted = side.encoding.encode(matrix, dim)
    bound = _bound(side, matrix)
    # A repair has moved the plain checksum's noise into the weighted ones.
    weighted_bound = torch.where(done.corrected, side.encoding.code.spread * bound, bound)
    fits = ((done.checksum - plain).abs() <= bound) & bound.isfinite()
    return ~(fits & ((done.weighted - weighted).abs().amax(-1) <= weighted_bound))


def _stale(bad: torch.Tensor, repaired: torch.Tensor, others_bad: torch.Tensor) -> torch.Tensor:
    """Mark checksums that come from a spoiled operand, while the data are right: bool [.., V].

    So it is if all vectors across agree and have repaired something in every bad one: a bad vector
    that they left alone shows that they may be blind to its fault.
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

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
        rows, columns: what each pass saw and did, None without its checksums. The checksums in it
            fit the repaired matrix, except in the rows and columns that remain.
        remaining_rows: bool [.., M], remaining_columns: bool [.., N]: they disagree with their
            checksums still; None without them. Faults may remain where a remaining row meets a
            remaining column, or anywhere in them if only one direction has any.
    """

    matrix: torch.Tensor
    rows: Correction | None
    columns: Correction | None
    remaining_rows: torch.Tensor | None
    remaining_columns: torch.Tensor | None

    @property
    def repaired(self) -> torch.Tensor:
        """bool [..]: nothing remains."""
        masks = [mask for mask in (self.remaining_rows, self.remaining_columns) if mask is not None]
        return ~torch.stack([mask.any(-1) for mask in masks]).any(0)


def correct_matrix(
    matrix: torch.Tensor,
    *,
    rows: Side | None = None,
    columns: Side | None = None,
    extreme: float | None = None,
) -> MatrixCorrection:
    """Repair up to one wrong element a row, or one a column.

    One side is enough where the pattern is known: columns for 1R, rows for 1C. With both, columns
    go first, then rows; extreme values of a spoiled column stop at case 4, moderate ones agree
    with the equally spoiled column checksums, and the rows repair both. The checksums that the
    fault had spoiled are then encoded again from the repaired matrix.

    Args:
        matrix: [.., M, N]; rows: checksums of its rows; columns: of its columns.

    Guarantees: those of ``correct_vectors`` in each direction. With both: 0D, 1R and 1C are
    repaired without being told which, and several faults if no row has two left after the columns'
    repair; otherwise the rows and columns that remain are named. Neither pass undoes the other:
    where they contradict, both are named.

    Not covered: two wrong elements in one row of B, or in one column of A, spoil two columns, or
    two rows, together with their checksums: every vector across is named, nothing is repaired.

    Raises:
        ValueError: no checksums, or shapes that do not fit; TypeError: dtypes.

    Source: ATTNChecker, section 4.3.
    """
    if matrix.dim() < 2:
        raise ValueError(
            f"a matrix has two dimensions, this tensor has shape {tuple(matrix.shape)}"
        )
    if columns is None and rows is None:
        raise ValueError("correct_matrix needs checksums: give rows, columns or both")
    if columns is None or rows is None:
        return _one_direction(matrix, rows, columns, extreme)
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


def _one_direction(
    matrix: torch.Tensor, rows: Side | None, columns: Side | None, extreme: float | None
) -> MatrixCorrection:
    if rows is not None:
        by_row = correct_vectors(matrix, *rows, -1, extreme=extreme)
        return MatrixCorrection(by_row.matrix, by_row, None, by_row.uncorrectable, None)
    assert columns is not None
    by_column = correct_vectors(matrix, *columns, -2, extreme=extreme)
    return MatrixCorrection(by_column.matrix, None, by_column, None, by_column.uncorrectable)


def _repaired_elements(correction: Correction, dim: int) -> torch.Tensor:
    """bool [.., M, N]: the elements this pass has replaced."""
    index = torch.arange(correction.matrix.shape[dim], device=correction.position.device)
    return (index == correction.position.unsqueeze(-1)).movedim(-1, dim)


def _carried(fixed: torch.Tensor, by: Side, matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """[.., V] along ``dim``: how far repairs from across may be off, each up to its own bound."""
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
    """bool [.., V]: the checksums do not fit the matrix as it is now."""
    plain, weighted = side.encoding.encode(matrix, dim)
    bound = _bound(side, matrix)
    # A repair has moved the plain checksum's noise into the weighted ones.
    weighted_bound = torch.where(done.corrected, side.encoding.code.spread * bound, bound)
    fits = ((done.checksum - plain).abs() <= bound) & bound.isfinite()
    return ~(fits & ((done.weighted - weighted).abs().amax(-1) <= weighted_bound))


def _stale(bad: torch.Tensor, repaired: torch.Tensor, others_bad: torch.Tensor) -> torch.Tensor:
    """bool [.., V]: the data are right, the checksums come from a spoiled operand.

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

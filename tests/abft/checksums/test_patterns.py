"""Whole products: faults before and after the GEMM, one row, one column, and too many."""

import math

import pytest
import torch
from case_loops import for_each
from checksum_cases import DTYPES, KINDS, bound, value_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from no_host_sync import NoHostSync
from struck import same_bits

from holdfast.abft.checksums import (
    MatrixCorrection,
    Side,
    Status,
    correct_matrix,
    correct_vectors,
    encoding,
)

M, K, N = 26, 11, 19
PATTERNS = ["1R", "1C", "0D"]


class Case:
    """``C = A B`` in fp64, rounded to dtype, with checksums predicted from encoded operands."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(M)
        self.dtype = dtype
        self.a = torch.randn(M, K, generator=generator, dtype=torch.float64)
        self.b = torch.randn(K, N, generator=generator, dtype=torch.float64)
        # Every element passes enough of a moderate fault on for its size to be certain.
        self.a += 0.5 * self.a.sign()
        self.b += 0.5 * self.b.sign()
        self.of_rows = encoding(N)
        self.of_columns = encoding(M)
        self.truth = self.a @ self.b
        self.encoded_a, self.encoded_b = (
            self.of_columns.table @ self.a,
            self.b @ self.of_rows.table.T,
        )
        self.clean = self.truth.to(dtype, copy=True)

    def multiply(
        self, a: torch.Tensor | None = None, b: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Side, Side]:
        """The product and its checksums, from operands damaged after their encoding."""
        a, b = self.a if a is None else a, self.b if b is None else b
        by_rows, by_columns = a @ self.encoded_b, self.encoded_a @ b
        rows = Side(by_rows[:, 0], by_rows[:, 1:], bound(self.dtype, -1), self.of_rows)
        columns = Side(by_columns[0], by_columns[1:].T, bound(self.dtype, -2), self.of_columns)
        return (a @ b).to(self.dtype), rows, columns

    def spoil(self, pattern: str, kind: str) -> tuple[torch.Tensor, Side, Side]:
        """A product with one wrong element in A (1R), in B (1C), or in C (0D)."""
        a, b = self.a.clone(), self.b.clone()
        wrong = value_of(kind, self.dtype) * (10 if "moderate" in kind else 1)
        if pattern == "1R":
            a[7, 3] = wrong
        if pattern == "1C":
            b[3, 5] = wrong
        product, rows, columns = self.multiply(a, b)
        if pattern == "0D":
            product[7, 5] = value_of(kind, self.dtype)
        return product, rows, columns

    def within(self, matrix: torch.Tensor) -> bool:
        """Every element within the larger of its two checksums' rounding."""
        row, column = (bound(self.dtype, d)(self.clean) for d in (-1, -2))
        noise = row[:, None] + column + torch.finfo(self.dtype).eps * self.truth.abs()
        return bool(((matrix.double() - self.truth).abs() <= noise).all())


def fits(case: Case, result: MatrixCorrection, dim: int) -> bool:
    """The checksums in the record are those of the repaired matrix."""
    record = result.rows if dim == -1 else result.columns
    code = case.of_rows if dim == -1 else case.of_columns
    plain, weighted = code.encode(result.matrix, dim)
    limit = (
        4 * bound(case.dtype, dim)(case.clean) + 4 * bound(case.dtype, -3 - dim)(case.clean).max()
    )
    difference = torch.cat([(record.checksum - plain)[:, None], record.weighted - weighted], -1)
    return bool((difference.abs() <= math.sqrt(M) * limit[:, None]).all())


@for_each("dtype", DTYPES)
def test_a_clean_product_is_left_alone(dtype: torch.dtype) -> None:
    case = Case(dtype)
    product, rows, columns = case.multiply()
    result = correct_matrix(product, rows=rows, columns=columns)
    assert same_bits(result.matrix, case.clean)
    assert int(result.rows.status.ne(Status.CLEAN).sum()) == 0
    assert int(result.columns.status.ne(Status.CLEAN).sum()) == 0
    assert bool(result.repaired)


@for_each("kind", KINDS)
@for_each("dtype", DTYPES)
@for_each("pattern", PATTERNS)
def test_a_pattern_is_repaired_without_being_told_which(
    pattern: str, dtype: torch.dtype, kind: str
) -> None:
    case = Case(dtype)
    product, rows, columns = case.spoil(pattern, kind)
    assert not case.within(product)
    result = correct_matrix(product, rows=rows, columns=columns)
    assert bool(result.repaired)
    assert case.within(result.matrix)
    assert fits(case, result, -1)
    assert fits(case, result, -2)
    again = correct_matrix(
        result.matrix,
        rows=rows._replace(checksum=result.rows.checksum, weighted=result.rows.weighted),
        columns=columns._replace(
            checksum=result.columns.checksum, weighted=result.columns.weighted
        ),
    )
    assert bool(again.repaired)


@for_each("kind", KINDS)
@for_each("dtype", DTYPES)
@for_each("pattern", PATTERNS)
def test_a_known_pattern_needs_one_side_only(pattern: str, dtype: torch.dtype, kind: str) -> None:
    case = Case(dtype)
    product, rows, columns = case.spoil(pattern, kind)
    side, dim = (rows, -1) if pattern == "1C" else (columns, -2)
    result = correct_vectors(product, *side, dim)
    assert not result.uncorrectable.any()
    assert case.within(result.matrix)


@for_each("kind", ["inf", "nan", "near"])
def test_the_wrong_side_alone_reports_the_propagation(kind: str) -> None:
    case = Case(torch.float32)
    product, rows, columns = case.spoil("1R", kind)
    result = correct_vectors(product, *rows)
    assert result.uncorrectable.nonzero().tolist() == [[7]]
    assert same_bits(result.matrix, product)
    product, rows, columns = case.spoil("1C", kind)
    assert correct_vectors(product, *columns, -2).status[5] == Status.PROPAGATED


@for_each("shape", [(4, 60), (60, 4), (30, 30)])
@for_each(
    "hit",
    [(2, slice(None)), (slice(None), 2), ([0, 1, 1], [0, 0, 1])],
)
def test_repairs_agree_across_even_where_the_threshold_leaves_no_room(
    shape: tuple[int, int], hit: tuple[object, object]
) -> None:
    truth = torch.randn(
        300, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    stored = truth.bfloat16()
    sides = []
    for dim in (-1, -2):
        code = encoding(shape[dim])
        plain, weighted = code.encode(truth, dim)
        own = code.encode(stored, dim)
        noise = torch.maximum((plain - own[0]).abs(), (weighted - own[1]).abs().amax(-1))
        rounding = torch.finfo(torch.bfloat16).eps * truth.abs().amax(dim)
        sides.append(Side(plain, weighted, noise + rounding, code))
    damaged = stored.clone()
    damaged[:, hit[0], hit[1]] = 1e5
    result = correct_matrix(damaged, rows=sides[0], columns=sides[1])
    assert int(result.repaired.sum()) == 300
    for record in (result.rows, result.columns):
        assert not record.status.eq(Status.CHECKSUM_FAULT).any(), "noise was taken for damage"


RECTANGLE = {(4, 3): "inf", (4, 11): "moderate", (20, 3): "inf", (20, 11): "moderate"}


@settings(deadline=None, max_examples=150)
@example(cells=RECTANGLE, dtype=torch.bfloat16)
@given(
    cells=st.dictionaries(
        st.tuples(st.integers(0, M - 1), st.integers(0, N - 1)),
        st.sampled_from(KINDS),
        min_size=1,
        max_size=12,
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_what_is_called_repaired_is_right_and_what_remains_is_named(
    cells: dict[tuple[int, int], str], dtype: torch.dtype
) -> None:
    case = Case(dtype)
    product, rows, columns = case.multiply()
    for (row, column), kind in cells.items():
        product[row, column] = value_of(kind, dtype)
    result = correct_matrix(product, rows=rows, columns=columns)
    alone = [c for c in cells if sum(c[1] == other[1] for other in cells) == 1]
    left = [c for c in cells if c not in alone]
    stuck = [c for c in left if sum(c[0] == other[0] for other in left) > 1]
    named = result.remaining_rows[:, None] & result.remaining_columns
    assert bool(result.repaired) == (not stuck)
    remaining = torch.zeros(M, N, dtype=torch.bool)
    for row, column in stuck:
        remaining[row, column] = True
        assert named[row, column]
    assert same_bits(result.matrix[remaining], product[remaining])
    assert case.within(torch.where(remaining, case.clean, result.matrix))


def test_a_fault_that_no_column_can_see_twice_over_is_named_not_accepted() -> None:
    case = Case(torch.float32)
    b = case.b.clone()
    b[3, 5], b[3, 6] = 100.0, 90.0
    product, rows, columns = case.multiply(b=b)
    result = correct_matrix(product, rows=rows, columns=columns)
    assert result.remaining_rows.all()
    assert not bool(result.repaired)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        correct_matrix(torch.ones(3), rows=rows, columns=columns)


@for_each("entry", [0, 1, 3])
def test_a_damaged_checksum_on_either_side_is_encoded_again(entry: int) -> None:
    case = Case(torch.float32)
    product, rows, columns = case.multiply()
    for side in (rows, columns):
        (side.checksum if entry == 0 else side.weighted[:, entry - 1])[2] = 1e6
    result = correct_matrix(product, rows=rows, columns=columns)
    assert same_bits(result.matrix, product)
    assert bool(result.repaired)
    assert result.rows.status[2] == result.columns.status[2] == Status.CHECKSUM_FAULT
    assert fits(case, result, -1)
    assert fits(case, result, -2)


def test_two_passes_that_contradict_each_other_are_named() -> None:
    case = Case(torch.float64)
    product, rows, columns = case.multiply()
    product[4, 4] = 50.0
    # The row's checksums, all of them, vouch for another value of the same element.
    another = case.truth[4].clone()
    another[4] = -20.0
    rows.checksum[4], rows.weighted[4] = rows.encoding.encode(another)
    columns.checksum[9] += 3.0
    columns.weighted[9, 0] += 3.0
    result = correct_matrix(product, rows=rows, columns=columns)
    assert result.remaining_rows.nonzero().tolist() == [[4]]
    assert result.remaining_columns.nonzero().tolist() == [[9]]
    assert result.rows.status[4] == Status.UNLOCATABLE
    assert float(result.matrix[4, 4]) == pytest.approx(float(case.truth[4, 4]))


def test_matrices_of_a_batch_are_judged_one_by_one() -> None:
    case = Case(torch.float32)
    items = [case.spoil(*what) for what in (("1R", "nan"), ("1C", "inf"), ("0D", "moderate"))]
    items.append(case.multiply())
    items[-1][0][:2, :2] = math.nan
    product = torch.stack([item[0] for item in items])
    rows, columns = (
        Side(
            torch.stack([item[s].checksum for item in items]),
            torch.stack([item[s].weighted for item in items]),
            *items[0][s][2:],
        )
        for s in (1, 2)
    )
    together = correct_matrix(product, rows=rows, columns=columns)
    assert together.repaired.tolist() == [True, True, True, False]
    for index, (matrix, row_side, column_side) in enumerate(items):
        alone = correct_matrix(matrix, rows=row_side, columns=column_side)
        assert same_bits(alone.matrix, together.matrix[index])
        assert torch.equal(alone.remaining_rows, together.remaining_rows[index])


@for_each("pattern", PATTERNS)
def test_the_host_never_waits_and_the_graph_never_breaks(pattern: str) -> None:
    case = Case(torch.float32)
    product, rows, columns = case.spoil(pattern, "inf")

    def run(matrix: torch.Tensor, *sums: torch.Tensor) -> MatrixCorrection:
        return correct_matrix(
            matrix,
            rows=rows._replace(checksum=sums[0], weighted=sums[1]),
            columns=columns._replace(checksum=sums[2], weighted=sums[3]),
        )

    arguments = (product, *rows[:2], *columns[:2])
    with NoHostSync():
        eager = run(*arguments)
    compiled = torch.compile(run, fullgraph=True, backend="eager")(*arguments)
    assert case.within(compiled.matrix)
    flat = [torch.utils._pytree.tree_leaves(result) for result in (eager, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))

"""Rows whose partial sums drift far up and back, with little to show for it in the end.

Rounding takes them over what is allowed to products of independent sign. They are silent all the
same, and faults above their threshold are found in any row, column and number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from case_loops import for_each
from gemm_cases import armed
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.passes import encode, verify
from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.digest.tensors import tensor_digest
from holdfast.sites import Gemm

M, K, N = 16, 2048, 128
DTYPES = [torch.float32, torch.float64]
Operands = tuple[torch.Tensor, torch.Tensor]


def drifting(dtype: torch.dtype, lead: tuple[int, ...] = ()) -> Operands:
    """A in runs of opposite sign; rows of B that have most in common, but no mean."""
    g, wide = torch.Generator().manual_seed(5), torch.float64
    common = torch.randn(*lead, 1, N, generator=g, dtype=wide).sign()
    common = common * (1 + torch.rand(N, generator=g, dtype=wide) / 3)
    b = 0.1 * torch.randn(*lead, K, N, generator=g, dtype=wide) + common
    b -= common.mean(-1, keepdim=True)
    runs = torch.tensor([1.0, -1.0, 1.0, -1.0]).repeat_interleave(K // 4)
    a = (1 + torch.rand(*lead, M, K, generator=g, dtype=wide)) * runs
    return a.to(dtype), b.to(dtype)


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """The same values, columns contiguous."""
    return matrix.mT.contiguous().mT


def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product alone."""
    return a @ b


def gradient_of_queries(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """dQ = dS K, of attention scores S = Q Kᵀ."""
    generator = torch.Generator().manual_seed(6)
    queries = torch.randn(*scores.shape[:-1], keys.shape[-1], generator=generator)
    queries = queries.to(keys.dtype).requires_grad_()
    (gradient,) = torch.autograd.grad(queries @ keys.mT, queries, scores)
    return gradient


@dataclass(frozen=True)
class Case:
    """A product of drifting operands, and the role of the site that computes it."""

    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    role: str
    lead: tuple[int, ...] = ()
    left: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    right: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous

    def operands(self, dtype: torch.dtype) -> Operands:
        """A and B in this case's layout."""
        a, b = drifting(dtype, self.lead)
        return self.left(a), self.right(b)


CASES = {
    "mm": Case(forward, "forward"),
    "bmm, B transposed": Case(forward, "forward", (2,), right=transposed),
    "bmm backward": Case(gradient_of_queries, "grad_a", (2,)),
    "mm, A transposed": Case(forward, "forward", left=transposed),
    "mm, B transposed": Case(forward, "forward", right=transposed),
    "bmm": Case(forward, "forward", (2,)),
    "mm backward": Case(gradient_of_queries, "grad_a"),
}
all_cases = for_each("case", CASES.values(), first=3)
all_dtypes = for_each("dtype", DTYPES)


@dataclass
class Strike:
    """Adds to elements of one product's row."""

    role: str
    row: tuple[int, ...]
    columns: list[int]
    added: torch.Tensor
    done: int = 0

    def __call__(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        """See ``sites.arm``."""
        if stage != "output" or output is None or not site.endswith(self.role):
            return
        output[self.row][self.columns] += self.added.to(output.dtype)
        self.done += 1


@dataclass(frozen=True)
class Healthy:
    """A product without faults, and what its own rounding does to its checksums."""

    case: Case
    operands: Operands
    digest: str
    residual: torch.Tensor  # [batch, M]
    threshold: torch.Tensor  # as the registry has it, drift included

    @property
    def least(self) -> torch.Tensor:
        """Twice the threshold, or what takes a row out of it whichever way its rounding points."""
        return self.threshold + torch.maximum(self.threshold, self.residual.abs())

    def row(self, batch: int, row: int) -> tuple[int, ...]:
        """The index of a row in the output."""
        return (batch, row) if self.case.lead else (row,)

    def struck(self, strike: Strike, *, verify: bool = True) -> tuple[str, list[events.Event]]:
        """The digest of the product with a fault, and the events."""
        events.clear()
        strike.done = 0
        with holdfast.protect(nn.Identity(), verify=verify), armed(strike):
            digest = tensor_digest(self.case.run(*self.operands))
        return digest, events.recent()


@cache
def healthy(case: Case, dtype: torch.dtype) -> Healthy:
    """The product of a case, without holdfast."""
    a, b = case.operands(dtype)
    output = case.run(a, b)
    residual, independent, _ = verify(output, a, *encode(b))
    assert (residual.abs() > independent).any(), "rounding takes no row over the threshold"
    threshold = REGISTRY["rounding"](Product(a, b, output, dtype)).reshape(residual.shape)
    return Healthy(case, (a, b), tensor_digest(output), residual, threshold)


def strikes(known: Healthy, sizes: list[float], count: int = 1) -> list[Strike]:
    """Faults of ``count`` elements in every row of the first and last matrix.

    Each element is off by its share of the size, in multiples of ``least``; all push the row's
    signed sum the same way.
    """
    generator = torch.Generator().manual_seed(count)
    found = []
    batches, rows = known.residual.shape
    for batch in sorted({0, batches - 1}):
        for row in range(rows):
            size = sizes[len(found) % len(sizes)]
            columns = torch.randperm(N, generator=generator)[:count]
            way = 1 - 2 * (len(found) % 2)
            share = size * float(known.least[batch, row]) / count
            added = way * share * signs(N)[columns]
            index = known.row(batch, row)
            found.append(Strike(known.case.role, index, columns.tolist(), added))
    return found


@all_dtypes
@all_cases
def test_clean_products_are_silent_and_no_row_is_even_suspect(
    case: Case, dtype: torch.dtype
) -> None:
    known = healthy(case, dtype)
    with holdfast.protect(nn.Identity()) as protection:
        assert tensor_digest(case.run(*known.operands)) == known.digest
        report = protection.report()
    assert events.recent() == []
    assert sum(site.rows for site in report.sites) >= M
    assert [site.site for site in report.sites if site.suspects] == []
    assert report.false_alarms == 0


SIZES = [1.01, 1.2, 1.5, 2.0, 3.0, 10.0, 1e2, 1e4, 1e7]


def assert_repaired(known: Healthy, strike: Strike) -> None:
    """The fault reaches the result unless it is verified; then it is found and undone."""
    assert known.struck(strike, verify=False)[0] != known.digest
    digest, found = known.struck(strike)
    assert digest == known.digest, (strike.row, strike.columns)
    assert [event.kind for event in found] == ["gemm_fault"]
    assert found[0].op.endswith(f"/{strike.role}")


@all_dtypes
@all_cases
def test_a_wrong_element_is_found_in_any_row(case: Case, dtype: torch.dtype) -> None:
    known = healthy(case, dtype)
    for strike in strikes(known, SIZES):
        assert_repaired(known, strike)


@all_dtypes
@all_cases
def test_twice_the_threshold_is_enough_beside_rounding(case: Case, dtype: torch.dtype) -> None:
    known = healthy(case, dtype)
    for row in range(M):
        way = -1 if known.residual[0, row] < 0 else 1
        added = way * 2 * known.threshold[:1, row] * signs(N)[row]
        strike = Strike(case.role, known.row(0, row), [row], added)
        assert_repaired(known, strike)


@all_dtypes
@for_each("count", [2, 3, 5, 8])
@for_each("name", ["mm", "bmm backward"])
def test_several_wrong_elements_of_a_row_are_found(
    name: str, count: int, dtype: torch.dtype
) -> None:
    known = healthy(CASES[name], dtype)
    for strike in strikes(known, [2.0 * count, 10.0 * count, 1e4], count):
        assert_repaired(known, strike)


@all_dtypes
@for_each("way", [1, -1])
def test_a_wrong_element_is_found_in_every_column(way: int, dtype: torch.dtype) -> None:
    known = healthy(CASES["mm"], dtype)
    row = int((known.residual.abs() / known.threshold)[0].argmax())
    for column in range(N):
        added = torch.tensor([way * 1.5 * float(known.least[0, row])])
        assert_repaired(known, Strike("forward", (row,), [column], added))


@all_dtypes
@for_each("columns", [N // 4, N // 2, N // 2 + 1, N])
def test_a_fault_spread_over_a_row_is_found(columns: int, dtype: torch.dtype) -> None:
    """It looks like what drifting partial sums do to every element, but moves the sum by more."""
    known = healthy(CASES["mm"], dtype)
    for row in range(M):
        added = 1.1 * known.least[0, row] / columns * signs(N)[:columns]
        assert_repaired(known, Strike("forward", (row,), list(range(columns)), added))


@all_dtypes
@for_each("columns", [1, 5, 32, 63, 64, N])
def test_rows_of_any_length_are_silent(columns: int, dtype: torch.dtype) -> None:
    a, b = drifting(dtype)
    b = b[:, :columns] - b[:, :columns].mean(-1, keepdim=True) / 2
    assert_silent(a, b)


@all_dtypes
def test_columns_of_unlike_size_are_silent(dtype: torch.dtype) -> None:
    a, b = drifting(dtype)
    assert_silent(a, b * torch.logspace(-2, 2, N, dtype=dtype))


@all_dtypes
@for_each("groups", [2, 4, 16])
def test_groups_of_rows_alike_in_their_own_ways_are_silent(groups: int, dtype: torch.dtype) -> None:
    """No mean of all rows of B tells of it: a row may be left to the second opinion."""
    a, b = drifting(dtype)
    own = torch.randn(groups, N, generator=torch.Generator().manual_seed(7)).to(dtype)
    b = 0.1 * b + own.repeat_interleave(K // groups, 0)
    a = a.abs() * (1 - 2 * (torch.arange(K) * 2 * groups // K % 2)).to(dtype)
    assert_silent(a, b)


def assert_silent(a: torch.Tensor, b: torch.Tensor) -> None:
    """No event, and the bits of torch."""
    expected = tensor_digest(a @ b)
    with holdfast.protect(nn.Identity()) as protection:
        assert tensor_digest(a @ b) == expected
        assert sum(site.rows for site in protection.report().sites) == M
    assert events.recent() == []

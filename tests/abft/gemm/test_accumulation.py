"""Rows whose partial sums drift far up and back, with little to show for it in the end.

Rounding takes them over what is allowed to products of independent sign. They are silent all the
same, and faults above their threshold are found in any row, column and number.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import cycle

import torch
from case_loops import for_each
from struck import Strike, armed
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.cpu import encode, verify
from holdfast.abft.thresholds import REGISTRY, Product
from holdfast.digest.tensors import tensor_digest

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
    return matrix.mT.contiguous().mT


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

    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
    role: str = "forward"
    lead: tuple[int, ...] = ()
    left: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    right: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous

    def operands(self, dtype: torch.dtype) -> Operands:
        a, b = drifting(dtype, self.lead)
        return self.left(a), self.right(b)


CASES = {
    "mm": Case(),
    "bmm, B transposed": Case(lead=(2,), right=transposed),
    "bmm backward": Case(gradient_of_queries, "grad_a", (2,)),
    "mm, A transposed": Case(left=transposed),
    "mm, B transposed": Case(right=transposed),
    "bmm": Case(lead=(2,)),
    "mm backward": Case(gradient_of_queries, "grad_a"),
}
all_cases = for_each("case", CASES.values(), first=3)
all_dtypes = for_each("dtype", DTYPES)


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

    def strike(self, batch: int, row: int, columns: list[int], size: torch.Tensor) -> Strike:
        """Change elements of a row, all so that its signed sum moves by the same size each."""
        added = size.cpu() * signs(N)[columns]
        place = (batch, row, columns) if self.case.lead else (row, columns)
        return Strike(place, lambda old: old + added.to(old.dtype), site=self.case.role)

    def struck(self, strike: Strike, *, verify: bool = True) -> str:
        """The digest of the product with a fault."""
        strike.seen.clear()
        with holdfast.protect(nn.Identity(), verify=verify), armed(strike):
            return tensor_digest(self.case.run(*self.operands))


@cache
def healthy(case: Case, dtype: torch.dtype) -> Healthy:
    """The product of a case, without holdfast."""
    a, b = case.operands(dtype)
    output = case.run(a, b)
    residual, independent, _ = verify(output, a, *encode(b))
    assert (residual.abs() > independent).any(), "rounding takes no row over the threshold"
    threshold = REGISTRY["rounding"](Product(a, b, output, dtype)).reshape(residual.shape)
    return Healthy(case, (a, b), tensor_digest(output), residual, threshold)


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


def of_any_size(known: Healthy, count: int = 1) -> Iterator[Strike]:
    """Faults of ``count`` elements in every row of the first and last matrix, in turn up and down.

    Each row's sum moves by the next of these sizes, in multiples of ``least``.
    """
    sizes = [1.01, 1.2, 1.5, 2.0, 3.0, 10.0, 1e2, 1e4, 1e7]
    sizes = sizes if count == 1 else [2.0 * count, 10.0 * count, 1e4]
    generator, ways = torch.Generator().manual_seed(count), cycle([1, -1])
    batches, rows = known.residual.shape
    places = [(batch, row) for batch in sorted({0, batches - 1}) for row in range(rows)]
    for place, size, way in zip(places, cycle(sizes), ways, strict=False):
        columns = torch.randperm(N, generator=generator)[:count].tolist()
        yield known.strike(*place, columns, way * size * known.least[place] / count)


def beside_rounding(known: Healthy) -> Iterator[Strike]:
    """Twice the threshold, in the direction in which rounding has moved the row's sum."""
    for row in range(M):
        way = -1 if known.residual[0, row] < 0 else 1
        yield known.strike(0, row, [row], way * 2 * known.threshold[0, row])


def in_every_column(known: Healthy) -> Iterator[Strike]:
    row = int((known.residual.abs() / known.threshold)[0].argmax())
    for column, way in zip(range(N), cycle([1, -1, -1, 1]), strict=False):
        yield known.strike(0, row, [column], way * 1.5 * known.least[0, row])


def spread_over_a_row(known: Healthy) -> Iterator[Strike]:
    """What drifting partial sums do to every element too, but the sum moves by more."""
    for columns in (N // 4, N // 2, N // 2 + 1, N):
        for row in range(M):
            yield known.strike(0, row, list(range(columns)), 1.1 * known.least[0, row] / columns)


def assert_repaired(known: Healthy, strikes: Iterator[Strike]) -> None:
    """The faults reach the result unless it is verified; then they are found and undone."""
    for strike in strikes:
        assert known.struck(strike, verify=False) != known.digest
        events.clear()
        assert known.struck(strike) == known.digest, strike.index
        assert [event.kind for event in events.recent()] == ["gemm_fault"]
        assert events.recent()[0].op.endswith(f"/{known.case.role}")


@all_dtypes
@all_cases
def test_a_wrong_element_is_found_in_any_row(case: Case, dtype: torch.dtype) -> None:
    assert_repaired(healthy(case, dtype), of_any_size(healthy(case, dtype)))
    assert_repaired(healthy(case, dtype), beside_rounding(healthy(case, dtype)))


@all_dtypes
@for_each("name", ["mm", "bmm backward"])
def test_several_wrong_elements_of_a_row_are_found(name: str, dtype: torch.dtype) -> None:
    known = healthy(CASES[name], dtype)
    for count in (2, 3, 5, 8):
        assert_repaired(known, of_any_size(known, count))


@all_dtypes
@for_each("strikes", [in_every_column, spread_over_a_row])
def test_a_fault_is_found_in_every_column_and_spread_over_a_row(
    strikes: Callable[[Healthy], Iterator[Strike]], dtype: torch.dtype
) -> None:
    known = healthy(CASES["mm"], dtype)
    assert_repaired(known, strikes(known))


def of_groups(groups: int) -> Callable[[torch.Tensor, torch.Tensor], Operands]:
    """Rows of B alike in groups: no mean of all tells of it, a row may need the second opinion."""

    def change(a: torch.Tensor, b: torch.Tensor) -> Operands:
        own = torch.randn(groups, N, generator=torch.Generator().manual_seed(7)).to(b.dtype)
        ways = (1 - 2 * (torch.arange(K) * 2 * groups // K % 2)).to(a.dtype)
        return a.abs() * ways, 0.1 * b + own.repeat_interleave(K // groups, 0)

    return change


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], Operands]] = {
    **{
        f"{n} columns": lambda a, b, n=n: (a, b[:, :n] - b[:, :n].mean(-1, keepdim=True) / 2)
        for n in (1, 5, 32, 63, 64, N)
    },
    "columns of unlike size": lambda a, b: (a, b * torch.logspace(-2, 2, N, dtype=b.dtype)),
    **{f"{groups} groups of rows": of_groups(groups) for groups in (2, 4, 16)},
}


@all_dtypes
@for_each("name", CHANGES)
def test_other_drifting_products_are_silent(name: str, dtype: torch.dtype) -> None:
    a, b = CHANGES[name](*drifting(dtype))
    expected = tensor_digest(a @ b)
    with holdfast.protect(nn.Identity()) as protection:
        assert tensor_digest(a @ b) == expected
        assert sum(site.rows for site in protection.report().sites) == M
    assert events.recent() == []

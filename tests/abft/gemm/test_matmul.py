"""holdfast.matmul is torch.matmul, verified to the second derivative."""

import pytest
import torch
from case_loops import for_each
from gemm_cases import DTYPES
from struck import kinds, struck

import holdfast
from holdfast import events
from holdfast.digest.tensors import tensor_digest

SHAPES = [
    ((2, 3), (3, 4)),
    ((1, 1), (1, 1)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((6, 5, 2, 3), (6, 5, 3, 4)),
    ((1, 5, 2, 3), (6, 1, 3, 4)),
]
VECTORS = [((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((5, 2, 3), (3,)), ((3,), (5, 3, 4))]


def operands(
    shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, *, grad: bool = False
) -> list[torch.Tensor]:
    """Random operands, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


@for_each("dtype", DTYPES)
@for_each("shapes", SHAPES)
def test_it_has_torchs_bits(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    a, b = operands(shapes, dtype)
    assert tensor_digest(holdfast.matmul(a, b)) == tensor_digest(torch.matmul(a, b))
    assert holdfast.matmul(a, b).shape == torch.matmul(a, b).shape
    assert events.recent() == []


@for_each("shapes", VECTORS)
def test_vectors_are_matrices_of_one_row_or_column(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = operands(shapes, torch.float64)
    result = holdfast.matmul(a, b)
    torch.testing.assert_close(result, torch.matmul(a, b), rtol=1e-14, atol=1e-14)


@for_each("shapes", SHAPES + VECTORS, first=3)
def test_first_and_second_derivatives_are_right(shapes: tuple[tuple[int, ...], ...]) -> None:
    inputs = operands(shapes, torch.float64, grad=True)
    assert torch.autograd.gradcheck(holdfast.matmul, inputs)
    assert torch.autograd.gradgradcheck(holdfast.matmul, inputs)
    assert events.recent() == []


def test_only_the_wanted_gradient_is_computed() -> None:
    a, b = operands(((2, 3), (3, 4)), torch.float32)
    holdfast.matmul(a, b.requires_grad_()).sum().backward()
    assert a.grad is None
    assert b.grad is not None


@for_each("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"matmul: b is {dtype}; verified are .*use torch.matmul"):
        holdfast.matmul(torch.ones(2, 2), torch.ones(2, 2).to(dtype))


@for_each("visit", [0, 1, 2])
@for_each("shapes", SHAPES)
def test_a_fault_in_any_of_its_three_products_is_repaired(
    shapes: tuple[tuple[int, ...], ...], visit: int
) -> None:
    def run() -> list[torch.Tensor]:
        a, b = operands(shapes, torch.float32, grad=True)
        c = holdfast.matmul(a, b)
        return [c.detach(), *torch.autograd.grad(c, (a, b), torch.ones_like(c))]

    clean = run()
    with struck((-1,) * 3, 3e12, nth=visit) as strike:
        repaired = run()
    assert len(strike.seen) == 3
    assert [tensor_digest(t) for t in repaired] == [tensor_digest(t) for t in clean]
    assert kinds() == ["gemm_fault"]
    assert events.recent()[0].op == strike.seen[visit]


def test_nothing_else_is_verified_by_it() -> None:
    a = torch.ones(2, 2)
    with struck((0, 0), 1e9, always=True):
        assert torch.mm(a, a)[0, 0] == 1e9
        assert torch.equal(holdfast.matmul(a, a), torch.full((2, 2), 2.0))

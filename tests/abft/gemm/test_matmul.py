"""holdfast.matmul is torch.matmul, verified to the second derivative, wherever it may stand."""

from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from gemm_strikes import strike
from programs_shapes import BATCH_LAYOUTS, BROADCASTS, seeded
from struck import DTYPES, armed, struck
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import events
from holdfast.digest.tensors import tensor_digest, tensors_digest

Shape = tuple[int, ...]
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
    shapes: tuple[Shape, ...], dtype: torch.dtype, *, grad: bool = False
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


@for_each("dtype", DTYPES)
@for_each("shapes", SHAPES)
def test_it_has_torchs_bits(shapes: tuple[Shape, ...], dtype: torch.dtype) -> None:
    a, b = operands(shapes, dtype)
    assert tensor_digest(holdfast.matmul(a, b)) == tensor_digest(torch.matmul(a, b))
    assert holdfast.matmul(a, b).shape == torch.matmul(a, b).shape
    assert events.recent() == []


@for_each("shapes", VECTORS)
def test_vectors_are_matrices_of_one_row_or_column(shapes: tuple[Shape, ...]) -> None:
    a, b = operands(shapes, torch.float64)
    result = holdfast.matmul(a, b)
    torch.testing.assert_close(result, torch.matmul(a, b), rtol=1e-14, atol=1e-14)


@for_each("shapes", SHAPES + VECTORS, first=3)
def test_first_and_second_derivatives_are_right(shapes: tuple[Shape, ...]) -> None:
    inputs = operands(shapes, torch.float64, grad=True)
    assert torch.autograd.gradcheck(holdfast.matmul, inputs)
    assert torch.autograd.gradgradcheck(holdfast.matmul, inputs)
    assert events.recent() == []


@for_each("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"matmul: b is {dtype}; verified are .*use torch.matmul"):
        holdfast.matmul(torch.ones(2, 2), torch.ones(2, 2).to(dtype))


Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Use = Callable[[Matmul], list[torch.Tensor]]


def pair(*shapes: Shape) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


FOLDED = [((5, 2, 4, 3), (3, 6)), ((2, 1, 3), (3, 6)), ((4, 3), (3, 6)), ((2, 4, 3), (2, 3, 6))]


def forward_of(left: Shape, right: Shape) -> Use:
    return lambda matmul: [matmul(torch.randn(left), torch.randn(right))]


def gradients_of(left: Shape, right: Shape) -> Use:
    def use(matmul: Matmul) -> list[torch.Tensor]:
        a, b = pair(left, right)
        return seeded(matmul(a, b), a, b)

    return use


def laid_out(name: str) -> Use:
    def use(matmul: Matmul) -> list[torch.Tensor]:
        (a_leaf, a), (b_leaf, b) = (BATCH_LAYOUTS[name](s) for s in ((2, 3, 6), (2, 6, 5)))
        return seeded(matmul(a, b), a_leaf, b_leaf)

    return use


def cast(matmul: Matmul) -> list[torch.Tensor]:
    """Under autocast, differentiated outside."""
    a, b = pair((3, 6), (6, 5))
    with torch.autocast("cpu", torch.bfloat16):
        output = matmul(a, b)
    assert output.dtype is torch.bfloat16
    return seeded(output, a, b)


def mixed(matmul: Matmul) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return [matmul(torch.randn(3, 6), torch.randn(6, 5).bfloat16())]


def recomputed(matmul: Matmul) -> list[torch.Tensor]:
    a, b = pair((3, 6), (6, 5))
    output = checkpoint(lambda x, y: matmul(x, y).sin(), a, b, use_reentrant=False)
    return seeded(output, a, b)


def pushed(matmul: Matmul) -> list[torch.Tensor]:
    operands, tangents = (tuple(torch.randn(s) for s in ((3, 6), (6, 5))) for _ in range(2))
    return list(jvp(matmul, operands, tangents))


def dual(matmul: Matmul) -> list[torch.Tensor]:
    with forward_ad.dual_level():
        a = forward_ad.make_dual(torch.randn(3, 6), torch.randn(3, 6))
        output = forward_ad.unpack_dual(matmul(a, torch.randn(6, 5)))
        return [output.primal.clone(), output.tangent.clone()]


def squares(matmul: Matmul) -> Callable[..., torch.Tensor]:
    """The gradient of the sum of a product's squares."""
    return grad(lambda x, y: matmul(x, y).square().sum())


USES: dict[str, Use] = {
    **{f"{a} by {b}": forward_of(a, b) for a, b in BROADCASTS},
    **{f"gradients of {a} by {b}": gradients_of(a, b) for a, b in FOLDED},
    **{name: laid_out(name) for name in BATCH_LAYOUTS},
    "autocast": cast,
    "autocast of two dtypes": mixed,
    "checkpoint": recomputed,
    "inference mode": lambda matmul: [
        torch.inference_mode()(matmul)(torch.randn(3, 6), torch.randn(6, 5))
    ],
    "vmap of grad": lambda matmul: [
        vmap(squares(matmul), in_dims=(0, None))(torch.randn(4, 3, 6), torch.randn(6, 5))
    ],
    "grad": lambda matmul: [squares(matmul)(torch.randn(4, 4), torch.randn(4, 4))],
    "vmap": lambda matmul: [vmap(matmul)(torch.randn(2, 3, 6), torch.randn(2, 6, 5))],
    "jvp": pushed,
    "dual numbers": dual,
}
# Gradients of broadcast operands are sums, in an order of their own.
WITH_ITS_OWN_BITS = {f"{a} by {b}, gradients": gradients_of(a, b) for a, b in BROADCASTS}


def digest(use: Use, matmul: Matmul) -> str:
    """What a use computes, from the same random numbers."""
    torch.manual_seed(0)
    return tensors_digest(use(matmul))


@for_each("name", USES | WITH_ITS_OWN_BITS)
def test_it_computes_what_torch_does_and_every_product_is_repaired(name: str) -> None:
    use = (USES | WITH_ITS_OWN_BITS)[name]
    expected = digest(use, torch.matmul if name in USES else holdfast.matmul)
    with armed(strike()) as counting:
        assert digest(use, holdfast.matmul) == expected
    assert counting.seen
    assert events.recent() == []
    for nth, site in enumerate(counting.seen):
        events.clear()
        with armed(strike(nth)):
            assert digest(use, holdfast.matmul) == expected
        assert [(event.kind, event.op) for event in events.recent()] == [("gemm_fault", site)]


def test_nothing_else_is_verified_by_it() -> None:
    a = torch.ones(2, 2)
    with struck((0, 0), 1e9, always=True):
        assert torch.mm(a, a)[0, 0] == 1e9
        assert torch.equal(holdfast.matmul(a, a), torch.full((2, 2), 2.0))

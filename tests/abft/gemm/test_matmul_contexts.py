"""holdfast.matmul wherever torch.matmul may stand: casts, transforms, checkpoints, layouts."""

from collections.abc import Callable

import torch
from case_loops import for_each
from gemm_strikes import Strike
from programs_shapes import BATCH_LAYOUTS, BROADCASTS, seeded
from struck import kinds
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import events, sites
from holdfast.digest.tensors import tensors_digest

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Use = Callable[[Matmul], list[torch.Tensor]]
Shape = tuple[int, ...]


def pair(*shapes: Shape) -> list[torch.Tensor]:
    """Operands that want their gradients."""
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


FOLDED = [((5, 2, 4, 3), (3, 6)), ((2, 1, 3), (3, 6)), ((4, 3), (3, 6)), ((2, 4, 3), (2, 3, 6))]


def forward_of(left: Shape, right: Shape) -> Use:
    """Forward alone: gradients of broadcast operands are sums, in an order of their own."""
    return lambda matmul: [matmul(torch.randn(left), torch.randn(right))]


def gradients_of(left: Shape, right: Shape) -> Use:
    """Forward and backward."""

    def use(matmul: Matmul) -> list[torch.Tensor]:
        a, b = pair(left, right)
        return seeded(matmul(a, b), a, b)

    return use


def laid_out(name: str) -> Use:
    """Both operands in one layout."""

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
    """Operands of two dtypes, which autocast makes one."""
    with torch.autocast("cpu", torch.bfloat16):
        return [matmul(torch.randn(3, 6), torch.randn(6, 5).bfloat16())]


def recomputed(matmul: Matmul) -> list[torch.Tensor]:
    """In a checkpoint."""
    a, b = pair((3, 6), (6, 5))
    output = checkpoint(lambda x, y: matmul(x, y).sin(), a, b, use_reentrant=False)
    return seeded(output, a, b)


def inference(matmul: Matmul) -> list[torch.Tensor]:
    """Without autograd."""
    with torch.inference_mode():
        return [matmul(torch.randn(3, 6), torch.randn(6, 5))]


def per_sample(matmul: Matmul) -> list[torch.Tensor]:
    """A gradient for each sample."""
    loss = grad(lambda x, y: matmul(x, y).square().sum())
    return [vmap(loss, in_dims=(0, None))(torch.randn(4, 3, 6), torch.randn(6, 5))]


def transformed(matmul: Matmul) -> list[torch.Tensor]:
    """torch.func.grad."""
    return [grad(lambda x: matmul(x, x).square().sum())(torch.randn(4, 4))]


def batched(matmul: Matmul) -> list[torch.Tensor]:
    """torch.func.vmap."""
    return [vmap(matmul)(torch.randn(2, 3, 6), torch.randn(2, 6, 5))]


def pushed(matmul: Matmul) -> list[torch.Tensor]:
    """torch.func.jvp."""
    operands, tangents = (tuple(torch.randn(s) for s in ((3, 6), (6, 5))) for _ in range(2))
    return list(jvp(matmul, operands, tangents))


def dual(matmul: Matmul) -> list[torch.Tensor]:
    """Dual numbers."""
    with forward_ad.dual_level():
        a = forward_ad.make_dual(torch.randn(3, 6), torch.randn(3, 6))
        output = forward_ad.unpack_dual(matmul(a, torch.randn(6, 5)))
        return [output.primal.clone(), output.tangent.clone()]


USES: dict[str, Use] = {
    **{f"{a} by {b}": forward_of(a, b) for a, b in BROADCASTS},
    **{f"gradients of {a} by {b}": gradients_of(a, b) for a, b in FOLDED},
    **{name: laid_out(name) for name in BATCH_LAYOUTS},
    "autocast": cast,
    "autocast of two dtypes": mixed,
    "checkpoint": recomputed,
    "inference mode": inference,
    "vmap of grad": per_sample,
    "grad": transformed,
    "vmap": batched,
    "jvp": pushed,
    "dual numbers": dual,
}


def digest(use: Use, matmul: Matmul) -> str:
    """What a use computes, from the same random numbers."""
    torch.manual_seed(0)
    return tensors_digest(use(matmul))


@for_each("name", USES)
def test_it_computes_what_torch_does_and_every_product_is_repaired(name: str) -> None:
    use = USES[name]
    expected = digest(use, torch.matmul)
    counting = Strike()
    sites.arm(counting)
    assert digest(use, holdfast.matmul) == expected
    assert counting.seen
    assert events.recent() == []
    for nth in range(len(counting.seen)):
        events.clear()
        sites.disarm()
        sites.arm(Strike(nth))
        assert digest(use, holdfast.matmul) == expected
        assert kinds() == ["gemm_fault"]

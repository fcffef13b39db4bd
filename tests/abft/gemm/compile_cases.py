"""A small model with every kind of product, and faults for the graphs it is compiled to."""

import pytest
import torch
from struck import kinds
from torch import nn

from holdfast import events
from holdfast.digest.tensors import tensors_digest
from holdfast.inject import Fault, Injector

COMPILING = [
    pytest.mark.compile,
    pytest.mark.timeout(300),
]
ROLES = ("forward", "grad_a", "grad_b")
PRODUCTS = ("0.up/addmm", "0.down/mm", "0/bmm", "0/bmm#2", "0/mm", "1/addmm")
SITES = {f"{name}/{role}" for name in PRODUCTS for role in ROLES}


class Block(nn.Module):
    """Two linear layers, two batched products, and one of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.mix = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(x).relu())
        scores = (hidden @ hidden.mT).softmax(-1)
        return (scores @ hidden + x) @ self.mix


def small_model() -> nn.Module:
    """A block and a head; the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(8, 4))


def batch(rows: int = 5) -> torch.Tensor:
    """[2, rows, 8], the same every time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, rows, 8, generator=generator)


def forward_backward(model: nn.Module, *, rows: int = 5) -> str:
    """Digest of output and gradients."""
    x = batch(rows).requires_grad_()
    output = model(x)
    gradients = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    return tensors_digest([output.detach(), *gradients])


def bit_flip(op: str, *, site: str = "output", bit: int = 29) -> Fault:
    """A fault of the first step."""
    return Fault(step=0, rank=0, kind="bitflip", op=op, site=site, bit=bit)


def injected(model: nn.Module, fault: Fault) -> str:
    """Digest of a pass with a fault, which must have struck."""
    events.clear()
    with Injector(model, [fault], rank=0).step(0):
        result = forward_backward(model)
    assert kinds()[:1] == ["injected"], f"{fault} did not strike"
    return result

"""Derivatives of derivatives, function transforms and hand-written derivatives."""

from typing import Any

import torch
from gemm_strikes import Program
from programs_layers import wanting
from programs_training import ROWS, WIDTH, loss_of, perceptron
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

FORWARD = {"0/addmm/forward": 1, "2/mm/forward": 1}


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def functional_loss(model: nn.Module) -> Any:
    return lambda weights, x: (functional_call(model, weights, (x,)) + 0.1).square().sum()


def penalised(model: nn.Module) -> list[torch.Tensor]:
    x = wanting(ROWS, WIDTH)
    loss = loss_of(model, x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    return [loss.detach(), slope.detach(), x.grad, *(p.grad for p in model.parameters())]


def hessian_vector(model: nn.Module) -> list[torch.Tensor]:
    weights = list(model.parameters())
    slopes = torch.autograd.grad(
        loss_of(model, torch.randn(ROWS, WIDTH)), weights, create_graph=True
    )
    along = [torch.randn_like(w) for w in weights]
    dots = sum((s * v).sum() for s, v in zip(slopes, along, strict=True))
    return [*(s.detach() for s in slopes), *torch.autograd.grad(dots, weights)]


def per_sample(model: nn.Module) -> list[torch.Tensor]:
    loss = functional_loss(model)
    weights, x = parameters_of(model), torch.randn(4, ROWS, WIDTH)
    return list(vmap(grad(loss), in_dims=(None, 0))(weights, x).values())


def ensemble(model: nn.Module) -> list[torch.Tensor]:
    """Three models of different weights at once, forward and backward."""
    stacked = {
        name: torch.stack([p * scale for scale in (0.5, 1.0, 2.0)]).requires_grad_()
        for name, p in parameters_of(model).items()
    }
    x = wanting(ROWS, WIDTH)
    output = vmap(lambda weights: functional_call(model, weights, (x,)))(stacked)
    wanted = [x, *stacked.values()]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), wanted)]


def jacobians(model: nn.Module) -> list[torch.Tensor]:
    """The Jacobian in the input, row by row and column by column."""

    def twofold(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(x)
        return output, output

    x = torch.randn(WIDTH)
    return [*jacrev(twofold, has_aux=True)(x), *jacfwd(twofold, has_aux=True)(x)]


def pushed_and_pulled(model: nn.Module) -> list[torch.Tensor]:
    x, tangent = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    primal, pushed = jvp(model, (x,), (tangent,))
    output, pull = vjp(model, x)
    return [primal, pushed, output, *pull(torch.ones_like(output))]


def batched_seeds(model: nn.Module) -> list[torch.Tensor]:
    x = wanting(ROWS, WIDTH)
    output = model(x)
    seeds = torch.randn(4, *output.shape)
    wanted = [x, *model.parameters()]
    return [output, *torch.autograd.grad(output, wanted, seeds, is_grads_batched=True)]


class Product(torch.autograd.Function):
    """A product and its derivatives, written by hand."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


class Batchable(Product):
    """The same, for ``vmap``."""

    generate_vmap_rule = True


class HandWritten(nn.Module):
    """A weight that is multiplied by a hand-written product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)  # type: ignore[no-any-return]


def hand_written(model: nn.Module) -> list[torch.Tensor]:
    x = wanting(ROWS, WIDTH)
    output = model(x)
    loss = output.square().sum()
    slopes = torch.autograd.grad(loss, [x, model.weight], create_graph=True)
    twofold = sum(slope.square().sum() for slope in slopes)
    detached = [slope.detach() for slope in slopes]
    return [output.detach(), *detached, *torch.autograd.grad(twofold, [x, model.weight])]


def hand_written_batched(model: nn.Module) -> list[torch.Tensor]:
    x, weight = torch.randn(4, ROWS, WIDTH), model.weight.detach()
    slopes = vmap(grad(lambda a, b: Batchable.apply(a, b).square().sum(), argnums=(0, 1)))
    return list(slopes(x, weight.expand(4, WIDTH, WIDTH)))


TRANSFORMS: dict[str, Program] = {
    "gradient penalty": Program(perceptron, penalised, FORWARD),
    "Hessian times vector": Program(perceptron, hessian_vector, FORWARD),
    "gradients per sample": Program(perceptron, per_sample, {}),
    "ensemble": Program(perceptron, ensemble, {}),
    "Jacobians": Program(perceptron, jacobians, {}),
    "jvp and vjp": Program(perceptron, pushed_and_pulled, {}),
    "batched seeds": Program(perceptron, batched_seeds, FORWARD),
    "hand-written": Program(HandWritten, hand_written, {"HandWritten/mm/forward": 1}),
    "hand-written, batched": Program(HandWritten, hand_written_batched, {}),
}

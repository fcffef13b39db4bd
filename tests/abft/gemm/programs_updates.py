"""What training loops do with the gradients of their products: accumulate them, apply them."""

from collections.abc import Callable

import torch
from gemm_strikes import Program
from programs_training import ROWS, WIDTH, Loop, layers, loss_of, program, state
from torch import nn


def weights_only(calls: int) -> dict[str, int]:
    """As ``layers``, for inputs that want no gradient."""
    return {name: n for name, n in layers(calls).items() if name != "0/addmm/grad_a"}


def accumulation(*, in_place: bool) -> Loop:
    """Gradients of three batches, added up by autograd or by hand."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for _ in range(3):
            loss = loss_of(model, torch.randn(ROWS, WIDTH)) / 3
            if not in_place:
                loss.backward()
                continue
            for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                assert p.grad is not None
                p.grad += grad
        return state(model)

    return run


def training(make: Callable[..., torch.optim.Optimizer], **options: object) -> Loop:
    """Two steps of an optimizer, gradients clipped."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        optimizer = make(model.parameters(), lr=0.05, **options)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, torch.randn(ROWS, WIDTH)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e30)
            optimizer.step()
        return state(model)

    return run


def matrices_only() -> nn.Module:
    """A perceptron all of whose parameters are matrices."""
    return nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.GELU(), nn.Linear(8, 5, bias=False))


def updated_in_backward(model: nn.Module) -> list[torch.Tensor]:
    """Each parameter is updated as soon as its gradient is there, in mid-backward."""

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for _ in range(2):
        loss_of(model, torch.randn(ROWS, WIDTH)).backward()
    for hook in hooks:
        hook.remove()
    return state(model)


def averaged(model: nn.Module) -> list[torch.Tensor]:
    """A student, and a teacher that is its moving average."""
    teacher = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            target = torch.func.functional_call(model, teacher, (x,))
        optimizer.zero_grad()
        (model(x) - target - 0.1).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                teacher[name].lerp_(p, 0.1)
    return [*state(model), *teacher.values()]


UPDATES: dict[str, Program] = {
    "accumulation": program(accumulation(in_place=False), weights_only(3)),
    "accumulation in place": program(accumulation(in_place=True), weights_only(3)),
    "SGD, foreach": program(training(torch.optim.SGD, foreach=True), weights_only(2)),
    "Adam, fused": program(training(torch.optim.Adam, fused=True), weights_only(2)),
    "AdamW, one by one": program(training(torch.optim.AdamW, foreach=False), weights_only(2)),
    "Muon": Program(matrices_only, training(torch.optim.Muon, ns_steps=1), {"2/mm/grad_b": 2}),
    "update in backward": program(updated_in_backward, weights_only(2)),
    "moving average": program(averaged, {"0/addmm/forward": 4, "0/addmm/grad_b": 2}),
}

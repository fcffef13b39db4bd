"""What training does around its products: cast, recompute, hook, overwrite, apply gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F
from gemm_strikes import Program
from programs_layers import ROLES, gradients, one_pass, wanting
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

# Wide enough that the three products of a layer may be verified together.
ROWS, WIDTH = 3, 16

Loop = Callable[[nn.Module], list[torch.Tensor]]
Context = Callable[[], AbstractContextManager[object]]


def perceptron() -> nn.Module:
    """Two layers, one without a bias."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 16, bias=False))


def layers(calls: int = 1, grads: int | None = None) -> dict[str, int]:
    """The products of a perceptron: forward ``calls`` times, each gradient ``grads`` times."""
    grads = calls if grads is None else grads
    times = {"forward": calls, "grad_a": grads, "grad_b": grads}
    return {f"{layer}/{role}": times[role] for layer in ("0/addmm", "2/mm") for role in ROLES}


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() + 0.1).square().sum()


def state(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    return [*(p.detach() for p in parameters), *(p.grad for p in parameters if p.grad is not None)]


def autocast(dtype: torch.dtype, *, backward_inside: bool) -> Loop:
    def run(model: nn.Module) -> list[torch.Tensor]:
        x = wanting(ROWS, WIDTH)
        with torch.autocast("cpu", dtype):
            output = model(x)
            assert output.dtype is dtype
            if backward_inside:
                return gradients(model, output, x)
        return gradients(model, output, x)

    return run


class Checkpointed(nn.Module):
    """A perceptron whose activations are computed again in backward."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.run = nn.Sequential(*perceptron(), nn.GELU()), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.inner, x * 1.0)


def checkpointed(run: Callable[[nn.Module, torch.Tensor], torch.Tensor], last: int = 2) -> Program:
    """A checkpointed perceptron; how often its last layer's forward product is computed."""
    names = {f"inner.{name}": calls for name, calls in layers(2, 1).items()}
    names["inner.2/mm/forward"] = last
    return Program(lambda: Checkpointed(run), to_leaves, names)


def to_leaves(model: nn.Module) -> list[torch.Tensor]:
    """Forward and backward, gradients accumulated in the leaves."""
    x = wanting(ROWS, WIDTH)
    loss = loss_of(model, x)
    loss.backward()
    return [loss.detach(), x.grad, *state(model)]


def nested(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    inner = partial(checkpoint, model, use_reentrant=False)
    return checkpoint(inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def selective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Products without a bias are kept, those with one computed again."""

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


def twice(model: nn.Module) -> list[torch.Tensor]:
    x = wanting(ROWS, WIDTH)
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), x.grad, *state(model)]


def hooked(model: nn.Module) -> list[torch.Tensor]:
    """Hooks that replace gradients, of tensors and of modules, and change them in place."""

    def scaled(_: nn.Module, grads: tuple[torch.Tensor, ...], __: object) -> tuple[torch.Tensor]:
        return (grads[0] * 3.0,)

    def centred(_: nn.Module, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (grads[0] - 0.25,)

    hooks = [
        model[2].register_full_backward_hook(scaled),
        model[2].register_full_backward_pre_hook(centred),
        model[0].weight.register_hook(lambda grad: grad.mul_(0.5)),
    ]
    x = wanting(ROWS, WIDTH)
    hidden = model[0](x)
    hidden.register_hook(lambda grad: grad.clamp(-2e5, 2e5))
    results = gradients(model, model[2](model[1](hidden)), x)
    for hook in hooks:
        hook.remove()
    return results


def in_place(model: nn.Module) -> list[torch.Tensor]:
    """Activations that are overwritten after their product was taken."""
    x = wanting(ROWS, WIDTH)
    hidden = model[0](x)
    hidden.add_(1.0).mul_(0.5)
    output = model[2](F.leaky_relu(hidden, 0.5, inplace=True))
    output += 1.0
    return gradients(model, output, x)


def under(context: Context) -> Loop:
    def run(model: nn.Module) -> list[torch.Tensor]:
        with context():
            return one_pass(model, ROWS, WIDTH)

    return run


def forward_under(context: Context) -> Loop:
    def run(model: nn.Module) -> list[torch.Tensor]:
        with context():
            return [model(torch.randn(ROWS, WIDTH))]

    return run


def expanded_seed(model: nn.Module) -> list[torch.Tensor]:
    x = wanting(ROWS, WIDTH)
    output = model(x)
    return [output, *torch.autograd.grad(output.sum(), [x, *model.parameters()])]


def program(run: Loop, names: dict[str, int]) -> Program:
    return Program(perceptron, run, names)


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


TRAINING: dict[str, Program] = {
    "autocast bf16": program(autocast(torch.bfloat16, backward_inside=False), layers()),
    "autocast fp16": program(autocast(torch.float16, backward_inside=False), layers()),
    "autocast bf16, backward inside": program(
        autocast(torch.bfloat16, backward_inside=True), layers()
    ),
    "checkpoint": checkpointed(partial(checkpoint, use_reentrant=False)),
    "checkpoint, reentrant": checkpointed(partial(checkpoint, use_reentrant=True)),
    "checkpoint, nested": checkpointed(nested),
    "checkpoint, selective": checkpointed(selective, last=1),
    "checkpoint, sequential": checkpointed(
        lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False), last=1
    ),
    "retain_graph": program(twice, layers(1, 2)),
    "hooks": program(hooked, layers()),
    "activations in place": program(in_place, layers()),
    "saved tensors on the CPU": program(under(torch.autograd.graph.save_on_cpu), layers()),
    "anomaly mode": program(under(torch.autograd.detect_anomaly), layers()),
    "inference mode": program(forward_under(torch.inference_mode), {"2/mm/forward": 1}),
    "no_grad": program(forward_under(torch.no_grad), {"0/addmm/forward": 1}),
    "expanded seed": program(expanded_seed, layers()),
}
UPDATES: dict[str, Program] = {
    "accumulation": program(accumulation(in_place=False), weights_only(3)),
    "accumulation in place": program(accumulation(in_place=True), weights_only(3)),
    "SGD, foreach": program(training(torch.optim.SGD, foreach=True), weights_only(2)),
    "Adam, fused": program(training(torch.optim.Adam, fused=True), weights_only(2)),
    "AdamW, one by one": program(training(torch.optim.AdamW, foreach=False), weights_only(2)),
    "Muon": Program(matrices_only, training(torch.optim.Muon, ns_steps=1), {"2/mm/grad_b": 2}),
    "update in backward": program(updated_in_backward, weights_only(2)),
}

"""Parameters, and batches, that change between two passes, by every means there is."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from gemm_strikes import Program
from programs_layers import one_pass, wanting
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

Change = Callable[[nn.Linear], object]


def changing(change: Change) -> Program:
    """A layer before and after a change, twice each, so that what is kept is used."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        assert isinstance(model, nn.Linear)
        before = [*one_pass(model, 3, 6), *one_pass(model, 3, 6)]
        change(model)
        return [*before, *one_pass(model, 3, 6), *one_pass(model, 3, 6)]

    return Program(lambda: nn.Linear(6, 5), run, {})


def flat_memory(layer: nn.Linear) -> None:
    """Move all parameters into one flat buffer, and change that."""
    flat = nn.utils.parameters_to_vector(layer.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(flat, layer.parameters())
    flat.mul_(-1.0)


def new_memory(layer: nn.Linear) -> None:
    for p in layer.parameters():
        p.data = torch.randn_like(p)


def loaded(layer: nn.Linear, *, assign: bool) -> None:
    state = {name: torch.randn_like(p) for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


def memory_resized(layer: nn.Linear) -> None:
    """Give memory back and take it again with other contents, as sharding wrappers do."""
    storage, size = layer.weight.untyped_storage(), layer.weight.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    layer.weight.copy_(torch.randn(5, 6))


def shared_memory(layer: nn.Linear) -> None:
    layer.share_memory()
    layer.weight.mul_(0.5)


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


def parametrized_and_not(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Half())
    parametrize.remove_parametrizations(layer, "weight")


def copied_from_a_twin(layer: nn.Linear) -> None:
    twin = copy.deepcopy(layer)
    layer.weight.copy_(twin.weight.mul_(3.0))


# What autograd does not follow: under no_grad, and some in inference mode too.
IN_PLACE: dict[str, Change] = {
    "moving average": lambda layer: [p.lerp_(torch.randn_like(p), 0.3) for p in layer.parameters()],
    "one row": lambda layer: layer.weight[2].add_(1.0),
    "one column": lambda layer: layer.weight[:, 3].sub_(2.0),
    "foreach": lambda layer: torch._foreach_mul_(list(layer.parameters()), 0.5),
    "a product in place": lambda layer: layer.weight.addmm_(
        torch.randn(5, 2), torch.randn(2, 6), alpha=0.1
    ),
    "the output of a product": lambda layer: torch.mm(
        torch.randn(5, 2), torch.randn(2, 6), out=layer.weight
    ),
    "memory resized": memory_resized,
    "shared memory": shared_memory,
    "copied from a twin": copied_from_a_twin,
}
IN_INFERENCE_MODE = ("moving average", "one row", "a product in place")
CHANGES: dict[str, Change] = {
    **{name: torch.no_grad()(change) for name, change in IN_PLACE.items()},
    **{
        f"{name} in inference mode": torch.inference_mode()(IN_PLACE[name])
        for name in IN_INFERENCE_MODE
    },
    "new memory": new_memory,
    "flat memory": flat_memory,
    "swap_tensors": lambda layer: torch.utils.swap_tensors(
        layer.weight, nn.Parameter(torch.randn(5, 6))
    ),
    "load_state_dict": lambda layer: loaded(layer, assign=False),
    "load_state_dict, assigned": lambda layer: loaded(layer, assign=True),
    "to bf16 and back": lambda layer: layer.bfloat16().float(),
    "tied": lambda layer: setattr(layer, "weight", nn.Linear(6, 5).weight),
    "reset_parameters": nn.Linear.reset_parameters,
    "weight norm": parametrizations.weight_norm,
    "pruned": lambda layer: prune.custom_from_mask(layer, "weight", torch.ones(5, 6).tril()),
    "parametrized and not": parametrized_and_not,
    "detached alias": lambda layer: layer.weight.detach().add_(1.0),
    "requires_grad": lambda layer: [p.requires_grad_() for p in layer.parameters()],
}


def hebbian(model: nn.Module) -> list[torch.Tensor]:
    """Read a weight through ``.data`` only, and let it learn without a gradient."""
    assert isinstance(model, nn.Linear)
    results = []
    for _ in range(3):
        x = torch.randn(3, 6)
        results.append(nn.functional.linear(x, model.weight.data))
        with torch.no_grad():
            model.weight[1] += 0.1 * results[-1][:, 1] @ x
    return [*results, model.weight.detach()]


def refilled(model: nn.Module) -> list[torch.Tensor]:
    """One array holds every batch; NumPy writes to it between passes, one of them not finished."""
    memory = np.empty((48, 64), np.float32)
    x, results = torch.from_numpy(memory), []
    for backwards in (0, 2):
        memory[...] = torch.randn(48, 64).numpy()
        output = model(x)
        results.append(output.detach().clone())
        for _ in range(backwards):
            weights = list(model.parameters())
            results += torch.autograd.grad(output.square().sum(), weights, retain_graph=True)
    return results


def gram(model: nn.Module) -> list[torch.Tensor]:
    """Change a batch through NumPy after its pass, and multiply it by itself."""
    x = torch.randn(48, 64)
    output = model(x).detach()
    x.numpy()[3] *= -2.0
    return [output, x.t() @ x]


def apart(model: nn.Module) -> list[torch.Tensor]:
    """Take gradients of the input and of the weights from one graph, each from its own seed."""
    x, results = wanting(48, 64), []
    for _ in range(3):
        output = model(x)
        results.append(output.detach())
        for wanted in (x, *model.parameters()):
            seed = torch.randn_like(output)
            results += torch.autograd.grad(output, wanted, seed, retain_graph=True)
    return results


def wide() -> nn.Module:
    """A layer whose three products may be verified together."""
    return nn.Linear(64, 32)


PARAMETERS: dict[str, Program] = {
    **{name: changing(change) for name, change in CHANGES.items()},
    "batches refilled": Program(wide, refilled, {"Linear/addmm/forward": 2}),
    "batch changed": Program(wide, gram, {"Linear/addmm/forward": 1, "(outside)/mm/forward": 1}),
    "gradients apart": Program(wide, apart, {"Linear/addmm/grad_b": 3}),
    "read through .data": Program(lambda: nn.Linear(6, 5, bias=False), hebbian, {}),
}

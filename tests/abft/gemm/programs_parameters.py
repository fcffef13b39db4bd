"""Parameters, and batches, that change between two passes, by every means there is."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from gemm_strikes import Program
from programs_layers import gradients, wanting
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

Change = Callable[[nn.Linear], None]


def one_pass(model: nn.Module) -> list[torch.Tensor]:
    """Forward and backward."""
    x = wanting(3, 6)
    return gradients(model, model(x), x)


def changing(change: Change) -> Program:
    """A layer before and after a change, twice each, so that what is kept is used."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        assert isinstance(model, nn.Linear)
        before = [*one_pass(model), *one_pass(model)]
        change(model)
        return [*before, *one_pass(model), *one_pass(model)]

    return Program(lambda: nn.Linear(6, 5), run, {})


def without_grad(change: Change) -> Change:
    """A change that autograd does not follow."""
    return torch.no_grad()(change)


def in_inference_mode(change: Change) -> Change:
    """The same in inference mode."""
    return torch.inference_mode()(change)


def average(layer: nn.Linear) -> None:
    """Moves towards other weights."""
    for p in layer.parameters():
        p.lerp_(torch.randn_like(p), 0.3)


def one_row(layer: nn.Linear) -> None:
    """What single-row LoRA or a surgical edit does."""
    layer.weight[2] += 1.0


def one_column(layer: nn.Linear) -> None:
    """A single row of the operand that the forward product reads."""
    layer.weight[:, 3] -= 2.0


def foreach(layer: nn.Linear) -> None:
    """The multi-tensor form."""
    torch._foreach_mul_(list(layer.parameters()), 0.5)


def product_in_place(layer: nn.Linear) -> None:
    """A low-rank update merged by a product that writes into the weight."""
    layer.weight.addmm_(torch.randn(5, 2), torch.randn(2, 6), alpha=0.1)


def product_into(layer: nn.Linear) -> None:
    """The weight as the output of a product."""
    torch.mm(torch.randn(5, 2), torch.randn(2, 6), out=layer.weight)


def new_memory(layer: nn.Linear) -> None:
    """Parameters given other memory."""
    for p in layer.parameters():
        p.data = torch.randn_like(p)


def flat_memory(layer: nn.Linear) -> None:
    """All parameters moved into one flat buffer, which is then changed."""
    flat = nn.utils.parameters_to_vector(layer.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(flat, layer.parameters())
    flat.mul_(-1.0)


def swapped(layer: nn.Linear) -> None:
    """Two parameters exchange all they are."""
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(5, 6)))


def loaded(layer: nn.Linear, *, assign: bool) -> None:
    """A state loaded, copied or assigned."""
    state = {name: torch.randn_like(p) for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)


def round_trip(layer: nn.Linear) -> None:
    """To another dtype and back."""
    layer.bfloat16().float()


def tied(layer: nn.Linear) -> None:
    """The weight replaced by that of another layer."""
    layer.weight = nn.Linear(6, 5).weight


def reinitialised(layer: nn.Linear) -> None:
    """As new."""
    layer.reset_parameters()


def rewound(layer: nn.Linear) -> None:
    """Memory given back and taken again, as sharding wrappers do, with other contents."""
    storage, size = layer.weight.untyped_storage(), layer.weight.untyped_storage().nbytes()
    storage.resize_(0)
    storage.resize_(size)
    layer.weight.copy_(torch.randn(5, 6))


def shared_memory(layer: nn.Linear) -> None:
    """Memory moved to where other processes see it, then changed."""
    layer.share_memory()
    layer.weight.mul_(0.5)


def normalised(layer: nn.Linear) -> None:
    """A parametrization registered late."""
    parametrizations.weight_norm(layer)


def masked(layer: nn.Linear) -> None:
    """Half of the weights pruned."""
    prune.l1_unstructured(layer, "weight", 0.5)


class Half(nn.Module):
    """Half of a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Its half."""
        return weight * 0.5


def parametrized_and_not(layer: nn.Linear) -> None:
    """A parametrization registered, and baked in."""
    parametrize.register_parametrization(layer, "weight", Half())
    parametrize.remove_parametrizations(layer, "weight")


def copied_from(layer: nn.Linear) -> None:
    """A copy is changed, and copied back."""
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.mul_(3.0)
        layer.weight.copy_(twin.weight)


def detached_alias(layer: nn.Linear) -> None:
    """Another tensor of the weight's memory and version."""
    layer.weight.detach().add_(1.0)


CHANGES: dict[str, Change] = {
    "moving average": without_grad(average),
    "moving average in inference mode": in_inference_mode(average),
    "one row": without_grad(one_row),
    "one row in inference mode": in_inference_mode(one_row),
    "one column": without_grad(one_column),
    "foreach": without_grad(foreach),
    "a product in place": without_grad(product_in_place),
    "a product in place in inference mode": in_inference_mode(product_in_place),
    "the output of a product": without_grad(product_into),
    "new memory": new_memory,
    "flat memory": flat_memory,
    "swap_tensors": swapped,
    "load_state_dict": lambda layer: loaded(layer, assign=False),
    "load_state_dict, assigned": lambda layer: loaded(layer, assign=True),
    "to bf16 and back": round_trip,
    "tied": tied,
    "reset_parameters": reinitialised,
    "memory resized": without_grad(rewound),
    "shared memory": without_grad(shared_memory),
    "weight norm": normalised,
    "pruned": masked,
    "parametrized and not": parametrized_and_not,
    "copied from a twin": copied_from,
    "detached alias": detached_alias,
    "requires_grad": lambda layer: [p.requires_grad_() for p in layer.parameters()] and None,
}


def hebbian(model: nn.Module) -> list[torch.Tensor]:
    """A weight that is only read through ``.data``, and learns without a gradient."""
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
    """A batch that is changed through NumPy after its pass, and multiplied by itself."""
    x = torch.randn(48, 64)
    output = model(x).detach()
    x.numpy()[3] *= -2.0
    return [output, x.t() @ x]


def apart(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of the input and of the weights from one graph, each from a seed of its own."""
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

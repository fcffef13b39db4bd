"""Layers and losses of real models, each with the products it runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gemm_strikes import Program
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

Module = Callable[..., torch.Tensor]

ROLES = ("forward", "grad_a", "grad_b")


def trio(product: str, calls: int = 1) -> dict[str, int]:
    """A product and the gradients of both its operands."""
    return {f"{product}/{role}": calls for role in ROLES}


def gradients(model: nn.Module, output: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of inputs and parameters, under a loss that weighs all."""
    weights = torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)
    wanted = [*inputs, *(p for p in model.parameters() if p.requires_grad)]
    loss = (output.double() * weights).square().sum()
    return [output.detach(), *torch.autograd.grad(loss, wanted)]


def wanting(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def one_pass(model: nn.Module, *shape: int) -> list[torch.Tensor]:
    x = wanting(*shape)
    return gradients(model, model(x), x)


def applied(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    names: dict[str, int],
) -> Program:
    """A module called on one input, forward and backward."""
    return Program(build, lambda model: one_pass(model, *shape), names)


class Lambda(nn.Module):
    """Parameters of given shapes, and what is computed from them and an input."""

    def __init__(self, function: Module, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


def expression(
    function: Module,
    shapes: list[tuple[int, ...]],
    names: dict[str, int],
) -> Program:
    """A function of an input and some parameters; the first shape is the input's."""
    build = partial(Lambda, function, *shapes[1:])
    return applied(build, shapes[0], names)


class Attention(nn.Module):
    """Multi-head attention whose probabilities are asked for: torch's unfused path."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, probabilities = self.heads(x, x, x, need_weights=True)
        return torch.cat([output, probabilities], dim=-1)


class EncoderLayer(nn.TransformerEncoderLayer):
    """Attention by separate products: the fused kernel's bits are not those of torch's own."""

    def forward(self, src: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(src, *args, **kwargs)


class Shared(nn.Module):
    """One layer used twice, one weight used by two layers and by a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.first(x))) @ self.first.weight


class LowRank(nn.Module):
    """A frozen layer and a trained correction of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + 2.0 * self.up(self.down(x))


class Recurrent(nn.Module):
    """Three steps of a cell."""

    def __init__(self, kind: type[nn.LSTMCell] | type[nn.GRUCell]) -> None:
        super().__init__()
        self.cell = kind(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        assert state is not None
        return state[0] if isinstance(state, tuple) else state


def linear(inner: int = 6, outer: int = 5, *, bias: bool = True) -> Callable[[], nn.Module]:
    return partial(nn.Linear, inner, outer, bias=bias)


LAYERS: dict[str, Program] = {
    "linear 1-D": applied(linear(), (6,), trio("Linear/addmm")),
    "linear 2-D": applied(linear(), (3, 6), trio("Linear/addmm")),
    "linear 3-D": applied(linear(), (2, 3, 6), trio("Linear/addmm")),
    "linear 4-D": applied(linear(), (2, 1, 3, 6), trio("Linear/addmm")),
    "linear 1-D, no bias": applied(linear(bias=False), (6,), trio("Linear/mm")),
    "linear 2-D, no bias": applied(linear(bias=False), (3, 6), trio("Linear/mm")),
    "linear 4-D, no bias": applied(linear(bias=False), (2, 1, 3, 6), trio("Linear/mm")),
    "linear, one feature in": applied(linear(inner=1), (3, 1), trio("Linear/addmm")),
    "linear, one feature out": applied(linear(outer=1), (3, 6), trio("Linear/addmm")),
    "linear, one row": applied(linear(), (1, 6), trio("Linear/addmm")),
    "linear, one of all": applied(linear(1, 1), (1, 1), trio("Linear/addmm")),
    "attention, unfused": applied(
        Attention,
        (2, 3, 8),
        trio("heads/mm") | trio("heads/addmm") | trio("heads/bmm") | trio("heads/bmm#2"),
    ),
    "encoder layer": applied(
        lambda: EncoderLayer(8, 2, 12, dropout=0.0, activation="gelu"),
        (3, 2, 8),
        trio("linear1/addmm") | trio("linear2/addmm") | trio("self_attn/addmm"),
    ),
    "shared layer": applied(
        Shared, (3, 8), trio("first/addmm", 2) | trio("second/mm") | trio("Shared/mm")
    ),
    "low rank": applied(
        LowRank,
        (3, 8),
        {"frozen/addmm/forward": 1, "frozen/addmm/grad_a": 1} | trio("down/mm") | trio("up/mm"),
    ),
    "LSTM cell": applied(
        partial(Recurrent, nn.LSTMCell),
        (3, 2, 4),
        {"cell/addmm/forward": 3, "cell/addmm#2/grad_b": 3},
    ),
    "GRU cell": applied(partial(Recurrent, nn.GRUCell), (3, 2, 4), trio("cell/addmm", 3)),
    "weight norm": applied(
        lambda: parametrizations.weight_norm(nn.Linear(6, 5)),
        (3, 6),
        trio("ParametrizedLinear/addmm"),
    ),
    "orthogonal": applied(
        lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"),
        (3, 4),
        {},
    ),
    "einsum": expression(
        lambda x, w: torch.einsum("bij,hjk->bhik", x, w), [(2, 3, 4), (2, 4, 5)], trio("Lambda/bmm")
    ),
    "einsum, three operands": expression(
        lambda x, v, w: torch.einsum("bi,ij,jk->bk", x, v, w),
        [(2, 3), (3, 4), (4, 5)],
        trio("Lambda/bmm") | trio("Lambda/bmm#2"),
    ),
    "tensordot": expression(
        lambda x, w: torch.tensordot(x, w, dims=([1, 2], [1, 0])),
        [(2, 3, 4), (4, 3, 5)],
        trio("Lambda/mm"),
    ),
    "multi_dot": expression(
        lambda x, v, w: torch.linalg.multi_dot([x, v, w]),
        [(2, 3), (3, 4), (4, 5)],
        trio("Lambda/mm") | trio("Lambda/mm#2"),
    ),
    "inner": expression(torch.inner, [(2, 3), (4, 3)], trio("Lambda/mm")),
    "addbmm": expression(lambda x, c, b: torch.addbmm(c, x, b), [(2, 3, 4), (3, 5), (2, 4, 5)], {}),
    "baddbmm": expression(
        lambda x, c, b: torch.baddbmm(c, x, b, beta=0.5, alpha=2.0),
        [(2, 3, 4), (2, 1, 5), (2, 4, 5)],
        trio("Lambda/baddbmm"),
    ),
    "Gram matrix": expression(lambda x: x @ x.mT, [(2, 3, 4)], trio("Lambda/bmm")),
    "distances": expression(lambda x, w: torch.cdist(x, w), [(30, 4), (28, 4)], {}),
    "matrix power": expression(lambda x: torch.linalg.matrix_power(x, 5), [(3, 3)], {}),
    "bilinear": expression(lambda x, w: F.bilinear(x, x * 2, w), [(3, 4), (2, 4, 4)], {}),
    "addmm in place": expression(
        lambda x, w: (x * 1.0).addmm_(x, w, beta=0.5),
        [(3, 3), (3, 3)],
        trio("Lambda/addmm"),
    ),
}

"""What ``torch.export`` and TorchScript take, and what they are refused with a reason."""

from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from struck import kinds, same_bits, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.errors import ConfigError
from holdfast.nn import Attention, Int8EmbeddingBag, Int8Linear, Linear

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Program = Callable[..., torch.Tensor]


def exported() -> Program:
    program: Program = torch.export.export(_layer(), (_x(),)).module()
    return program


def scripted() -> Program:
    program: Program = torch.jit.script(_layer())
    return program


def _layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Linear(6, 5), nn.ReLU(), Linear(5, 3)).requires_grad_(False)


def _x() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [exported, scripted])
def test_an_exported_linear_layer_is_still_verified(
    make: Callable[[], Program],
) -> None:
    program, x = make(), _x()
    healthy = program(x)
    torch.testing.assert_close(healthy, _layer()(x))
    assert events.recent() == []
    for nth in (0, 1):
        with struck((0, 0), 1e6, nth=nth):
            repaired = program(x)
        assert same_bits(repaired, healthy)
    assert kinds() == ["gemm_fault"] * 2


def test_an_exported_program_of_a_protected_model_has_torchs_own_products() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU())
    with holdfast.protect(model):
        program = torch.export.export(model, (_x(),))
    used = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert used == ["aten.linear.default", "aten.relu.default"]
    assert same_bits(program.module()(_x()), model(_x()))


_BAGS = (torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
_MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "Attention": (lambda: Attention(8, 2), (torch.randn(1, 3, 8),)),
    "Int8Linear": (lambda: Int8Linear.from_float(nn.Linear(6, 5)), (_x(),)),
    "Int8EmbeddingBag": (lambda: Int8EmbeddingBag.from_float(nn.EmbeddingBag(9, 4)), _BAGS),
}
_TRACERS: dict[str, Callable[[nn.Module, tuple[torch.Tensor, ...]], object]] = {
    "torch.export": torch.export.export,
    "torch.jit.trace": torch.jit.trace,
    "torch.jit.script": lambda module, _: torch.jit.script(module),
}


@for_each("tracer", list(_TRACERS))
@for_each("name", list(_MODULES))
def test_modules_that_repair_themselves_are_refused_with_what_to_do(name: str, tracer: str) -> None:
    make, arguments = _MODULES[name]
    with pytest.raises(ConfigError, match=rf"^{tracer} cannot take .*{name}.*leave it outside"):
        _TRACERS[tracer](make(), arguments)


def test_scripting_a_protected_model_is_refused_with_what_to_do() -> None:
    model = nn.Linear(6, 5)
    protection = holdfast.protect(model)
    with pytest.raises(AttributeError, match=r"torch\.jit\.script .* call Protection\.remove"):
        torch.jit.script(model)
    protection.remove()
    torch.testing.assert_close(torch.jit.script(model)(_x()), model(_x()))

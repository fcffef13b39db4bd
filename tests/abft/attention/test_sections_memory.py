"""What the forward pass leaves for the backward pass, and sites as an injector reaches them."""

from collections.abc import Callable

import pytest
import torch
from case_loops import for_each
from section_cases import FORWARD, data, module
from struck import kinds
from torch import nn

import holdfast
from holdfast import events, native
from holdfast.errors import UncorrectableFault
from holdfast.inject import Fault, Injector


def saved(output: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that wait for the backward pass of an attention."""
    assert output.grad_fn is not None
    return [t for t in output.grad_fn.saved_tensors if t is not None]  # type: ignore[attr-defined]


# Inputs (the input of Q, K and V, three times), weights, then Q, K, V by head, AP and CL.
PLACES: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "X": lambda tensors: tensors[0],
    "K": lambda tensors: tensors[8],
    "V": lambda tensors: tensors[9],
    "AP": lambda tensors: tensors[10],
    "CL": lambda tensors: tensors[11],
}


@for_each("place", PLACES)
def test_damage_to_what_waits_for_backward_is_an_operand_fault(place: str) -> None:
    attention = module()
    output = attention(data())
    struck = PLACES[place](saved(output))
    assert struck.numel() > 1
    struck.data[(-1,) * struck.dim()] += 3.0
    with pytest.raises(UncorrectableFault, match="changed in row"):
        output.sum().backward()
    assert kinds() == ["operand_fault"]


@for_each("place", PLACES)
def test_unchecked_the_same_damage_reaches_the_gradients(place: str) -> None:
    gradients = []
    for added in (0.0, 3.0):
        attention = module(frequencies=(0, 0, 0))
        output = attention(data())
        struck = PLACES[place](saved(output))
        struck.data[(-1,) * struck.dim()] += added
        gradients.append(torch.autograd.grad(output.sum(), list(attention.parameters())))
    assert not all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@for_each("matrix", FORWARD)
@for_each("index", [(1, 2), None])
def test_the_injector_strikes_every_matrix(matrix: str, index: tuple[int, int] | None) -> None:
    model = nn.Sequential(module())
    healthy = model(data())
    if index is not None and matrix in ("S_AS.AS", "S_CL.AP", "S_CL.CL"):
        index = (0, *index)
    fault = Fault(
        identifier=0,
        step=0,
        rank=0,
        kind="bitflip",
        bit=30,
        site="output",
        op=f"Attention/{matrix}/forward",
        index=index,
    )
    injector = Injector(model, [fault], rank=0)
    with injector.step(0):
        repaired = model(data())
    assert torch.equal(repaired, healthy)
    assert kinds() == ["injected", "softmax_fault" if matrix == "S_CL.AP" else "gemm_fault"]
    assert events.recent()[0].op == events.recent()[1].op


def test_under_protect_weights_are_encoded_once_until_they_change() -> None:
    model = nn.Sequential(module())
    healthy = model(data())
    with holdfast.protect(model):
        model(data())
        first = native.core.cached_encodings()
        assert torch.equal(model(data()), healthy)
        assert native.core.cached_encodings() == first == 4
        model(data().requires_grad_()).sum().backward()
        assert native.core.cached_encodings() == 8  # backward multiplies by the other side
        weight = model[0].out_proj.weight
        with torch.no_grad():
            weight += 1.0
        assert not torch.equal(model(data()), healthy)
        assert events.recent() == []
        weight.data[1, 2] += 1.0
        with pytest.raises(UncorrectableFault, match="changed in row"):
            model(data())
    assert native.core.cached_encodings() == 0

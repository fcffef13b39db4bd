"""Torch's own quantised layers, and what holds for whatever stands in for them."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from struck import struck
from torch import nn

from holdfast import events
from holdfast.protection import protect

INPUTS, OUTPUTS = 48, 20


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS)


def quantised(
    kind: str = "static", *, relu: bool = False, per_channel: bool = False, bias: bool = True
) -> Any:
    """Torch's layer of a kind, static or dynamic or with an activation in it, of ``linear``."""
    from torch.ao.nn.intrinsic import quantized as intrinsic

    floats, plain = linear(), torch.ao.nn.quantized
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch, still in models
        made: Any = {
            "static": intrinsic.LinearReLU if relu else plain.Linear,
            "dynamic": intrinsic.dynamic.LinearReLU if relu else plain.dynamic.Linear,
            "leaky relu": lambda *sizes: intrinsic.LinearLeakyReLU(*sizes, 0.1),
            "tanh": intrinsic.LinearTanh,
        }[kind](INPUTS, OUTPUTS)
        weight = floats.weight.detach()
        if per_channel:
            scales = weight.abs().amax(1).double() / 127
            zeros = torch.zeros(OUTPUTS, dtype=torch.long)
            codes = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        else:
            codes = torch.quantize_per_tensor(weight, 0.0012, 3, torch.qint8)
        made.set_weight_bias(codes, floats.bias.detach() if bias else None)
    made.scale, made.zero_point = 0.013, 120
    return made


def codes_of(y: torch.Tensor) -> torch.Tensor:
    """The integers of a quantised tensor; another one as it is."""
    return y.int_repr() if y.is_quantized else y


def check_fault(model: nn.Module, layer: nn.Module, x: torch.Tensor, op: str) -> None:
    """A flipped accumulator is corrected and named, and without the check gets out."""
    with protect(model):
        clean = codes_of(model(x))
        assert events.recent() == []
        with struck((3, 4), lambda old: old ^ (1 << 19), always=True):
            layer.verify = False  # type: ignore[assignment]
            assert not torch.equal(codes_of(model(x)), clean)
            assert events.recent() == []
            layer.verify = True  # type: ignore[assignment]
            assert torch.equal(codes_of(model(x)), clean)
    (event,) = events.recent()
    assert (event.op, event.detail["index"]) == (op, [3, 4])


def check_copies(layer: nn.Module, fresh: Callable[[], nn.Module], x: torch.Tensor) -> None:
    """A state that was loaded, a copy and an unpickled layer compute the same."""
    loaded = fresh()
    assert not torch.equal(codes_of(loaded(x)), codes_of(layer(x)))
    loaded.load_state_dict(layer.state_dict())
    for same in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(codes_of(same(x)), codes_of(layer(x)))

"""In place of torch's static quantised layer: its codes, its state, and faults that torch keeps."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from case_loops import for_each
from quantised_cases import check_copies, check_fault, quantised
from torch import nn

from holdfast.abft.int8_gemm.reference import int8_linear_reference
from holdfast.nn import Int8Linear, Int8QuantizedLinear


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated in torch
        yield


def activations(*shape: int) -> torch.Tensor:
    """Codes of seven bits: with more, torch's own product saturates on processors without VNNI."""
    x = torch.randn(*shape, 48, generator=torch.Generator().manual_seed(1))
    return torch.quantize_per_tensor(x.clamp(-1.9, 1.9), 0.03, 63, torch.quint8)


@for_each("bias", [False, True])
@for_each("relu", [False, True])
@for_each("per_channel", [False, True])
@for_each("shape", [(7,), (2, 3), (0,)])
def test_it_stands_in_for_torchs_own(
    per_channel: bool, relu: bool, bias: bool, shape: tuple[int, ...]
) -> None:
    module, x = quantised(per_channel=per_channel, relu=relu, bias=bias), activations(*shape)
    layer = Int8QuantizedLinear.from_quantized(module)
    ours, expected = layer(x), module(x)
    assert (ours.dtype, ours.shape) == (torch.quint8, expected.shape)
    assert (ours.q_scale(), ours.q_zero_point()) == (expected.q_scale(), expected.q_zero_point())
    difference = (ours.int_repr().int() - expected.int_repr().int()).abs()
    assert (difference <= (1 if bias else 0)).all()  # torch rounds the bias
    weights = layer.linear.weights
    exact = int8_linear_reference(
        x.int_repr().reshape(-1, 48),
        weights.weight(),
        a_scale=0.03,
        a_zero_point=63,
        scale=weights.scale,
        zero_point=weights.zero_point,
        bias=weights.bias,
        relu=relu,
        out_scale=0.013,
        out_zero_point=120,
    )
    assert torch.equal(ours.int_repr().reshape(-1, 20), exact)


def test_it_works_within_a_model_of_such_layers_and_a_fault_is_corrected() -> None:
    first = Int8QuantizedLinear.from_quantized(quantised(per_channel=True))
    out = nn.Sequential(first, Int8QuantizedLinear(Int8Linear(20, 5), 0.02, 128))(activations(4))
    assert (out.dtype, out.shape) == (torch.quint8, (4, 5))
    check_fault(nn.Sequential(first), first.linear, activations(6), "0.linear/int8_gemm/forward")


def test_state_dict_copy_and_pickle() -> None:
    layer = Int8QuantizedLinear.from_quantized(quantised(per_channel=True))
    loaded = Int8QuantizedLinear(Int8Linear(48, 20), 1.0, 0)
    check_copies(layer, lambda: loaded, activations(6))
    assert loaded(activations(6)).q_scale() == layer.scale


def test_a_changed_weight_is_scrubbed() -> None:
    layer, x = Int8QuantizedLinear.from_quantized(quantised(per_channel=True)), activations(6)
    clean = layer(x).int_repr()
    assert not layer.scrub()
    gemm = layer.linear.weights.gemm
    gemm.buffer[gemm.address(5, 6)] ^= 64
    assert layer.scrub()
    assert torch.equal(layer(x).int_repr(), clean)


def test_what_it_cannot_take_is_refused() -> None:
    layer = Int8QuantizedLinear.from_quantized(quantised(per_channel=True))
    with pytest.raises(TypeError, match="quint8"):
        layer(torch.ones(2, 48))
    with pytest.raises(TypeError, match="quint8"):
        layer(torch.quantize_per_tensor(torch.ones(2, 48), 0.1, 0, torch.qint8))
    with pytest.raises(ValueError, match="48"):
        layer(torch.quantize_per_tensor(torch.ones(2, 47), 0.1, 0, torch.quint8))
    with pytest.raises(TypeError, match="dynamic"):
        Int8QuantizedLinear.from_quantized(torch.ao.nn.quantized.dynamic.Linear(4, 4))
    for scale, zero_point in ((0.0, 0), (float("nan"), 0), (float("inf"), 0), (1.0, 256)):
        with pytest.raises(ValueError, match="of the output"):
            Int8QuantizedLinear(Int8Linear(4, 4), scale, zero_point)

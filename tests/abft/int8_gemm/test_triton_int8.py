"""The product on the device gives plain torch's bits, suspects the same rows and never waits."""

from typing import Any

import pytest
import torch
from case_loops import for_each
from int8_cases import OUTPUTS, Layer, flipped
from no_host_sync import NoHostSync
from struck import kinds
from triton_device import DEVICE, MARKS

from holdfast import ConfigError, events
from holdfast.abft.int8_gemm import weights as int8_weights
from holdfast.abft.int8_gemm.cuda import TritonInt8Gemm
from holdfast.abft.int8_gemm.encoding import ENCODINGS
from holdfast.abft.int8_gemm.op import int8_linear
from holdfast.abft.registry import Implementation
from holdfast.abft.triton.launch import FAILED
from holdfast.nn import Int8Linear

pytestmark = [*MARKS, pytest.mark.usefixtures("_on_device")]

CALLS: list[dict[str, Any]] = [
    {"m": 5, "n": 70, "k": 33},
    {"m": 3, "n": 2050, "k": 8, "relu": True},
    {"m": 4, "n": 1, "k": 16, "zero_points": True},
    {"m": 32, "n": 257, "k": 40, "zero_points": True, "per_channel": True, "relu": True},
]
REFUSED = 0x7F800000


@pytest.fixture
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the CPU stands in for one."""
    if DEVICE == "cpu":
        chosen = Implementation("triton", lambda: TritonInt8Gemm)
        monkeypatch.setattr(int8_weights.INT8_GEMM, "implementations", (chosen,))


def device_layer(*sizes: int, **options: Any) -> Layer:
    """A layer whose weights are packed for the device."""
    layer = Layer(*sizes, **options, backend="device", device=DEVICE)
    assert layer.weights.deferred
    return layer


def slot_of() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


# Every call with every output, and both with the encodings in turn.
IN_TURN = [
    (call, output, ENCODINGS[(number + place) % len(ENCODINGS)])
    for number, call in enumerate(CALLS)
    for place, output in enumerate(OUTPUTS)
]


@for_each(("call", "output", "encoding"), IN_TURN)
def test_the_bits_of_64_bit_integers(
    call: dict[str, Any], output: dict[str, Any], encoding: str
) -> None:
    layer = device_layer(**call, encoding=encoding, output=output)
    slot = slot_of()
    assert torch.equal(layer.run(), layer.expected())
    assert torch.equal(layer.run(slot=slot), layer.expected())
    assert int(slot) == 0
    assert kinds() == []


@for_each("encoding", ENCODINGS)
@for_each("bit", [0, 7, 16, 30])
def test_any_flip_of_an_accumulator_is_found_and_repaired(bit: int, encoding: str) -> None:
    layer = device_layer(5, 300, 20, encoding=encoding)
    slot = slot_of()
    with flipped(1, 150, bit):
        assert torch.equal(layer.run(), layer.expected())
        assert kinds() == ["gemm_fault"]
        events.clear()
        assert not torch.equal(layer.run(slot=slot), layer.expected())
        assert int(slot) == FAILED
        assert kinds() == []
        assert not torch.equal(layer.run(verify=False), layer.expected())
        assert kinds() == []


@for_each("part", ["weight", "check", "both"])
def test_a_changed_weight_or_check_is_found_and_repaired(part: str) -> None:
    layer = device_layer(5, 30, 20)
    packed = layer.weights.gemm.buffer
    stored, slot = packed.clone(), slot_of()
    if part != "check":
        layer.flip(3, 7)
    if part != "weight":
        layer.flip(3, 30, 32)  # a digit of the sum of B's row 3
    layer.run(slot=slot)
    assert int(slot) == FAILED
    assert not torch.equal(packed, stored)
    assert torch.equal(layer.run(), layer.expected())
    assert torch.equal(packed, stored)
    assert set(kinds()) <= {"operand_fault", "gemm_fault"}


def test_clean_rows_are_silent() -> None:
    slot, rows = slot_of(), 0
    for seed in range(2):
        layer = device_layer(100, 9, 7, seed=seed, encoding=ENCODINGS[seed % 2])
        layer.run(slot=slot)
        rows += 100
    assert (rows, int(slot)) == (200, 0)


def module(**static: Any) -> Int8Linear:
    torch.manual_seed(0)
    return Int8Linear(24, 10, **static).to(DEVICE)


STATIC = {"input_scale": 0.03, "input_zero_point": 128}


@for_each("static", [{}, STATIC])
@for_each("scale", [1.0, 0.0, 1e-38])
def test_a_module_quantises_on_the_device_as_on_cpu(static: dict[str, Any], scale: float) -> None:
    layer = module(**static)
    with pytest.MonkeyPatch.context() as patch:
        plain = Implementation("reference", lambda: int8_weights.ReferenceInt8Gemm)
        patch.setattr(int8_weights.INT8_GEMM, "implementations", (plain,))
        other = Int8Linear(24, 10, **static)
        other.load_state_dict(layer.state_dict())
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)) * scale
        expected = other(x)
    assert torch.equal(layer(x.to(DEVICE)).cpu(), expected)


@for_each("static", [{}, STATIC])
def test_a_module_with_a_slot_never_waits(static: dict[str, Any]) -> None:
    layer, slot = module(**static), slot_of()
    x = torch.randn(4, 24, device=DEVICE)
    expected = layer(x)
    with NoHostSync():
        output = layer(x, slot)
    assert torch.equal(output, expected)
    assert int(slot) == 0
    with pytest.raises(AssertionError, match="makes the host wait"), NoHostSync():
        layer(x)


@for_each("value", [torch.nan, torch.inf, 1e38])
@for_each("static", [{}, {"input_scale": 1e37, "input_zero_point": 3}])
def test_an_input_without_finite_outputs_is_refused(value: float, static: dict[str, Any]) -> None:
    layer, slot = module(), slot_of()
    layer.input_scale, layer.input_zero_point = (*static.values(), None, None)[:2]
    x = torch.randn(4, 24, device=DEVICE)
    x[1, 2] = value
    layer(x, slot)
    assert int(slot) == REFUSED
    with pytest.raises(ValueError, match="NaN or INF"):
        layer(x)


def test_a_slot_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = device_layer()
    for slot in (slot_of().repeat(2), slot_of().float()):
        with pytest.raises(ValueError, match=r"give int32 \[1\]"):
            layer.run(slot=slot)
    plain = Implementation("reference", lambda: int8_weights.ReferenceInt8Gemm, (DEVICE,))
    monkeypatch.setattr(int8_weights.INT8_GEMM, "implementations", (plain,))
    other = int8_weights.Int8Weights(layer.weight.to(DEVICE), 1.0)
    with pytest.raises(ConfigError, match="leave it out"):
        int8_linear(layer.a.to(DEVICE), other, a_scale=1.0, slot=slot_of())


def test_without_the_check_the_flip_gets_out() -> None:
    layer = device_layer(5, 300, 20)
    with flipped(1, 150, 20):
        assert not torch.equal(layer.run(verify=False), layer.expected())
    assert kinds() == []

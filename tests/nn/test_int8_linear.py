"""The quantised layer: its values, what it is made from, how it is kept, and its faults."""

from typing import Any

import pytest
import torch
from case_loops import for_each
from quantised_cases import check_copies, check_fault, linear, quantised
from struck import kinds
from torch import nn

from holdfast import events
from holdfast.abft.int8_gemm.quantise import quantise_on_host
from holdfast.abft.int8_gemm.reference import int8_linear_reference
from holdfast.inject.injector import Injector
from holdfast.inject.schedule import Fault
from holdfast.nn import Int8Linear
from holdfast.nn.int8_conversion import quantise_weight
from holdfast.nn.int8_linear import _STATE
from holdfast.protection import protect

STATIC: dict[str, Any] = {"input_scale": 0.05, "input_zero_point": 128}


@pytest.fixture(name="linear")
def _linear() -> nn.Linear:
    return linear()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1))


def expected(layer: Int8Linear, x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """By 64-bit integers."""
    a = (x.reshape(-1, 48) * (1.0 / scale)).round().add(zero_point).clamp(0, 255).to(torch.uint8)
    weights = layer.weights
    y = int8_linear_reference(
        a,
        weights.weight(),
        a_scale=scale,
        a_zero_point=zero_point,
        scale=weights.scale,
        zero_point=weights.zero_point,
        bias=weights.bias,
    )
    return y.reshape(*x.shape[:-1], 20)


@for_each("per_channel", [False, True])
@for_each("encoding", ["digits", "mod127"])
def test_it_is_near_the_layer_it_came_from(
    linear: nn.Linear, x: torch.Tensor, per_channel: bool, encoding: str
) -> None:
    layer = Int8Linear.from_float(linear, per_channel=per_channel, encoding=encoding)
    scale = float(x.max() - x.min()) / 255
    # Half a step of each operand, over 48 products.
    bound = 48 * (scale * linear.weight.abs().max() + x.abs().max() * layer.weights.scale.max()) / 2
    assert ((layer(x) - linear(x)).abs() <= bound).all()


def test_static_scales_give_the_bits_of_the_oracle(linear: nn.Linear, x: torch.Tensor) -> None:
    layer = Int8Linear.from_float(linear, **STATIC)
    assert torch.equal(layer(x), expected(layer, x, 0.05, 128))


def test_dynamic_scales_are_those_of_the_tensors_range(linear: nn.Linear, x: torch.Tensor) -> None:
    layer = Int8Linear.from_float(linear)
    _, scale, zero_point, _ = quantise_on_host(x, layer.weights, None)
    assert scale == (float(x.max()) - float(x.min())) / 255
    assert torch.equal(layer(x), expected(layer, x, scale, zero_point))


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_inputs_dtype(linear: nn.Linear, x: torch.Tensor, dtype: Any) -> None:
    layer = Int8Linear.from_float(linear)
    rounded = x.to(dtype)
    assert layer(rounded).dtype is dtype
    assert torch.equal(layer(rounded), layer(rounded.float()).to(dtype))
    for value in (0.0, 3.0, -3.0):
        constant = torch.full((2, 48), value, dtype=dtype)
        assert torch.allclose(layer(constant).float(), linear(constant.float()), atol=0.06)


@for_each("shape", [(48,), (0, 48), (2, 0, 48)])
def test_any_leading_shape(linear: nn.Linear, shape: tuple[int, ...]) -> None:
    assert Int8Linear.from_float(linear)(torch.ones(shape)).shape == (*shape[:-1], 20)


@for_each("kind", ["static", "dynamic"])
@for_each("per_channel", [False, True])
@for_each("relu", [False, True])
@for_each("bias", [False, True])
def test_from_torchs_quantised_layers(
    x: torch.Tensor, kind: str, per_channel: bool, relu: bool, bias: bool
) -> None:
    theirs = quantised(kind, relu=relu, per_channel=per_channel, bias=bias)
    layer = Int8Linear.from_quantized(theirs, **STATIC)
    weights, codes = layer.weights, theirs.weight()
    assert torch.equal(weights.weight(), codes.int_repr())
    scale = codes.q_per_channel_scales() if per_channel else torch.tensor([codes.q_scale()])
    assert torch.equal(weights.scale, scale.float())
    assert (weights.zero_point is None, weights.bias is None) == (per_channel, not bias)
    y = expected(layer, x, 0.05, 128)
    assert (y < 0).any()
    assert torch.equal(layer(x), y.clamp_min(0) if relu else y)


@for_each("name", ["leaky relu", "tanh"])
def test_other_fused_activations_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"intrinsic.*Linear(LeakyReLU|Tanh)"):
        Int8Linear.from_quantized(quantised(name))


@for_each("module", [nn.Linear(2, 2), nn.ReLU()])
def test_from_quantized_refuses_what_is_not(module: nn.Module) -> None:
    with pytest.raises(TypeError, match=type(module).__name__):
        Int8Linear.from_quantized(module)
    if not isinstance(module, nn.Linear):
        with pytest.raises(TypeError, match="ReLU"):
            Int8Linear.from_float(module)  # type: ignore[arg-type]


@for_each(
    ("changed", "message"),
    [
        ({"input_scale": 0.1}, "give both"),
        ({"input_scale": 0.0, "input_zero_point": 0}, "a_scale"),
        ({"input_scale": float("nan"), "input_zero_point": 0}, "a_scale"),
        ({"input_scale": 0.1, "input_zero_point": 300}, "a_zero_point"),
        ({"encoding": "none"}, "encoding"),
    ],
)
def test_settings_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int8Linear(4, 4, **changed)


@for_each("size", [1e-30, 1e-34, 1e-38, 1e-44])
def test_tiny_inputs_count_as_zeros_at_the_latest_where_fp32_ends(
    linear: nn.Linear, x: torch.Tensor, size: float
) -> None:
    layer = Int8Linear.from_float(linear)
    assert torch.allclose(layer(x * size), linear(x * size), atol=0.05 * size)


def test_large_inputs_are_exact_or_refused(linear: nn.Linear, x: torch.Tensor) -> None:
    layer = Int8Linear.from_float(linear)
    for size in (1e30, 1e34):
        assert torch.allclose(layer(x * size), linear(x * size), atol=0.05 * size)
    with pytest.raises(ValueError, match="overflows fp32"):
        layer(x * 5e37)


@for_each("static", [{}, STATIC])
@for_each("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_input_among_good_ones_is_refused(
    linear: nn.Linear, x: torch.Tensor, static: dict[str, Any], bad: float
) -> None:
    layer = Int8Linear.from_float(linear, **static)
    x[1, 2, 3] = bad
    with pytest.raises(ValueError, match="NaN or INF"):
        layer(x)


def test_inputs_that_cannot_be_are_refused(linear: nn.Linear) -> None:
    layer = Int8Linear.from_float(linear)
    with pytest.raises(ValueError, match="48"):
        layer(torch.ones(2, 47))
    with pytest.raises(TypeError, match="float64"):
        layer(torch.ones(2, 48, dtype=torch.float64))
    with pytest.raises(ValueError, match="NaN or INF"):
        quantise_weight(torch.full((2, 2), torch.nan))


def test_state_dict_copy_and_pickle(linear: nn.Linear, x: torch.Tensor) -> None:
    layer = Int8Linear.from_float(linear)
    check_copies(layer, lambda: Int8Linear(48, 20), x)
    assert set(layer.state_dict()) == {*_STATE, "bias"}


@for_each("name", [*_STATE, "bias"])
def test_a_state_dict_without_a_part_is_refused_and_changes_nothing(
    linear: nn.Linear, x: torch.Tensor, name: str
) -> None:
    state = dict(Int8Linear.from_float(linear).state_dict())
    loaded = Int8Linear(48, 20)
    before = loaded(x)
    lacking = {key: value for key, value in state.items() if key != name}
    with pytest.raises(RuntimeError, match=f"Missing.*{name}"):
        loaded.load_state_dict(lacking)
    assert torch.equal(loaded(x), before)
    kept = loaded.state_dict()[name]
    loaded.load_state_dict(lacking, strict=False)
    assert torch.equal(loaded.state_dict()[name], kept)


def test_a_bias_is_not_given_to_a_layer_without(linear: nn.Linear) -> None:
    state = Int8Linear.from_float(linear).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected.*bias"):
        Int8Linear(48, 20, bias=False).load_state_dict(state)


def test_a_state_dict_carries_static_scales_zero_points_and_relu(
    linear: nn.Linear, x: torch.Tensor
) -> None:
    layer = Int8Linear.from_quantized(quantised(relu=True), **STATIC)
    loaded = Int8Linear(48, 20)
    loaded.load_state_dict(layer.state_dict())
    assert (loaded.input_scale, loaded.input_zero_point) == (0.05, 128)
    assert torch.equal(loaded(x), layer(x))
    layer.load_state_dict(Int8Linear.from_float(linear).state_dict())
    assert layer.input_scale is None
    assert torch.equal(layer(x), Int8Linear.from_float(linear)(x))


def test_a_damaged_layer_can_be_loaded_again(linear: nn.Linear, x: torch.Tensor) -> None:
    layer = Int8Linear.from_float(linear)
    clean, state = layer(x), layer.state_dict()
    layer.weights.gemm.buffer[:64] ^= 64
    layer.load_state_dict(state)
    assert torch.equal(layer(x), clean)


def test_scrubbing_heals_and_names_the_layer(linear: nn.Linear, x: torch.Tensor) -> None:
    model = Model(linear)
    clean = model(x)
    assert not model.layer.scrub()
    model.layer.weights._bias.padded[3] += 1
    model.layer.weights.gemm.buffer[model.layer.weights.gemm.address(5, 6)] ^= 64
    with protect(model):
        assert model.layer.scrub()
    assert [event.op for event in events.recent()] == ["layer/int8_gemm/forward"] * 2
    assert torch.equal(model(x), clean)
    assert not model.layer.scrub()


class Model(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.layer = Int8Linear.from_float(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_fault_is_corrected_and_named_and_the_report_covers_the_layer(
    linear: nn.Linear, x: torch.Tensor
) -> None:
    model = Model(linear)
    check_fault(model, model.layer, x, "layer/int8_gemm/forward")
    with protect(model) as protection:
        model(x)
        (site,) = [site for site in protection.report().sites if "int8" in site.site]
    assert (site.site, site.covered) == ("layer/int8_gemm/forward", True)
    assert (site.calls, site.rows, site.suspects) == (1, 15, 0)


@for_each(
    ("stage", "bit", "index", "kind"),
    [
        ("output", 20, (3, 4), "gemm_fault"),
        ("output", 31, None, "gemm_fault"),
        ("operand", 6, (5,), "operand_fault"),
        ("checksum", 3, (0, 2), "checksum_fault"),
    ],
)
def test_the_injector_reaches_accumulators_weights_and_checks(
    linear: nn.Linear, x: torch.Tensor, stage: str, bit: int, index: Any, kind: str
) -> None:
    model = Model(linear)
    clean = model(x)
    fault = Fault(
        step=1,
        rank=0,
        kind="bitflip",
        site=stage,
        op="layer/int8_gemm/forward",
        bit=bit,
        index=index,
    )
    with protect(model), Injector(model, [fault], rank=0).step(1):
        assert torch.equal(model(x), clean)
    assert kinds() == ["injected", kind]


def test_protect_lists_torchs_own_quantised_layer(linear: nn.Linear, x: torch.Tensor) -> None:
    model = nn.Sequential(quantised("dynamic"))
    with protect(model) as protection:
        model(x)
        rows = [site for site in protection.report().sites if "quantized" in site.site]
    if not rows:
        pytest.skip("only the native core lists torch's quantised products")
    assert not any(row.covered for row in rows)

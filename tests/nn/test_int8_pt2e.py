"""Graphs as PT2E leaves them: made by torchao where it is installed, and by hand."""

import copy
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from case_loops import for_each
from quantised_cases import check_fault
from torch import fx, nn

from holdfast import ConfigError
from holdfast.abft.int8_gemm.quantise import quantise_on_host
from holdfast.nn import from_pt2e
from holdfast.protection import protect

UINT8, INT8 = (0, 255, torch.uint8), (-128, 127, torch.int8)
OPS = torch.ops.quantized_decomposed


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(nn.Module):
    """Linear layers, and a product that PT2E does not quantise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def inputs() -> torch.Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


def by_torchao(model: nn.Module, *, dynamic: bool) -> fx.GraphModule:
    pytest.importorskip("torchao", reason="torchao, which has PT2E since torch 2.10, is absent")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    exported = torch.export.export(model.eval(), (inputs(),)).module()
    prepared = prepare_pt2e(exported, quantizer)
    prepared(inputs())
    converted: fx.GraphModule = convert_pt2e(prepared)
    return converted


@for_each("dynamic", [False, True])
def test_a_model_of_torchao_keeps_its_values(dynamic: bool) -> None:
    floats = Model()
    model, exact = by_torchao(floats, dynamic=dynamic), floats(inputs())
    theirs = model(inputs())
    done = from_pt2e(model)
    assert (done.covered, done.left) == (["first", "second"], {})
    ours = done.model(inputs())
    assert 0 < (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    assert not any(name.startswith("_frozen") for name in done.model.state_dict())


def by_hand(
    codes: tuple[Any, ...] = UINT8,
    *,
    axis: int | None = 0,
    dynamic: bool = False,
    weight_dtype: torch.dtype = torch.int8,
    other_scale: bool = False,
    bias: bool = True,
    twice: bool = False,
) -> fx.GraphModule:
    """One linear product between the operators that ``convert_pt2e`` writes."""
    torch.manual_seed(0)
    root = nn.Module()
    root.register_buffer("_frozen_param0", torch.randint(-127, 128, (8, 16), dtype=weight_dtype))
    entries = {None: 1, 0: 8, 1: 16}[axis]
    root.register_buffer("_scale_0", torch.rand(entries) * 0.01 + 0.001)
    root.register_buffer("_zero_point_0", torch.zeros(entries, dtype=torch.long))
    root.register_buffer("bias", torch.randn(8))
    graph = fx.Graph()
    x = graph.placeholder("x")
    scale: Any = 0.02
    zero_point: Any = 3 if codes[0] == 0 else -5
    kind = "default"
    if dynamic:
        chosen = graph.call_function(OPS.choose_qparams.tensor, (x, *codes[:2], 2**-12, codes[2]))
        scale, zero_point = (graph.call_function(operator.getitem, (chosen, i)) for i in (0, 1))
        kind = "tensor"
    quantise = getattr(OPS.quantize_per_tensor, kind)
    dequantise = getattr(OPS.dequantize_per_tensor, kind)
    quantised = graph.call_function(quantise, (x, scale, zero_point, *codes))
    used = 0.03 if other_scale else scale
    given = graph.call_function(dequantise, (quantised, used, zero_point, *codes))
    weight = graph.get_attr("_frozen_param0")
    if axis is not None:
        scales = [graph.get_attr(name) for name in ("_scale_0", "_zero_point_0")]
        of_weight = (weight, *scales, axis, -128, 127, weight_dtype)
        weight = graph.call_function(OPS.dequantize_per_channel.default, of_weight)
    linear = torch.ops.aten.linear.default
    arguments = (given, weight, graph.get_attr("bias")) if bias else (given, weight)
    out = graph.call_function(linear, arguments)
    out.meta["nn_module_stack"] = {"": ("", nn.Module), "fc": ("fc", nn.Linear)}
    if twice:
        again = graph.call_function(linear, arguments)
        again.meta = dict(out.meta)
        out = graph.call_function(torch.ops.aten.add.Tensor, (out, again))
    graph.output(out)
    return fx.GraphModule(root, graph)


def exactly(model: fx.GraphModule, codes: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
    """A static product of dequantised operands in fp64."""
    zero_point = 3 if codes[0] == 0 else -5
    quantised = OPS.quantize_per_tensor(x, 0.02, zero_point, *codes)
    scale = model.get_buffer("_scale_0").double()[:, None]
    weight = model.get_buffer("_frozen_param0").double() * scale
    return (quantised.double() - zero_point) * 0.02 @ weight.T


@for_each("codes", [UINT8, INT8])
def test_static_products_are_at_least_as_near_as_the_graphs_own(codes: tuple[Any, ...]) -> None:
    model = by_hand(codes, bias=False)
    exact, theirs = exactly(model, codes, inputs()), model(inputs())
    done = from_pt2e(model)
    assert (done.covered, done.left) == (["fc"], {})
    error = (done.model(inputs()) - exact).abs().max()
    assert error <= 2 * (theirs - exact).abs().max()
    assert "fc.int8.weight" in done.model.state_dict()
    assert "_frozen_param0" not in done.model.state_dict()


@for_each("codes", [UINT8, INT8])
def test_dynamic_products_are_quantised_by_the_range_as_there(codes: tuple[Any, ...]) -> None:
    model, x = by_hand(codes, dynamic=True), inputs()
    theirs = model(x)
    chosen, zero_point = OPS.choose_qparams(x, *codes[:2], 2**-12, codes[2])
    model = from_pt2e(model).model
    layer: Any = model.get_submodule("fc.int8")
    scale, ours = quantise_on_host(x.reshape(-1, 16), layer.weights, None)[1:3]
    assert abs(scale / float(chosen) - 1) < 2.0**-22
    assert ours == int(zero_point) - codes[0]
    # A step of an input, where one of the two scales makes a tie of it.
    weight = layer.weights.weight().float() * layer.weights.scale[:, None]
    assert ((model(x) - theirs).abs() <= scale * weight.abs().amax(1) * 1.001).all()


def test_a_layer_that_is_called_twice_has_two_names() -> None:
    model = by_hand(twice=True)
    expected = model(inputs())
    done = from_pt2e(model)
    assert done.covered == ["fc", "fc"]
    assert torch.allclose(done.model(inputs()), expected, rtol=1e-5, atol=1e-5)
    assert {"fc.int8", "fc.int81"} <= {name for name, _ in done.model.named_modules()}


@for_each(
    ("changed", "reason"),
    [
        ({"codes": (0, 127, torch.uint8)}, "256 are verified"),
        ({"axis": 1}, "axis 1"),
        ({"axis": None}, "weight is not quantised"),
        ({"weight_dtype": torch.int16}, "torch.int16"),
        ({"other_scale": True}, "another scale"),
    ],
)
def test_what_does_not_fit_is_left_as_it_is_and_said(changed: dict[str, Any], reason: str) -> None:
    model = by_hand(**changed)
    before = str(model.graph)
    done = from_pt2e(model)
    assert done.covered == []
    assert reason in done.left["fc"]
    assert str(done.model.graph) == before
    assert "_frozen_param0" in done.model.state_dict()


def test_only_graphs_are_taken() -> None:
    with pytest.raises(TypeError, match=r"convert_pt2e .*Linear"):
        from_pt2e(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_converted_model_is_copied_moved_and_loaded_as_a_module() -> None:
    model, x = from_pt2e(by_hand()).model, inputs()
    expected, state = model(x), model.state_dict()
    assert "fc.int8.packed" in dict(model.named_buffers())
    other = copy.deepcopy(model).to("meta")
    with pytest.raises(ConfigError, match="no values"):
        other(x)
    other.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(other(x), expected)
    layer: Any = other.get_submodule("fc.int8")
    layer.register_source(lambda output: state["fc.int8.weight"][output])
    layer.weights.gemm.buffer[:99] ^= 90
    assert torch.equal(other(x), expected)


def test_a_fault_is_corrected_and_named_and_without_the_check_gets_out() -> None:
    model = from_pt2e(by_hand()).model
    check_fault(model, model.get_submodule("fc.int8"), inputs(), "fc.int8/int8_gemm/forward")


def test_unconverted_its_float_products_are_covered_by_row_checksums() -> None:
    model = by_hand()
    with protect(model) as protection:
        model(inputs())
        rows = protection.report().sites
    assert [row.method for row in rows] == ["row checksums"]

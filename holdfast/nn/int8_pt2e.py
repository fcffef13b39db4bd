"""Verified layers in a model that PT2E has quantised.

``torch.export`` and ``torchao.quantization.pt2e`` leave a graph of floating-point products between
``quantized_decomposed`` operators. Each linear product of 8-bit activations and int8 weights in it
becomes an ``Int8Linear``; torchao itself is not needed for that.
"""

import itertools
import operator
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import fx

from holdfast.abft.int8_gemm.quantise import LEVELS
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.errors import ConfigError
from holdfast.nn.int8_linear import Int8Linear

_OPS = "quantized_decomposed"
_DYNAMIC = f"{_OPS}::choose_qparams"
_RANGES = {(0, LEVELS, torch.uint8): 0, (-128, 127, torch.int8): 128}  # offset to uint8


@dataclass
class Converted:
    """Result of ``from_pt2e``.

    Args:
        model: The graph, changed in place.
        covered: Names of the products that are verified now.
        left: Names of the products left unchanged, with the reason.
    """

    model: fx.GraphModule
    covered: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class _Unfit(Exception):
    """Error with the reason why a product cannot be converted."""


def from_pt2e(model: fx.GraphModule, *, encoding: str = "digits") -> Converted:
    """Replace the quantised linear products of a ``convert_pt2e`` graph by ``Int8Linear`` layers.

    Products are computed exactly in integers, while the graph multiplies dequantised floats, so
    that outputs differ by the rounding of the latter. Static activations keep their quantisation;
    dynamic ones are quantised by their range, which in PT2E is at least 255 · 2⁻¹².

    Args:
        model: Graph from ``convert_pt2e``; changed in place, which cannot be undone.
        encoding: Kind of weight checksum, see ``Int8Weights``.

    Returns:
        The model, and the names of verified and unverified products. Not verified: convolutions,
        weights not of 8 bits or scaled per input, and activations with ``reduce_range``.

    Guarantees, Not covered: those of ``Int8Linear``.

    Raises:
        TypeError: ``model`` is not a graph module of PT2E.
    """
    if not isinstance(model, fx.GraphModule):
        raise TypeError(
            f"from_pt2e takes the GraphModule that convert_pt2e returns, not "
            f"{type(model).__name__}: quantise the model with torchao.quantization.pt2e first"
        )
    done = Converted(model)
    constants = _constants(model)
    products = [node for node in model.graph.nodes if _named(node, "aten::linear")]
    for node in products:
        name = _name(node)
        try:
            layer, source = _layer(model, node, encoding)
        except _Unfit as reason:
            done.left[name] = str(reason)
            continue
        _put(model, node, layer, source, name)
        done.covered.append(name)
    model.graph.eliminate_dead_code()
    model.graph.lint()
    for taken in constants - _constants(model):  # the new layers hold these codes and scales
        delattr(model, taken)
    model.recompile()
    return done


def _named(node: object, *names: str) -> TypeGuard[fx.Node]:
    """Return whether a node calls one of these operators, in any overload."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.op == "call_function" and node.target._schema.name in names


def _name(node: fx.Node) -> str:
    """Return the name of the original module that contained a product."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or node.name


def _layer(model: fx.GraphModule, node: fx.Node, encoding: str) -> tuple[Int8Linear, fx.Node]:
    """Make an ``Int8Linear`` for a product; return it and the node of its floating-point input."""
    given, weight, *rest = node.args
    source, scale, zero_point = _activations(model, given)
    codes, of_codes, zero = _weight(model, weight)
    bias = _value(model, rest[0]) if rest and rest[0] is not None else None
    try:
        weights = Int8Weights(codes, of_codes, zero, bias=bias, encoding=encoding)
        layer = Int8Linear.of(weights, input_scale=scale, input_zero_point=zero_point)
    except (TypeError, ValueError, ConfigError) as error:
        raise _Unfit(str(error)) from error
    return layer, source


def _activations(model: fx.GraphModule, node: object) -> tuple[fx.Node, float | None, int | None]:
    """Return the floating-point input of a product and its quantisation (None if dynamic)."""
    if not _named(node, f"{_OPS}::dequantize_per_tensor"):
        raise _Unfit("its input is not quantised")
    quantised = node.args[0]
    if not _named(quantised, f"{_OPS}::quantize_per_tensor") or (
        quantised.args[1:] != node.args[1:]
    ):
        raise _Unfit("its input is quantised elsewhere, or by another scale")
    source, scale, zero_point, *codes = cast(tuple[Any, ...], quantised.args)
    added = _RANGES.get(tuple(codes))
    if added is None:
        raise _Unfit(f"its input has the codes {codes}: 256 are verified, int8 or uint8")
    if _named(scale.args[0] if isinstance(scale, fx.Node) and scale.args else None, _DYNAMIC):
        return source, None, None
    return source, float(_value(model, scale)), int(_value(model, zero_point)) + added


def _weight(model: fx.GraphModule, node: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the int8 values, scale and zero point of a product's weight."""
    if not _named(node, f"{_OPS}::dequantize_per_channel", f"{_OPS}::dequantize_per_tensor"):
        raise _Unfit("its weight is not quantised")
    by_output = _named(node, f"{_OPS}::dequantize_per_channel")
    if by_output and node.args[3] != 0:
        raise _Unfit(f"its weight has scales along axis {node.args[3]}: only those by output fit")
    codes, scale, zero_point = (_value(model, each) for each in node.args[:3])
    return codes, scale, zero_point


def _value(model: fx.GraphModule, node: object) -> torch.Tensor:
    """Return the value of a constant node of the graph."""
    if not isinstance(node, fx.Node):
        return torch.as_tensor(node)
    if node.op != "get_attr":
        raise _Unfit(f"{node.name} is computed, not stored: convert with fold_quantize=True")
    found: torch.Tensor = operator.attrgetter(str(node.target))(model)
    return found.detach()


def _put(
    model: fx.GraphModule, node: fx.Node, layer: Int8Linear, source: fx.Node, name: str
) -> None:
    known = {path for path, _ in model.named_modules()}
    names = (f"{name}.int8{number or ''}" for number in itertools.count())
    target = next(each for each in names if each not in known)
    model.add_submodule(target, layer)
    with model.graph.inserting_before(node):
        call = model.graph.call_module(target, (source,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    model.graph.erase_node(node)


def _constants(model: fx.GraphModule) -> set[str]:
    """Return the names of the buffers that the graph itself stores and reads."""
    read = {str(node.target) for node in model.graph.nodes if node.op == "get_attr"}
    return read & {name for name, _ in model.named_buffers(recurse=False)}

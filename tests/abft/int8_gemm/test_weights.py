"""Packing: digits, copies, and what is refused by name before kernels exceed their limits."""

import copy
import pickle
from typing import Any

import pytest
import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st
from int8_cases import BACKENDS, Layer, has_native

from holdfast import native
from holdfast.abft.int8_gemm.encoding import (
    ENCODINGS,
    from_digits,
    largest_accumulator,
    locate,
    signed_digits,
)
from holdfast.abft.int8_gemm.op import int8_linear
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.errors import ConfigError


@given(st.lists(st.integers(-(1 << 38), 1 << 38), min_size=1, max_size=20))
def test_digits_give_the_integers_back(values: list[int]) -> None:
    digits = signed_digits(torch.tensor(values))
    assert digits.dtype is torch.int8
    assert from_digits(digits).tolist() == values


@for_each(("value", "count"), [(0, 1), (127, 1), (128, 2), (-8388608, 3)])
def test_as_few_digits_as_the_largest_needs(value: int, count: int) -> None:
    assert len(signed_digits(torch.tensor([value]))) == count


@given(st.integers(-(1 << 31), 1 << 31).filter(bool), st.integers(0, 99))
def test_a_single_error_is_located(error: int, column: int) -> None:
    assert locate(error, (column + 1) * error, 100) == column
    assert locate(error, 101 * error, 100) is None
    assert locate(error, 0, 100) is None
    assert locate(0, error, 100) is None


def weights(**changed: Any) -> Int8Weights:
    """A small weight with one argument changed."""
    given = {"weight": torch.ones((4, 6), dtype=torch.int8), "scale": 0.1} | changed
    return Int8Weights(given.pop("weight"), given.pop("scale"), **given)


@for_each(
    ("changed", "error", "message"),
    [
        ({"weight": torch.ones(4, 6)}, TypeError, "torch.int8"),
        ({"weight": torch.ones(6, dtype=torch.int8)}, ValueError, r"\[outputs, inputs\]"),
        ({"weight": torch.ones((0, 6), dtype=torch.int8)}, ValueError, r"\(0, 6\)"),
        ({"weight": torch.ones((1, 65794), dtype=torch.int8)}, ConfigError, "65793"),
        ({"weight": torch.ones((65537, 1), dtype=torch.int8)}, ConfigError, "65536"),
        ({"scale": 0.0}, ValueError, "positive"),
        ({"scale": -1.0}, ValueError, "positive"),
        ({"scale": float("nan")}, ValueError, "finite"),
        ({"scale": float("inf")}, ValueError, "finite"),
        ({"scale": torch.ones(3)}, ValueError, "3 elements"),
        ({"zero_point": 128}, ValueError, "-128 to 127"),
        ({"zero_point": torch.tensor([0.5])}, TypeError, "integers"),
        ({"zero_point": torch.zeros(5)}, ValueError, "5 elements"),
        ({"bias": torch.ones(3)}, ValueError, r"\(3,\)"),
        ({"bias": torch.full((4,), float("nan"))}, ValueError, "NaN"),
        ({"encoding": "crc"}, ValueError, "mod127"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        weights(**changed)


def test_zero_points_lower_the_limit() -> None:
    wide = torch.ones((1, 33026), dtype=torch.int8)
    weights(weight=wide)
    with pytest.raises(ConfigError, match="33025"):
        weights(weight=wide, zero_point=1)


GOOD = torch.zeros((2, 6), dtype=torch.uint8)


@for_each(
    ("changed", "error", "message"),
    [
        ({"a": GOOD.to(torch.int8)}, TypeError, "uint8"),
        ({"a": GOOD[:, :5]}, ValueError, r"\[M, 6\]"),
        ({"a": GOOD[0]}, ValueError, r"\(6,\)"),
        ({"a": torch.zeros((6, 2), dtype=torch.uint8).T}, ValueError, "contiguous"),
        ({"a": torch.zeros((2, 12), dtype=torch.uint8)[:, ::2]}, ValueError, "contiguous"),
        ({"a_scale": 0.0}, ValueError, "a_scale"),
        ({"a_scale": float("nan")}, ValueError, "a_scale"),
        ({"a_scale": float("inf")}, ValueError, "a_scale"),
        ({"a_scale": 1e38}, ValueError, "a_scale"),
        ({"a_zero_point": 256}, ValueError, "a_zero_point"),
        ({"a_zero_point": -1}, ValueError, "a_zero_point"),
        ({"out_scale": 0.0}, ValueError, "out_scale"),
        ({"out_scale": float("nan")}, ValueError, "out_scale"),
        ({"out_scale": 1.0, "out_zero_point": 300}, ValueError, "out_zero_point"),
        ({"dtype": torch.float64}, TypeError, "float64"),
    ],
)
def test_what_cannot_be_multiplied_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"a": GOOD, "a_scale": 0.1} | changed
    with pytest.raises(error, match=message):
        int8_linear(arguments.pop("a"), weights(), **arguments)


@for_each("backend", BACKENDS)
@for_each("encoding", ENCODINGS)
def test_the_weight_comes_back(backend: str, encoding: str) -> None:
    layer = Layer(backend=backend, encoding=encoding)
    assert torch.equal(layer.weights.weight(), layer.weight)
    assert layer.weights.checks.numel() + layer.weights.weighted.numel() <= layer.k * (3 + 5)
    for j in (0, 69):
        assert torch.equal(layer.weights.gemm.column(j), layer.weight[j])
    flat = layer.weights.gemm.buffer
    at = [layer.weights.gemm.address(k, 5) for k in range(layer.k)]
    assert torch.equal(flat[at], layer.weight[5])


@for_each("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
@for_each("encoding", ENCODINGS)
def test_copies_compute_the_same_and_share_nothing(copied: Any, encoding: str) -> None:
    layer = Layer(encoding=encoding, zero_points=True, relu=True)
    original, layer.weights = layer.weights, copied(layer.weights)
    original.gemm.buffer.zero_()
    assert torch.equal(layer.run(), layer.expected())


def test_a_damaged_weight_is_healed_before_it_is_copied_and_never_copied_else() -> None:
    layer = Layer()
    layer.flip(1, 2)
    assert torch.equal(layer.weights.weight(), layer.weight)
    for k, j in ((1, 2), (1, 9), (5, 2), (5, 9)):
        layer.flip(k, j)
    with pytest.raises(ConfigError, match="beyond healing"):
        layer.weights.weight()


needs_native = pytest.mark.skipif(not has_native(), reason="FBGEMM is not in this build")


def test_weights_that_fbgemm_cannot_count_are_refused_before_they_are_packed() -> None:
    weight = torch.ones((), dtype=torch.int8).expand(65536, 32768)  # takes no memory
    with pytest.raises(ConfigError, match=r"2\*\*31"):
        Int8Weights(weight, 0.1)


def native_gemm(inner: int = 64, width: int = 32, **changed: Any) -> Any:
    """The native product, with one setting changed."""
    assert native.core is not None
    given = {
        "b": torch.ones((), dtype=torch.int8).expand(inner, width),  # takes no memory
        "columns": width,
        "modular": False,
        "digits": torch.zeros((1, inner + 64), dtype=torch.int8),
        "ones": torch.ones((1, inner + 64), dtype=torch.int8),
        "column_sums": torch.zeros(width + 64, dtype=torch.int32),
        "b_scale": torch.ones(width + 64),
        "b_zero_point": None,
        "bias": torch.zeros(width + 64),
        "relu": False,
    }
    assert changed.keys() <= given.keys()
    return native.core.Int8Gemm(*(given | changed).values())


@needs_native
@for_each(
    ("changed", "error", "message"),
    [
        ({"b": torch.ones(64, 32)}, TypeError, "give int8"),
        ({"b": torch.ones(64, dtype=torch.int8)}, ValueError, "give .K"),
        ({"b": torch.ones((), dtype=torch.int8).expand(65536, 32)}, ValueError, "digits"),
        ({"columns": 1 << 20}, ValueError, "1048576"),
        ({"columns": 31}, ValueError, "31"),
        ({"modular": True}, ValueError, "check column"),
        ({"digits": torch.zeros((1, 8), dtype=torch.int8)}, ValueError, "digits"),
        ({"digits": torch.zeros((4, 128), dtype=torch.int8)}, ValueError, "digits"),
        ({"digits": torch.zeros((0, 128), dtype=torch.int8)}, ValueError, "digits"),
        ({"digits": torch.zeros((1, 128))}, TypeError, "digits"),
        ({"ones": torch.ones((1, 8), dtype=torch.int8)}, ValueError, "ones"),
        ({"column_sums": torch.zeros(96)}, TypeError, "column_sums"),
        ({"column_sums": torch.zeros(3, dtype=torch.int32)}, ValueError, "column_sums"),
        ({"b_scale": torch.ones(3)}, ValueError, "b_scale"),
        ({"b_scale": torch.ones(192)[::2]}, ValueError, "b_scale"),
        ({"bias": torch.ones(3)}, ValueError, "bias"),
        ({"b_zero_point": torch.zeros(3, dtype=torch.int32)}, ValueError, "b_zero_point"),
    ],
)
def test_the_binding_refuses_settings_that_do_not_fit(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    native_gemm()
    with pytest.raises(error, match=message):
        native_gemm(**changed)


@needs_native
def test_the_binding_refuses_what_fbgemm_cannot_count() -> None:
    with pytest.raises(ValueError, match=r"2\^31 bytes"):
        native_gemm(65536, 32768)


@needs_native
def test_the_binding_refuses_the_scales_of_another_matrix() -> None:
    wide = Int8Weights(torch.ones((70, 64), dtype=torch.int8), 1.0)
    a = torch.ones((4, 64), dtype=torch.uint8)
    scales = native_gemm().scales(1.0, 0, 0.0, 0)
    with pytest.raises(ValueError, match="32 columns"):
        wide.gemm.multiply(a, torch.empty(4, 70), scales, True)
    with pytest.raises(ValueError, match="zero points"):
        native_gemm().scales(1.0, 256, 0.0, 0)


@for_each("backend", BACKENDS)
@for_each("bias", [None, torch.full((4,), 1e3)])
def test_an_output_scale_that_overflows_is_refused(backend: str, bias: Any) -> None:
    layer = Layer(backend=backend)
    scale = 1e3 if bias is None else 1e-3
    layer.weights = Int8Weights(torch.ones((4, 100), dtype=torch.int8), scale, bias=bias)
    given: dict[str, Any] = {"a_scale": 1.0, "out_zero_point": 100}
    with pytest.raises(ValueError, match="out_scale"):
        int8_linear(layer.a.zero_(), layer.weights, out_scale=1e-37, **given)
    out = int8_linear(layer.a, layer.weights, out_scale=1e-30, **given)
    assert (out == (100 if bias is None else 255)).all()


def test_an_input_scale_may_be_as_large_as_every_output_is_finite() -> None:
    weights = Int8Weights(torch.full((4, 64), -128, dtype=torch.int8), 1.0)
    a = torch.full((2, 64), 255, dtype=torch.uint8)
    limit = torch.finfo(torch.float32).max / largest_accumulator(64, shifted=False)
    assert int8_linear(a, weights, a_scale=limit * 0.999).isfinite().all()
    with pytest.raises(ValueError, match="overflows fp32"):
        int8_linear(a, weights, a_scale=limit * 1.001)

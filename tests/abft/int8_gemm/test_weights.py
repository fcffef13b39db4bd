"""Packing: digits, refusals with their limits, copies, and what is kept in memory."""

import copy
import pickle
from typing import Any

import pytest
import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st
from int8_cases import BACKENDS, Layer

from holdfast.abft.int8_gemm.encoding import ENCODINGS, from_digits, locate, signed_digits
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
    buffer, gemm = layer.weights.gemm.buffer, layer.weights.gemm
    buffer[gemm.address(1, 2)] ^= 1
    assert torch.equal(layer.weights.weight(), layer.weight)
    buffer[gemm.address(1, 2)] ^= 1
    buffer[gemm.address(1, 3)] ^= 4
    buffer[gemm.address(1, 9)] ^= 16
    with pytest.raises(ConfigError, match="beyond healing"):
        layer.weights.weight()


def test_what_the_checks_take() -> None:
    layer = Layer(n=1024, k=512)
    kept = layer.weights.checks.numel() + layer.weights.weighted.numel()
    assert kept <= 512 * (3 + 5)

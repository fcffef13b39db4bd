"""What kernels would read or compute beyond their limits is refused, by name, before they run."""

from typing import Any

import pytest
import torch
from case_loops import for_each
from int8_cases import BACKENDS, Layer, has_native

from holdfast import native
from holdfast.abft.int8_gemm.encoding import largest_accumulator
from holdfast.abft.int8_gemm.op import int8_linear
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.errors import ConfigError

needs_native = pytest.mark.skipif(not has_native(), reason="FBGEMM is not in this build")


def test_weights_that_fbgemm_cannot_count_are_refused_before_they_are_packed() -> None:
    weight = torch.ones((), dtype=torch.int8).expand(65536, 32768)  # takes no memory
    with pytest.raises(ConfigError, match=r"2\*\*31"):
        Int8Weights(weight, 0.1)


def native_gemm(inner: int = 64, **changed: Any) -> Any:
    """The native product on 32 columns, with one setting changed."""
    assert native.core is not None
    given = {
        "b": torch.ones((inner, 32), dtype=torch.int8),
        "columns": 32,
        "modular": False,
        "digits": torch.zeros((1, inner + 64), dtype=torch.int8),
        "ones": torch.ones((1, inner + 64), dtype=torch.int8),
        "column_sums": torch.zeros(96, dtype=torch.int32),
        "b_scale": torch.ones(96),
        "b_zero_point": None,
        "bias": torch.zeros(96),
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
    assert native.core is not None
    n = 32768
    with pytest.raises(ValueError, match=r"2\^31 bytes"):
        native.core.Int8Gemm(
            torch.ones((), dtype=torch.int8).expand(65536, n),
            n,
            False,
            torch.zeros((1, 65600), dtype=torch.int8),
            torch.ones((1, 65600), dtype=torch.int8),
            torch.zeros(n + 64, dtype=torch.int32),
            torch.ones(n + 64),
            None,
            torch.zeros(n + 64),
            False,
        )


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

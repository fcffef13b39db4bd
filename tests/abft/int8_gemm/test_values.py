"""Every option gives the bits of 64-bit integers, whoever multiplies, however many threads."""

from typing import Any

import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st
from int8_cases import BACKENDS, OUTPUTS, Layer
from struck import kinds

from holdfast.abft.int8_gemm.encoding import ENCODINGS
from holdfast.abft.int8_gemm.op import int8_linear

FLAGS = ["per_channel", "zero_points", "biased", "relu"]


@for_each("backend", BACKENDS)
@for_each("encoding", ENCODINGS)
@for_each("output", OUTPUTS)
@for_each("flags", [[], *([flag] for flag in FLAGS), FLAGS])
def test_every_option_is_equal_to_the_oracle(
    backend: str, encoding: str, output: dict[str, Any], flags: list[str]
) -> None:
    options = {flag: flag in flags for flag in FLAGS}
    layer = Layer(backend=backend, encoding=encoding, output=output, **options)
    assert torch.equal(layer.run(), layer.expected())
    assert torch.equal(layer.run(verify=False), layer.expected())
    assert not kinds()


@given(
    m=st.sampled_from([0, 1, 2, 3, 5, 63, 64, 65]) | st.integers(1, 70),
    n=st.sampled_from([1, 15, 16, 17, 47, 48, 49, 96]) | st.integers(1, 130),
    k=st.sampled_from([1, 3, 4, 63, 64, 65, 511, 512, 513]) | st.integers(1, 140),
    seed=st.integers(0, 1 << 30),
    per_channel=st.booleans(),
    zero_points=st.booleans(),
    biased=st.booleans(),
    relu=st.booleans(),
    encoding=st.sampled_from(ENCODINGS),
    backend=st.sampled_from(BACKENDS),
    a_zero_point=st.sampled_from([0, 1, 128, 255]),
    output=st.sampled_from(OUTPUTS),
)
def test_every_shape_is_equal_to_the_oracle(**options: Any) -> None:
    layer = Layer(**options)
    assert torch.equal(layer.run(), layer.expected())
    assert not kinds()


@for_each("shape", [(1, 4096, 300), (200, 300, 520), (800, 130, 64), (2, 64, 17000)])
@for_each("zero_points", [False, True])
def test_threads_do_not_change_a_bit(shape: tuple[int, int, int], zero_points: bool) -> None:
    layer = Layer(*shape, zero_points=zero_points)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(layer.run(), layer.expected())
    assert not kinds()


@for_each("backend", BACKENDS)
@for_each("value", [-128, 127])
@for_each("activation", [0, 255])
def test_the_extremes_of_every_operand(backend: str, value: int, activation: int) -> None:
    layer = Layer(4, 300, 2000, backend=backend)
    layer.weight.fill_(value)
    layer.a.fill_(activation)
    layer.weights = layer.pack()
    assert torch.equal(layer.run(), layer.expected())
    assert not kinds()


@for_each("rows", [[], [0], [8], list(range(9))])
@for_each("threads", [1, 2])
def test_pairs_of_products_that_16_bits_do_not_hold(rows: list[int], threads: int) -> None:
    """Processors without VNNI add them up in 16 bits: what exceeds 127 is multiplied apart."""
    layer = Layer(9, 300, 1024)
    layer.weight.fill_(127)
    layer.a.fill_(127)
    layer.a[rows, 5:7] = 255
    layer.weights = layer.pack()
    torch.set_num_threads(threads)
    assert torch.equal(layer.run(), layer.expected())
    assert not kinds()


def test_the_widest_rows_that_three_digits_hold() -> None:
    layer = Layer(2, 65536, 8)
    layer.weight[:, 0], layer.weight[:, 1], layer.a[0] = -128, 127, 255
    layer.weights = layer.pack()
    assert len(layer.weights.checks) == 3
    assert torch.equal(layer.run(), layer.expected())
    assert not kinds()


@for_each("output", OUTPUTS)
def test_ties_and_saturation_of_the_output(output: dict[str, Any]) -> None:
    layer = Layer(64, 40, 3, biased=False, per_channel=False, a_zero_point=0, output=output)
    layer.scale.fill_(0.5 / 0.02)
    layer.weights = layer.pack()
    assert torch.equal(layer.run(), layer.expected())
    layer.scale.fill_(1e30)
    layer.weights = layer.pack()
    assert torch.equal(layer.run(), layer.expected())


def test_scales_are_prepared_once_and_again_when_they_change() -> None:
    layer = Layer()
    first = layer.weights.scales(0.02, 7, 0.0, 0)
    assert layer.weights.scales(0.02, 7, 0.0, 0) is first
    other = int8_linear(layer.a, layer.weights, a_scale=0.04, a_zero_point=7)
    assert not torch.equal(other, layer.expected())
    assert torch.equal(layer.run(), layer.expected())

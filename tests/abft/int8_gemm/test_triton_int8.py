"""The pass on the device gives plain torch's bits and suspects the same rows."""

from functools import partial

import torch
from case_loops import for_each
from int8_cases import OUTPUTS, Layer
from triton_device import MARKS

from holdfast.abft.int8_gemm.cuda import TritonInt8Gemm
from holdfast.abft.int8_gemm.encoding import ENCODINGS
from holdfast.abft.int8_gemm.reference import ReferenceInt8Gemm

pytestmark = MARKS

CALLS = [
    {"m": 5, "n": 70, "k": 33},
    {"m": 3, "n": 2050, "k": 8, "relu": True},
    {"m": 4, "n": 1, "k": 16, "zero_points": True},
    {"m": 6, "n": 257, "k": 40, "zero_points": True, "per_channel": True, "relu": True},
]


def both(
    layer: Layer, output: dict[str, object], strike: int | None = None
) -> list[tuple[torch.Tensor, list[int]]]:
    """Output and suspected rows by plain torch and by the kernel; a bit of C may be flipped."""
    gemm = layer.weights.gemm
    assert isinstance(gemm, ReferenceInt8Gemm)
    dtype = torch.uint8 if "out_scale" in output else output.get("dtype", torch.float32)
    scale, zero = output.get("out_scale", 0.0), output.get("out_zero_point", 0)
    scales = layer.weights.scales(0.02, layer.a_zero_point, scale, zero)
    c = gemm.accumulate(layer.a)
    if strike is not None:
        c[1, layer.n // 2] ^= 1 << strike
    found = []
    for finish in (gemm.finish, partial(TritonInt8Gemm.finish, gemm)):
        out = torch.empty((layer.m, layer.n), dtype=dtype)
        said = finish(c, layer.a, out, scales, True)
        found.append((out, [] if said is None else said[0].tolist()))
    return found


@for_each("encoding", ENCODINGS)
@for_each("output", OUTPUTS)
@for_each("call", CALLS)
def test_the_bits_of_plain_torch(
    call: dict[str, int], output: dict[str, object], encoding: str
) -> None:
    layer = Layer(**call, encoding=encoding, backend="torch")
    (expected, clean), (given, suspects) = both(layer, output)
    assert torch.equal(expected, given)
    assert clean == suspects == []


@for_each("encoding", ENCODINGS)
@for_each("bit", [0, 7, 16, 30])
def test_any_flip_of_an_accumulator_is_suspected(bit: int, encoding: str) -> None:
    layer = Layer(5, 300, 20, encoding=encoding, backend="torch")
    (_, expected), (_, suspects) = both(layer, {}, bit)
    assert expected == suspects == [1]


def test_without_the_check_the_flip_gets_out() -> None:
    layer = Layer(5, 300, 20, backend="torch")
    gemm, out = layer.weights.gemm, torch.empty(5, 300)
    scales = layer.weights.scales(0.02, layer.a_zero_point, 0.0, 0)
    c = gemm.accumulate(layer.a)
    c[1, 150] ^= 1 << 20
    assert TritonInt8Gemm.finish(gemm, c, layer.a, out, scales, False) is None
    assert not torch.equal(out, layer.expected())

"""Whatever is packed and multiplied: the oracle's bits, or an error that names what is wrong."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_loops import fuzz_after
from hypothesis import given
from hypothesis import strategies as st
from int8_cases import BACKENDS, OUTPUTS
from struck import kinds

from holdfast.abft.int8_gemm.encoding import ENCODINGS, LARGEST_INNER, LARGEST_INNER_SHIFTED
from holdfast.abft.int8_gemm.op import int8_linear
from holdfast.abft.int8_gemm.reference import int8_linear_reference
from holdfast.abft.int8_gemm.weights import Int8Weights
from holdfast.errors import ConfigError

REFUSALS = (ValueError, TypeError, ConfigError)
INF, NAN = float("inf"), float("nan")
GOOD_SCALES = [0.01, 1.0, 3, True, 1e-30, 1e30]
ODD_SCALES = [0.0, -0.0, -1.0, NAN, INF, -INF, 1e-45, 1e-38, 1e38, 1e300, 1e-300, 10**400]
ODD_POINTS = [-129, 128, 255, 256, -1, 1 << 31, 1 << 32, 1 << 62, 1 << 70, 0.5, NAN, INF, 1j]
NO_NUMBERS = ["0.1x", None, [], torch.ones(3), torch.ones(1, device="meta"), 1 + 1j]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "sliced": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "strided": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
}
ODD_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda x: x.float(),
    "int16": lambda x: x.short(),
    "complex": lambda x: x.to(torch.complex64),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8),
    "vector": lambda x: x.flatten(),
    "cube": lambda x: x[None],
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "meta": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "nothing": lambda x: None,
    "huge": lambda x: x.new_zeros(1, 1).expand(1 << 40, 1 << 20),
    "huge row": lambda x: x.new_zeros(1, 1).expand(1, 1 << 50),
}


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype) -> Any:
    """Mostly a matrix in some layout; else something that is none."""
    info = torch.iinfo(dtype)
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    values = torch.randint(info.min, info.max + 1, (rows, columns), dtype=dtype, generator=g)
    if draw(st.integers(0, 9)):
        return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](values)
    return ODD_TENSORS[draw(st.sampled_from(list(ODD_TENSORS)))](values)


def mostly(good: list[Any], odd: list[Any]) -> st.SearchStrategy[Any]:
    """One of the good, one time in ten one of the others."""
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(good if n else odd))


@st.composite
def entries(draw: st.DrawFn, count: int, good: list[Any], odd: list[Any]) -> Any:
    """One number, or a tensor of one for each output, of some dtype; else something odd."""
    value = draw(mostly(good, odd))
    whole = isinstance(value, int) and abs(value) < 1 << 63
    if not (whole or isinstance(value, float)) or draw(st.booleans()):
        return value
    narrow = torch.float64 if abs(value) > 3e38 else torch.float32
    dtype = torch.int64 if whole else draw(st.sampled_from([narrow, torch.float64]))
    made = torch.full((draw(mostly([1, count], [0, count + 1])),), good[0], dtype=dtype)
    made[-1:] = value
    return made


@st.composite
def packings(draw: st.DrawFn, rows: int, inner: int) -> dict[str, Any]:
    bias = draw(
        mostly(
            [None, torch.linspace(-9, 9, rows), torch.ones(rows).double(), torch.arange(rows)],
            [torch.full((rows,), each) for each in (NAN, INF)]
            + [
                torch.full((rows,), 1e300, dtype=torch.float64),
                torch.ones(rows + 1),
                torch.ones(1, rows),
            ]
            + [torch.ones(rows).to_sparse(), torch.ones(rows) + 1j, [1.0], 1.0],
        )
    )
    return {
        "weight": draw(matrices(rows, inner, torch.int8)),
        "scale": draw(entries(rows, GOOD_SCALES, ODD_SCALES + NO_NUMBERS)),
        "zero_point": draw(entries(rows, [0, 0, 5, -128, 127], ODD_POINTS + NO_NUMBERS)),
        "bias": bias,
        "relu": draw(st.booleans()),
        "encoding": draw(mostly(list(ENCODINGS), ["crc", None])),
    }


@st.composite
def calls(draw: st.DrawFn, rows: int, inner: int) -> dict[str, Any]:
    made = {
        "a": draw(matrices(rows, inner, torch.uint8)),
        "a_scale": draw(mostly([0.02, 1, torch.tensor(0.5)], ODD_SCALES + NO_NUMBERS)),
        "a_zero_point": draw(mostly([0, 7, 255, torch.tensor(3)], ODD_POINTS + NO_NUMBERS)),
        "dtype": draw(mostly([torch.float32, torch.bfloat16], [torch.float64, torch.int8, None])),
    }
    if draw(st.booleans()):
        made["out_scale"] = draw(mostly([3.7, 1e-3], ODD_SCALES + NO_NUMBERS))
        made["out_zero_point"] = draw(mostly([0, 11, 255], ODD_POINTS))
    return made


def outcome(backend: str, packing: dict[str, Any], call: dict[str, Any]) -> Any:
    packing, call = dict(packing), dict(call)
    try:
        packing["implementation"] = "reference" if backend == "torch" else None
        weights = Int8Weights(packing.pop("weight"), packing.pop("scale"), **packing)
        return int8_linear(call.pop("a"), weights, **call)
    except REFUSALS as refused:
        return refused


def oracle(packing: dict[str, Any], call: dict[str, Any]) -> torch.Tensor:
    given = {key: value for key, value in call.items() if key not in ("a", "dtype")}
    numbers = {key: value for key, value in given.items() if value is not None}  # the default
    return int8_linear_reference(
        call["a"],
        packing["weight"],
        scale=torch.as_tensor(packing["scale"]).reshape(-1),
        zero_point=torch.as_tensor(packing["zero_point"]).reshape(-1),
        bias=packing["bias"],
        relu=packing["relu"],
        dtype=call["dtype"],
        **{key: float(v) if "scale" in key else int(v) for key, v in numbers.items()},
    )


@given(data=st.data(), m=st.integers(0, 4), n=st.integers(1, 20), k=st.integers(1, 40))
def test_the_oracles_bits_or_an_error_that_says_why(
    data: st.DataObject, m: int, n: int, k: int
) -> None:
    packing, call = data.draw(packings(n, k)), data.draw(calls(m, k))
    found = {backend: outcome(backend, packing, call) for backend in BACKENDS}
    kind = {type(each) for each in found.values()}
    assert len(kind) == 1, found
    for each in found.values():
        if isinstance(each, torch.Tensor):
            assert torch.equal(each, oracle(packing, call))
        else:
            assert len(str(each)) > 15
    assert not kinds()


@given(
    rows=st.integers(0, 3),
    columns=st.integers(1, 3),
    beyond=st.integers(-1, 1),
    shifted=st.booleans(),
    a=st.sampled_from([0, 1, 254, 255]),
    w=st.sampled_from([-128, -1, 0, 127]),
    a_zero_point=st.sampled_from([0, 128, 255]),
    encoding=st.sampled_from(ENCODINGS),
    backend=st.sampled_from(BACKENDS),
    output=st.sampled_from(OUTPUTS),
)
def test_sums_as_long_as_int32_holds_are_exact_and_longer_ones_refused(
    rows: int,
    columns: int,
    beyond: int,
    shifted: bool,
    a: int,
    w: int,
    a_zero_point: int,
    encoding: str,
    backend: str,
    output: dict[str, Any],
) -> None:
    inner = beyond + (LARGEST_INNER_SHIFTED if shifted else LARGEST_INNER)
    zero_point = (127 if w < 0 else -128) if shifted else 0
    packing = {
        "weight": torch.full((columns, inner), w, dtype=torch.int8),
        "scale": 0.01,
        "zero_point": zero_point,
        "bias": None,
        "relu": False,
        "encoding": encoding,
    }
    packing["weight"][:, ::3] += 1 if w < 0 else -1
    dtype = {"dtype": torch.float32}
    call = dtype | output | {"a_scale": 0.02, "a_zero_point": a_zero_point}
    call["a"] = torch.full((rows, inner), a, dtype=torch.uint8)
    found = outcome(backend, packing, call)
    if beyond > 0:
        assert isinstance(found, ConfigError)
    else:
        assert torch.equal(found, oracle(packing, call))
    assert not kinds()


PEAK = """
import resource, torch
from holdfast.abft.int8_gemm.weights import Int8Weights
weight = torch.zeros((4096, 8192), dtype=torch.int8)
Int8Weights(weight[:64], 0.1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Int8Weights(weight, 0.1, encoding={encoding!r})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="it keeps what is freed")
@pytest.mark.parametrize("encoding", fuzz_after(ENCODINGS))
def test_packing_takes_little_more_than_the_weight_and_its_packed_form(encoding: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PEAK.format(encoding=encoding)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    weight_kib, slabs_kib = 32 << 10, 40 << 10
    copies = 3 if encoding == "digits" else 4
    assert int(ran.stdout) < copies * weight_kib + slabs_kib

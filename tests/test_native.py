"""The native passes against their plain-torch reference, on every layout."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st

from holdfast import native
from holdfast.abft.checksums.rows import self_consistent
from holdfast.abft.checksums.weights import signs
from holdfast.abft.gemm.cpu import encode, verify
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.reference import (
    as_batch,
    encode_rows_reference,
    suspect_rows,
    verify_rows_reference,
)
from holdfast.abft.thresholds import rounding
from holdfast.abft.thresholds.chains import longest_chain

if native.core is None:
    pytest.skip("the native core is not built", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("two_threads")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["rows", "transposed", "sliced", "strided", "one_row", "one_column", "one_batch"]
EXTENTS = st.one_of(st.sampled_from([1, 2, 63, 64, 65]), st.integers(1, 70))
RELATIVE = 1e-12
FAST = 16 * 2.0**-24  # the encoding sums 16- and 32-bit elements in fp32, a few at a time
tensors = st.tuples(st.integers(0, 2**31), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS))


@pytest.fixture(autouse=True, scope="module")
def configured() -> None:
    interception()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(shape: tuple[int, ...], seed: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A matrix or batch of the wanted values in the wanted layout; its neighbours are NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(dtype)
    if layout == "transposed":
        return values.mT.contiguous().mT
    if layout == "one_row":
        return values[..., :1, :].expand(shape)
    if layout == "one_column":
        return values[..., :1].expand(shape)
    if layout == "one_batch":
        return values[:1].expand(shape) if len(shape) == 3 else values
    step = {"rows": 1, "sliced": 1, "strided": 3}[layout]
    room = [2 * size * step for size in shape] if layout != "rows" else list(shape)
    memory = torch.full(room, torch.nan).to(dtype)
    view = memory[tuple(slice(0, size * step, step) for size in shape)]
    return view.copy_(values)


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor, relative: float = RELATIVE
) -> None:
    """Equal up to the rounding of a sum; NaN and INF in the same places."""
    special = ~expected.isfinite()
    torch.testing.assert_close(actual[special], expected[special], equal_nan=True)
    assert ((actual - expected).abs() <= relative * scale + 1e-300)[~special].all()


@given(k=EXTENTS, n=EXTENTS, batch=st.integers(0, 3), b_of=tensors)
def test_encoding_agrees_with_the_reference(
    k: int, n: int, batch: int, b_of: tuple[int, torch.dtype, str]
) -> None:
    b = make((batch, k, n) if batch else (k, n), *b_of)
    row_sum, statistics = encode(b)
    expected_sum, expected = encode_rows_reference(b)
    relative = RELATIVE if b.dtype == torch.float64 else FAST
    magnitude = b.double().abs()
    assert_near(row_sum, expected_sum, magnitude.sum(-1).reshape(row_sum.shape), relative)
    # z is a difference of squares of the row's mean and its noise.
    terms = rounding.growth(k, longest_chain(b.dtype))
    largest = magnitude.square().sum(-1).reshape(row_sum.shape) * (
        terms.walk + terms.repeated * k * (1 + rounding.MEAN_NOISE)
    )
    assert_near(statistics[:, :k], expected[:, :k], largest, 4 * relative)
    assert_near(statistics[:, k], expected[:, k], expected[:, k])
    assert self_consistent(row_sum, statistics)


@given(
    extents=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    batch=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    addend_of=st.sampled_from(["none", "row", "full", "column", "scalar", "strided"]),
    factors=st.tuples(*[st.sampled_from([0.0, 1.0, -2.5])] * 2),
)
def test_verification_agrees_with_the_reference(
    extents: tuple[int, int, int],
    batch: int,
    dtype: torch.dtype,
    seed: int,
    layouts: tuple[str, str, str],
    addend_of: str,
    factors: tuple[float, float],
) -> None:
    m, k, n = extents
    lead = (batch,) if batch else ()
    shapes = ((*lead, m, k), (*lead, k, n), (*lead, m, n))
    # C is unrelated to A B, so that no rounding hides a wrong residual.
    a, b, c = (make(s, seed + i, dtype, layouts[i]) for i, s in enumerate(shapes))
    addend = make_addend(addend_of, shapes[2], seed, dtype)
    row_sum, statistics = encode_rows_reference(b)
    actual = verify(c, a, row_sum, statistics, addend, *factors)
    expected = verify_rows_reference(c, a, row_sum, statistics, addend, *factors)
    beta, alpha = map(abs, factors)
    added = 0.0 if addend is None else beta * addend.double().abs().max() * n
    predicted = as_batch(a).double().abs() @ row_sum.abs().unsqueeze(-1)
    scale = as_batch(c).double().abs().sum(-1) + alpha * predicted.squeeze(-1) + added
    assert_near(actual[0], expected[0], scale)
    assert_near(actual[1], expected[1], expected[1])
    assert_near(actual[2], expected[2], expected[2])


@given(
    extents=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    batch=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2),
    addend_of=st.sampled_from(["none", "row", "full"]),
    scale=st.sampled_from([1.0, 1e-20, 1e-30, 1e8, 1e10, 1e18]),
    faults=st.lists(st.tuples(*[st.floats(0, 0.999)] * 2, st.floats(-30, 10)), max_size=5),
)
def test_the_fast_pass_counts_the_rows_that_the_exact_one_suspects(
    extents: tuple[int, int, int],
    batch: int,
    dtype: torch.dtype,
    seed: int,
    layouts: tuple[str, str],
    addend_of: str,
    scale: float,
    faults: list[tuple[float, float, float]],
) -> None:
    m, k, n = extents
    lead = (batch,) if batch else ()
    shapes = ((*lead, m, k), (*lead, k, n))
    a, b = (make(s, seed + i, torch.float64, layouts[i]) for i, s in enumerate(shapes))
    a, b = (a * scale).to(dtype), b.to(dtype)
    addend = make_addend(addend_of, (*lead, m, n), seed, dtype)
    c = torch.matmul(a, b) + (0 if addend is None else addend)
    for row, column, exponent in faults:
        at = (*[0] * len(lead), int(row * m), int(column * n))
        c[at] += c[at] * 2.0**exponent
    problem = (c, a, *encode(b), addend, 1.0, 1.0, None)
    exact = suspect_rows(verify(*problem))
    assert native.core.count_suspects(*problem, False) == (int(exact.sum()), None)


def make_addend(
    kind: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """An addend of one of the forms that addmm and baddbmm broadcast."""
    if kind == "none":
        return None
    full = make(shape, seed + 9, dtype, "strided" if kind == "strided" else "rows")
    first = (0,) * (len(shape) - 1)
    return {
        "row": full[first],
        "column": full[..., :1],
        "scalar": full[(*first, slice(0, 1))],
        "full": full,
        "strided": full,
    }[kind]


@for_each("dtype", DTYPES)
@for_each("value", [math.nan, math.inf, -math.inf])
@for_each("transposed", [False, True])
def test_what_is_not_finite_shows_in_its_own_row_only(
    dtype: torch.dtype, value: float, transposed: bool
) -> None:
    b = torch.randn(70, 33).to(dtype)
    b[66, 32] = value
    b = b.mT.contiguous().mT if transposed else b
    row_sum, statistics = encode(b)
    assert (~row_sum.isfinite()).nonzero().tolist() == [[0, 66]]
    assert (~statistics[0, :70].isfinite()).nonzero().tolist() == [[66]]
    a = torch.randn(5, 70).to(dtype)
    rows = verify(torch.zeros(5, 33, dtype=dtype), a, row_sum, statistics)
    assert not rows[0].isfinite().any()


@for_each("dtype", [torch.float16, torch.bfloat16])
@for_each("transposed", [False, True])
def test_every_16_bit_pattern_is_read_as_torch_reads_it(
    dtype: torch.dtype, transposed: bool
) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(1024, 64)
    one_each = patterns.reshape(-1, 1)
    one_each = one_each.expand(-1, 2).mT.contiguous().mT if transposed else one_each
    row_sum, _ = encode(one_each)
    expected = one_each.double() @ signs(one_each.shape[-1])
    assert torch.equal(row_sum[0].nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))


@pytest.mark.usefixtures("poisoned")
@for_each("dtype", DTYPES)
@for_each("shape", [(1, 1, 1), (65, 3, 1), (1, 130, 67), (128, 64, 5)])
def test_no_result_depends_on_uninitialised_memory(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    assert torch.empty(4).isnan().all()
    m, k, n = shape
    a, b, bias = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(n).to(dtype)
    rows = verify(torch.addmm(bias, a, b), a, *encode(b), bias)
    assert rows.isfinite().all()
    assert (rows[0].abs() <= rows[1]).all()


@for_each("threads", [1, 2])
def test_the_encoding_has_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    b = torch.randn(700, 300, generator=torch.Generator().manual_seed(1))
    expected = encode(b)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(encode(b)[0], expected)
    finally:
        torch.set_num_threads(before)


@given(
    rows=st.sampled_from([1, 2, 31, 33, 128, 129, 161, 290]),
    columns=st.sampled_from([1, 2, 15, 17, 64, 513, 1037, 2200]),
    b_of=tensors,
    tiny=st.booleans(),
    threads=st.integers(1, 3),
)
def test_views_encoded_in_one_pass_agree_bit_for_bit_with_each_alone(
    rows: int, columns: int, b_of: tuple[int, torch.dtype, str], tiny: bool, threads: int
) -> None:
    assert native.core is not None
    weight = make((rows, columns), *b_of)
    if tiny and b_of[2] in ("rows", "transposed"):
        weight[:, ::3] *= 1e-20  # squares that fp32 does not hold
    before, watched = torch.get_num_threads(), native.core.watch([weight])
    views = (weight.t(), weight)
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            known = [native.core.known_encoding(view) for view in views]
            torch.autograd.graph.increment_version(weight)
    finally:
        torch.set_num_threads(before)
        native.core.unwatch(watched)
    assert [kept for *_, kept, _ in known] == [False, True]
    for view, (row_sum, statistics, *_) in zip(views, known, strict=True):
        for made, alone in zip((row_sum, statistics), encode(view), strict=True):
            assert torch.equal(made.view(torch.int64), alone.view(torch.int64))


@for_each(
    ("b", "error", "words"),
    [
        (torch.ones(3), ValueError, "1 dimensions"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "b must be float64"),
        (torch.ones(0, 3), ValueError, "b is empty"),
    ],
)
def test_encode_refuses_what_it_cannot_read(
    b: torch.Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        encode(b)


def test_verify_refuses_a_foreign_encoding_and_addend() -> None:
    a, b, c = torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 4)
    with pytest.raises(ValueError, match="encode b again"):
        verify(c, a, *encode(torch.ones(4, 4)))
    with pytest.raises(TypeError, match="addend must have c's dtype"):
        verify(c, a, *encode(b), torch.ones(4, dtype=torch.int64))


def test_the_ops_have_fakes_that_agree_with_them() -> None:
    b, a, c = torch.randn(3, 5, 4), torch.randn(3, 2, 5), torch.randn(3, 2, 4)
    torch.library.opcheck(torch.ops.holdfast.encode_rows, (b,))
    torch.library.opcheck(torch.ops.holdfast.verify_rows, (c, a, *encode(b), None, 1.0, 1.0))


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    program = "from holdfast import native; native.core.simd_name()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HOLDFAST_SIMD": "mmx"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "HOLDFAST_SIMD=mmx does not run here" in done.stderr


def test_a_core_that_was_built_for_another_torch_is_not_loaded_and_the_remedy_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(native.DISABLE_VARIABLE, raising=False)
    patched = ".".join(torch.__version__.split(".")[:2]) + ".99+cu130"
    monkeypatch.setattr(native, "_torch_of_build", lambda: patched)
    assert native._load() is native.core
    monkeypatch.setattr(native, "_torch_of_build", lambda: "2.1.0+cpu")
    expected = r"built for torch 2\.1\.0\+cpu, and this is torch .*plain-torch references.*install"
    with pytest.warns(native.NativeCoreMissing, match=expected):
        assert native._load() is None

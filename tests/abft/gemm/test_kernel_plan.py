"""Launches fill the device, and the bytes that they move meet the budget of the cost model.

The model's assumptions: cuBLAS reaches 760 TFLOP/s in bf16 on an H200 of 132 multiprocessors,
less what the last wave of its 128 × 256 tiles leaves idle; a stream of bytes moves at 85 % of
4.8 TB/s; each launch costs 2.5 µs of the device; partial sums, a few MB, are read from the cache,
and nothing else is. A layer's products read X, Y, dY and dX once. Each weight is encoded once a
step and direction.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from case_loops import for_each

from holdfast import native

core = native.core
pytestmark = pytest.mark.skipif(core is None, reason="the native core is not built")

ENOUGH = 2 * 132  # programs: two for each multiprocessor of an H100
BANDWIDTH, LAUNCH_S, BYTES = 4.8e12 * 0.85, 2.5e-6, 2

Linear = tuple[int, int]  # input and output features


def gpt2(width: int, vocabulary: int = 50304) -> list[Linear]:
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return [*layer, (width, vocabulary)]


LLAMA = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)]
DLRM = [(13, 512), (512, 256), (256, 64), (479, 1024), (1024, 1024), (1024, 512), (512, 1)]
MODELS = {f"gpt2-{width}": gpt2(width) for width in (768, 1024, 1280, 1600)} | {"llama": LLAMA}


class Product(NamedTuple):
    """A product of a linear layer, and what its launch does."""

    rows: int
    columns: int
    inner: int
    a_bytes: int = BYTES
    a_layout: str = "rows"
    encode: bool = False
    across: bool = False


def products(tokens: int, linear: Linear, shared: bool = True) -> Iterator[Product]:
    """Y = X Wᵀ, dX = dY W and dW = dYᵀ X; ``shared`` if each reads only what is new to it."""
    inputs, outputs = linear
    yield Product(tokens, outputs, inputs, encode=shared)
    yield Product(tokens, inputs, outputs, across=shared)
    yield Product(outputs, inputs, tokens, 0 if shared else BYTES, "columns")


def plan(p: Product, c_layout: str = "rows", addend: str = "", batch: int = 1) -> dict[str, Any]:
    sizes = batch, p.rows, p.columns, p.inner, BYTES, p.a_bytes
    return core.kernel_plan(*sizes, c_layout, p.a_layout, addend, p.encode, p.across)


def encoding(rows: int, columns: int, layout: str) -> dict[str, Any]:
    """The launch that encodes a right operand."""
    return core.kernel_plan(1, rows, 0, columns, 0, BYTES, "rows", layout, "", True, False)


def fills(shown: dict[str, Any]) -> bool:
    """Two programs a multiprocessor; a smaller matrix cannot give each a tile of half the size."""
    return shown["programs"] >= ENOUGH or max(shown["steps"]) <= 1


@for_each("shared", [True, False])
@for_each("tokens", [1024, 8192, 32768])
@for_each("model", MODELS)
def test_every_launch_fills_the_device(model: str, tokens: int, shared: bool) -> None:
    for linear in MODELS[model]:
        for product in products(tokens, linear, shared):
            for c_layout in ("rows", "columns"):
                shown = plan(product, c_layout)
                assert shown["programs"] >= ENOUGH, (product, shown)
        for sizes in (linear, linear[::-1]):
            for layout in ("rows", "columns"):
                assert encoding(*sizes, layout)["programs"] >= ENOUGH, sizes


def test_a_long_reduction_is_split() -> None:
    shown = plan(Product(1024, 1024, 16384, a_layout="columns"))
    assert shown["programs"] >= 2 * ENOUGH
    assert shown["parts"][1] > 1


@for_each("tokens", [16, 50, 128, 2048])
def test_small_layers_of_recommenders_are_as_parallel_as_their_data(tokens: int) -> None:
    # 2048 rows of 13 numbers are 53 KB: more programs would each read less than a row's tile.
    for linear in DLRM:
        for product in products(tokens, linear, shared=False):
            assert fills(plan(product)), product


def test_programs_share_rows_evenly_and_cover_them() -> None:
    for product in (Product(1000, 777, 333), Product(1, 5000, 5000), Product(70000, 8, 8)):
        shown = plan(product)
        tile_rows, tile_columns, a_rows, a_columns = shown["tiles"]
        for part, step, width, length in (
            (shown["parts"][0], shown["steps"][0], tile_columns, product.columns),
            (shown["parts"][1], shown["steps"][1], a_columns, product.inner),
        ):
            assert (part - 1) * step * width < length <= part * step * width
        blocks = -(-product.rows // tile_rows), -(-product.rows // a_rows)
        expected = blocks[0] * shown["parts"][0] + blocks[1] * shown["parts"][1]
        assert shown["programs"] == expected


def seconds(shown: dict[str, Any]) -> float:
    """The time of a launch."""
    return shown["bytes"] / BANDWIDTH + LAUNCH_S


def gemm_seconds(p: Product) -> float:
    """The time of cuBLAS for a product."""
    tiles = -(-p.rows // 128) * -(-p.columns // 256)
    used = tiles / (-(-tiles // 132) * 132) * min(1.0, p.inner / (p.inner + 256))
    return 2 * p.rows * p.columns * p.inner / (760e12 * used) + LAUNCH_S


def costs(tokens: int, linears: list[Linear]) -> tuple[float, float]:
    """Seconds of all verification and of all products of linear layers in a step."""
    checks = gemms = 0.0
    for inputs, outputs in linears:
        checks += seconds(encoding(inputs, outputs, "columns"))
        checks += seconds(encoding(outputs, inputs, "rows"))
        for product in products(tokens, (inputs, outputs)):
            # Y has a bias, which is one row.
            addend = "row" if product.encode and outputs < 50000 else ""
            checks += seconds(plan(product, addend=addend))
            gemms += gemm_seconds(product)
    return checks, gemms


def gpt2_medium(tokens: int) -> tuple[float, float]:
    """Seconds of verification and of the whole step: products, attention, all else and AdamW."""
    width, layers, vocabulary = 1024, 24, 50304
    checks, step = costs(tokens, gpt2(width)[:4] * layers + [(width, vocabulary)])
    step += layers * 3.5 * 4 * tokens * 1024 * width * 0.5 / 450e12
    step += (layers * tokens * width * 30 * BYTES + 3 * vocabulary * tokens * BYTES) / BANDWIDTH
    step += 355e6 * 16 * 1.5 / BANDWIDTH
    return checks, step


@for_each("tokens, percent", [(8192, 14), (32768, 11)])
def test_a_step_of_gpt2_medium_meets_its_budget(tokens: int, percent: int) -> None:
    checks, step = gpt2_medium(tokens)
    assert round(100 * checks / step) <= percent
    assert round(100 * checks / step / 4, 1) <= 3.5  # with a frequency of 0.25


@for_each("tokens, percent", [(8192, 5.5), (32768, 4.0)])
def test_layers_of_llama_meet_their_budget(tokens: int, percent: float) -> None:
    # With few tokens the encoding of the weights, once a step and direction, is a quarter of it.
    checks, gemms = costs(tokens, LLAMA[:4] * 32)
    step = gemms + 32 * 3.5 * 4 * tokens * 4096 * 4096 * 0.5 / 450e12
    assert 100 * checks / step <= percent
    assert 100 * checks / step / 4 <= 3.5


def test_every_operand_is_read_once() -> None:
    for product in products(8192, (1024, 4096)):
        least = BYTES * product.rows * product.columns
        least += product.a_bytes * product.rows * product.inner
        assert least <= plan(product)["bytes"] < 1.1 * least

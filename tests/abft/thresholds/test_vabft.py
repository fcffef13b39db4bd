"""V-ABFT: the formula by loops, the paper's tables, tiles, online, and the hole in it."""

import math

import pytest
import torch
from case_loops import for_each
from threshold_cases import DTYPES, computed, flagged, in_order, normal, random_product, uniform

from holdfast.abft.thresholds import AAbft, Analytic, EMax, Product, VAbft
from holdfast.abft.thresholds.vabft import ASCEND_910B, CPU, H100


def moments(values: list[float], true: bool) -> tuple[float, float]:
    """Mean and variance of a row, by the book."""
    mean = sum(values) / len(values)
    if true:
        return mean, sum((value - mean) ** 2 for value in values) / len(values)
    return mean, (max(values) - mean) * (mean - min(values))


def by_loops(row: list[float], b: list[list[float]], c_sigma: float, true: bool) -> float:
    """The bracket of equation 23 for one row, over one tile."""
    columns = len(b[0])
    mean_a, variance_a = moments(row, true)
    absolute = crossed = between = 0.0
    for values in b:
        mean, variance = moments(values, true)
        absolute += abs(mean)
        crossed += columns * mean_a**2 * variance + columns**2 * variance_a * mean**2
        between += variance
    return (
        columns * abs(mean_a) * absolute
        + c_sigma * math.sqrt(crossed)
        + c_sigma * math.sqrt(columns) * math.sqrt(variance_a) * math.sqrt(between)
    )


@for_each("variance", ["extrema", "true"])
@for_each("c_sigma", [2.5, 4.0])
def test_it_is_the_formula_of_the_paper(variance: str, c_sigma: float) -> None:
    a = uniform(3, 5, dtype=torch.float64, low=-0.5)
    b = uniform(5, 7, dtype=torch.float64, low=-0.2, seed=1)
    threshold = VAbft(variance=variance, c_sigma=c_sigma)  # type: ignore[arg-type]
    expected = [6e-16 * by_loops(r, b.tolist(), c_sigma, variance == "true") for r in a.tolist()]
    bound = threshold(Product(a, b, None, torch.float64))
    assert bound.tolist() == pytest.approx(expected, rel=1e-12)


def test_tiles_take_their_own_statistics() -> None:
    a = uniform(3, 5, dtype=torch.float64, low=-0.5)
    b = uniform(5, 7, dtype=torch.float64, low=-0.2, seed=1)
    product, threshold = Product(a, b, None, torch.float64), VAbft(tile=(2, 2, 3))
    tiles = threshold.tiles(product)
    assert tiles.shape == (3, 3, 3)
    for i, row in enumerate(a.tolist()):
        for p, q in ((p, q) for p in range(3) for q in range(3)):
            block = b[2 * p : 2 * p + 2, 3 * q : 3 * q + 3].tolist()
            expected = 6e-16 * by_loops(row[2 * p : 2 * p + 2], block, 2.5, False)
            assert tiles[i, p, q].item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(threshold(product), tiles.sum((-2, -1)), rtol=1e-12, atol=0)


@for_each("dtype", DTYPES)
def test_each_tile_bounds_its_own_columns_and_names_the_faulty_ones(dtype: torch.dtype) -> None:
    a, b = normal(16, 300, dtype=dtype), normal(300, 90, dtype=dtype, seed=1)
    product = computed(a, b)
    assert product.c is not None
    threshold = VAbft(tile=(16, 128, 32)).tiles(product).sum(-2)
    assert threshold.shape == (16, 3)

    def over(c: torch.Tensor) -> list[list[int]]:
        pieces = zip(c.double().split(32, -1), b.double().split(32, -1), strict=True)
        found = [piece.sum(-1) - a.double() @ columns.sum(-1) for piece, columns in pieces]
        return (torch.stack(found, -1).abs() > threshold).nonzero().tolist()

    assert over(product.c) == []
    faulty = product.c.double().clone()
    faulty[3, 70] += 3 * threshold[3, 2]
    assert over(faulty) == [[3, 2]]


@for_each(
    ("dtype", "size", "low", "published"),
    [
        (torch.float64, 128, -1.0, 1.87e-13),
        (torch.float64, 1024, -1.0, 2.41e-12),
        (torch.float32, 128, -1.0, 9.19e-5),
        (torch.float32, 1024, -1.0, 1.19e-3),
        (torch.bfloat16, 128, 0.0, 4.05e1),
        (torch.bfloat16, 512, 0.0, 5.85e2),
    ],
)
def test_the_h100_preset_gives_the_published_threshold(
    dtype: torch.dtype, size: int, low: float, published: float
) -> None:
    """Tables 4, 5 and 6; the figures of 4 and 5 are those of H100's e_max, not of the CPU's."""
    a, b = (uniform(size, size, dtype=dtype, low=low, seed=seed) for seed in (0, 1))
    bound = VAbft(e_max=H100)(Product(a, b, None, dtype))
    assert bound.mean().item() == pytest.approx(published, rel=0.05)


@for_each("dtype", DTYPES)
def test_the_true_variance_is_never_looser(dtype: torch.dtype) -> None:
    product = random_product(dtype)
    assert (VAbft(variance="true")(product) < VAbft()(product)).all()


def test_the_extrema_are_exact_where_values_cluster_at_them() -> None:
    values = torch.tensor([-1.0, 3.0], dtype=torch.float64)
    product = Product(values.repeat(2, 4), values.repeat(8, 3), None, torch.float64)
    true, extrema = VAbft(variance="true")(product), VAbft()(product)
    torch.testing.assert_close(true, extrema, rtol=1e-12, atol=0)


@for_each("output", [torch.float16, torch.bfloat16])
def test_online_takes_the_accumulators_e_max(output: torch.dtype) -> None:
    a, b = normal(8, 64, dtype=output), normal(64, 16, dtype=output, seed=1)
    offline, online = (VAbft()(Product(a, b, None, output, online=o)) for o in (False, True))
    torch.testing.assert_close(online / offline, 0 * online + 1e-6 / CPU[output](64))
    accumulator = a.float() @ b.float()
    assert not flagged(Product(a, b, accumulator, output, online=True), VAbft()).any()
    assert flagged(Product(a, b, accumulator.to(output), output, online=True), VAbft()).all()


@for_each("dtype", [torch.float64, torch.float32])
def test_online_changes_nothing_where_the_output_is_the_accumulator(dtype: torch.dtype) -> None:
    a, b = normal(8, 64, dtype=dtype), normal(64, 16, dtype=dtype, seed=1)
    assert torch.equal(VAbft()(computed(a, b, online=True)), VAbft()(computed(a, b)))


@for_each("inner", [64, 512, 1024])
def test_coherent_data_raise_false_alarms(inner: int) -> None:
    """The hole: rounding errors that are all alike add up, and variances are zero."""
    product = in_order(torch.ones(64, inner), torch.full((inner, 64), 0.1))
    assert flagged(product, VAbft()).all()
    assert not flagged(product, Analytic()).any()


def test_a_dtype_without_an_e_max_is_named_and_can_be_given_one() -> None:
    product = Product(torch.ones(2, 3), torch.ones(3, 2), None, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"no e_max for torch\.float8_e4m3fn"):
        VAbft()(product)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        AAbft()(product)
    with pytest.raises(ValueError, match=r"no e_max for torch\.float64"):
        VAbft(e_max=ASCEND_910B)(
            Product(product.a.double(), product.b.double(), None, torch.float64)
        )
    calibrated = VAbft(e_max={torch.float8_e4m3fn: EMax(0.125)})
    assert calibrated(product).tolist() == pytest.approx([0.125 * 2 * 3] * 2, rel=1e-12)

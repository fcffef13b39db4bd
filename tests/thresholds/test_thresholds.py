"""One contract for every threshold, and the formula of each."""

import math

import pytest
import torch

from holdfast.checksums.rows import encode_rows, row_residual
from holdfast.thresholds import C_SIGMA, E_MAX, REGISTRY
from holdfast.thresholds.analytic import element_bound

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def operands(dtype: torch.dtype, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(s, generator=generator).to(dtype) for s in ((64, k), (k, 48)))
    return a, b


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 7, 64, 1000])
def test_rounding_of_random_data_stays_below_it(name: str, dtype: torch.dtype, k: int) -> None:
    for seed in range(5):
        a, b = operands(dtype, k, seed)
        threshold = REGISTRY[name](a, b, dtype)
        assert threshold.shape == (64,)
        assert threshold.dtype is torch.float64
        assert (row_residual(a @ b, a, encode_rows(b)).abs() <= threshold).all()


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_scales_with_the_data(name: str, dtype: torch.dtype) -> None:
    a, b = operands(dtype, 32)
    once, twice = REGISTRY[name](a, b, dtype), REGISTRY[name](a * 4, b, dtype)
    torch.testing.assert_close(twice, once * 4, rtol=1e-5, atol=1e-4 if dtype.itemsize == 2 else 0)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_is_its_matrices(name: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 5, 7).to(dtype), torch.randn(3, 7, 4).to(dtype)
    each = torch.stack([REGISTRY[name](a[i], b[i], dtype) for i in range(3)])
    torch.testing.assert_close(REGISTRY[name](a, b, dtype), each, rtol=1e-12, atol=0)


def test_vabft_is_the_formula_of_the_paper() -> None:
    a = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, 5.0, 3.0], [-2.0, 0.0, 2.0]], dtype=torch.float64)
    columns, mean_a, variance_a = 3, 2.0, 1.0
    means, variances = [3.0, 0.0], [4.0, 4.0]
    squares, between = sum(m * m for m in means), sum(variances)
    expected = E_MAX[torch.float64] * (
        columns * mean_a * sum(map(abs, means))
        + C_SIGMA * math.sqrt(columns * mean_a**2 * between + columns**2 * variance_a * squares)
        + C_SIGMA * math.sqrt(columns * variance_a * between)
    )
    assert REGISTRY["vabft"](a, b, torch.float64).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("value_a", "value_b"), [(1.0, 0.1), (1e-23, 6e-23), (3.0, -7e5)])
def test_the_analytic_bound_holds_where_the_statistical_one_does_not(
    value_a: float, value_b: float
) -> None:
    a, b = torch.full((4, 4096), value_a), torch.full((4096, 8), value_b)
    error = (a @ b).double() - a.double() @ b.double()
    assert error.any()
    bound = element_bound(a.double().abs() @ b.double().abs(), 4096, torch.float32)
    assert (error.abs() <= bound).all()


@pytest.mark.parametrize("inner", [1, 10**6, 10**8])
def test_the_element_bound_is_defined_for_any_length(inner: int) -> None:
    bound = element_bound(torch.ones((), dtype=torch.float64), inner, torch.float32)
    assert bound.isfinite()
    assert bound >= 2 * inner * 2**-24

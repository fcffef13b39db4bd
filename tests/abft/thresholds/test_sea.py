"""Simplified error analysis: the formula, and that it bounds coherent data."""

import math

import pytest
import torch
from case_loops import for_each
from threshold_cases import flagged, in_order, random_product, uniform

from holdfast.abft.thresholds import Analytic, Product, Sea


def norm(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def test_it_is_the_formula() -> None:
    a, b = uniform(3, 4, dtype=torch.float64), uniform(4, 5, dtype=torch.float64, seed=1)
    columns = [norm([b[k, j].item() for k in range(4)]) for j in range(5)]
    checksum = norm([sum(b[k].tolist()) for k in range(4)])
    expected = [
        2.0**-52 * norm(row) * ((4 + 2 * 5 - 2) * sum(columns) + 4 * checksum) for row in a.tolist()
    ]
    assert Sea()(Product(a, b, None, torch.float64)).tolist() == pytest.approx(expected, rel=1e-12)


@for_each("inner", [1, 64, 2048])
def test_a_coherent_sum_in_order_stays_below_it(inner: int) -> None:
    product = in_order(torch.ones(4, inner), torch.full((inner, 16), 0.1))
    assert not flagged(product, Sea()).any()


@for_each("dtype", [torch.float64, torch.float32])
def test_norms_cost_tightness(dtype: torch.dtype) -> None:
    product = random_product(dtype)
    assert (Sea()(product) > Analytic()(product)).all()

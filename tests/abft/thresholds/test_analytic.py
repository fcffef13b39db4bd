"""Bounds of the worst case: element by element, simplified (SEA), and by norms (the SDC study)."""

import math

import pytest
import torch
from case_loops import for_each
from threshold_cases import DTYPES, computed, flagged, in_order, random_product, residual, uniform

from holdfast.abft.thresholds import Analytic, Norm, Product, Sea, Threshold
from holdfast.abft.thresholds.analytic import element_bound

COHERENT = [(1.0, 0.1), (3.0, -7e5), (1e-23, 6e-23), (1e-3, 1e-3)]


@for_each(("value_a", "value_b"), COHERENT)
@for_each(("inner", "columns"), [(1, 2048), (64, 8), (4096, 8)])
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_coherent_data_stay_below_it(
    value_a: float, value_b: float, inner: int, columns: int, dtype: torch.dtype
) -> None:
    a, b = (
        torch.full((2, inner), value_a).to(dtype),
        torch.full((inner, columns), value_b).to(dtype),
    )
    product = computed(a, b)
    assert not flagged(product, Analytic()).any()
    assert product.c is not None
    error = product.c.double() - a.double() @ b.double()
    bound = element_bound(a.double().abs() @ b.double().abs(), inner, dtype)
    assert (error.abs() <= bound).all()


@for_each("threshold", [Analytic(), Sea()])
@for_each("inner", [1, 64, 4096])
def test_a_coherent_sum_in_order_stays_below_it_and_rounds(
    threshold: Threshold, inner: int
) -> None:
    product = in_order(torch.ones(4, inner), torch.full((inner, 16), 0.1))
    assert inner == 1 or residual(product, threshold).gt(0).all()
    assert not flagged(product, threshold).any()


@for_each("dtype", DTYPES)
def test_it_is_the_elements_bounds_summed_and_the_checksums_own(dtype: torch.dtype) -> None:
    product = random_product(dtype)
    a, b = product.operands()
    elements = element_bound(a.abs() @ b.abs(), product.inner, dtype).sum(-1)
    own = (product.inner + 2 * product.columns + 2) * 2.0**-53 * (a.abs() @ b.abs()).sum(-1)
    torch.testing.assert_close(Analytic()(product), elements + own, rtol=1e-3, atol=0)
    assert (Analytic()(product) > elements).all()


def test_checksums_summed_in_fp32_need_a_wider_bound() -> None:
    product = in_order(torch.ones(1, 2), torch.full((2, 4096), 0.1))
    assert product.c is not None
    narrow = product.c.new_zeros(())
    for value in product.c[0]:
        narrow += value
    error = (narrow.double() - (product.a.double() @ product.b.double()).sum()).abs()
    assert error > Analytic()(product)
    assert error <= Analytic(checksum=torch.float32)(product)


def test_online_leaves_out_the_outputs_rounding() -> None:
    product = random_product(torch.bfloat16)
    assert product.c is not None
    accumulator = product.a.float() @ product.b.float()
    online = Product(product.a, product.b, accumulator, torch.bfloat16, online=True)
    assert not flagged(online, Analytic()).any()
    stored = Product(product.a, product.b, product.c, torch.bfloat16, online=True)
    assert flagged(stored, Analytic()).any()


@for_each("inner", [1, 10**6, 10**8])
def test_the_element_bound_is_defined_for_any_length(inner: int) -> None:
    bound = element_bound(torch.ones((), dtype=torch.float64), inner, torch.float32)
    assert bound.isfinite()
    assert bound >= 2 * inner * 2**-24


def test_sea_is_the_formula() -> None:
    a, b = uniform(3, 4, dtype=torch.float64), uniform(4, 5, dtype=torch.float64, seed=1)
    columns = [math.hypot(*column) for column in b.T.tolist()]
    checksum = math.hypot(*b.sum(1).tolist())
    expected = [
        2.0**-52 * math.hypot(*row) * ((4 + 2 * 5 - 2) * sum(columns) + 4 * checksum)
        for row in a.tolist()
    ]
    assert Sea()(Product(a, b, None, torch.float64)).tolist() == pytest.approx(expected, rel=1e-12)


A = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.5, 0.0]])
B = torch.tensor([[1.0, -1.0, 1.0], [2.0, 0.0, -3.0]])


@for_each(("scope", "norms"), [("matrix", [7.0] * 3), ("row", [3.0, 7.0, 0.5])])
def test_both_norms_are_largest_absolute_row_sums(scope: str, norms: list[float]) -> None:
    bound = Norm(scope=scope)(Product(A, B, None, torch.float32))  # type: ignore[arg-type]
    assert bound.tolist() == [2 * 2.0**-23 * norm * 5.0 for norm in norms]


@for_each("dtype", DTYPES)
def test_a_row_is_never_looser_than_the_matrix_and_still_silent(dtype: torch.dtype) -> None:
    product = random_product(dtype)
    assert (Norm(scope="row")(product) <= Norm()(product)).all()
    assert not flagged(product, Norm(scope="row")).any()


def test_one_large_row_blinds_every_other() -> None:
    product = random_product(torch.float32)
    a = product.a.clone()
    a[0] *= 1e6
    c = (a @ product.b).double()
    c[5, 7] += 1.0
    faulty = Product(a, product.b, c, torch.float32)
    assert not flagged(faulty, Norm())[5]
    assert flagged(faulty, Norm(scope="row"))[5]

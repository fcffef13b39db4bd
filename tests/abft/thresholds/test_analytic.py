"""The worst case: sound on data that no statistical bound survives."""

import torch
from case_loops import for_each
from threshold_cases import DTYPES, computed, flagged, in_order, random_product, residual

from holdfast.abft.thresholds import Analytic, Product
from holdfast.abft.thresholds.analytic import element_bound

COHERENT = [(1.0, 0.1), (3.0, -7e5), (1e-23, 6e-23), (1e-3, 1e-3)]


@for_each(("value_a", "value_b"), COHERENT)
@for_each(("inner", "columns"), [(1, 2048), (64, 8), (4096, 8)])
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_coherent_data_stay_below_it(
    value_a: float, value_b: float, inner: int, columns: int, dtype: torch.dtype
) -> None:
    a, b = torch.full((2, inner), value_a).to(dtype), torch.full((inner, columns), value_b)
    assert not flagged(computed(a, b.to(dtype)), Analytic()).any()


def test_a_coherent_sum_in_order_stays_below_it_and_rounds() -> None:
    product = in_order(torch.ones(4, 4096), torch.full((4096, 8), 0.1))
    assert residual(product, Analytic()).gt(0).all()
    assert not flagged(product, Analytic()).any()


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


@for_each(("value_a", "value_b"), COHERENT)
def test_an_element_stays_below_its_bound(value_a: float, value_b: float) -> None:
    a, b = torch.full((4, 4096), value_a), torch.full((4096, 8), value_b)
    error = (a @ b).double() - a.double() @ b.double()
    bound = element_bound(a.double().abs() @ b.double().abs(), 4096, torch.float32)
    assert error.any()
    assert (error.abs() <= bound).all()


@for_each("inner", [1, 10**6, 10**8])
def test_the_element_bound_is_defined_for_any_length(inner: int) -> None:
    bound = element_bound(torch.ones((), dtype=torch.float64), inner, torch.float32)
    assert bound.isfinite()
    assert bound >= 2 * inner * 2**-24

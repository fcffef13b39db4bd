"""What every threshold promises, whatever its formula."""

import dataclasses
import math
import pickle

import pytest
import torch
from case_loops import for_each
from threshold_cases import DTYPES, computed, flagged, normal, random_product, residual

from holdfast.abft.thresholds import REGISTRY, AAbft, EMax, Norm, Product, Threshold, VAbft

every_member = for_each("threshold", REGISTRY.values())
every_dtype = for_each("dtype", DTYPES)


def test_the_registry_knows_each_member_by_its_own_name() -> None:
    assert {name: threshold.name for name, threshold in REGISTRY.items()} == {
        name: name for name in REGISTRY
    }
    assert set(REGISTRY) == {"analytic", "norm", "sea", "aabft", "vabft", "rounding"}
    assert {threshold.weights for threshold in REGISTRY.values()} <= {"ones", "signs"}


@every_member
def test_it_travels_to_other_processes_unchanged(threshold: Threshold) -> None:
    assert pickle.loads(pickle.dumps(threshold)) == threshold == type(threshold)()
    with pytest.raises(dataclasses.FrozenInstanceError):
        threshold.added = 1  # type: ignore[attr-defined]


@every_member
@every_dtype
@for_each("inner", [1, 7, 64])
@for_each("columns", [1, 48])
def test_one_finite_fp64_number_a_row(
    threshold: Threshold, dtype: torch.dtype, inner: int, columns: int
) -> None:
    a, b = normal(24, inner, dtype=dtype), normal(inner, columns, dtype=dtype, seed=1)
    bound = threshold(computed(a, b))
    assert bound.shape == (24,)
    assert bound.dtype is torch.float64
    assert bound.is_contiguous()
    assert bound.isfinite().all()
    assert (bound > 0).all()


@every_member
@every_dtype
def test_a_zero_matrix_is_silent(threshold: Threshold, dtype: torch.dtype) -> None:
    product = computed(torch.zeros(3, 8, dtype=dtype), normal(8, 5, dtype=dtype))
    bound = threshold(product)
    assert bound.isfinite().all()
    assert (bound >= 0).all()
    assert (bound < 1000 * least(dtype)).all()
    assert not flagged(product, threshold).any()


def least(dtype: torch.dtype) -> float:
    """Underflows: of one element, or the rounding of one whose square underflows in fp64."""
    squares = torch.finfo(torch.float64).smallest_normal ** 0.5
    return max(torch.finfo(dtype).smallest_normal, torch.finfo(dtype).eps * squares)


@every_member
@for_each("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_an_empty_product_has_a_threshold(
    threshold: Threshold, shape: tuple[int, int, int]
) -> None:
    rows, inner, columns = shape
    product = computed(torch.ones(rows, inner), torch.ones(inner, columns))
    assert threshold(product).shape == (rows,)
    assert not flagged(product, threshold).any()


@every_member
@every_dtype
def test_a_batch_is_its_matrices(threshold: Threshold, dtype: torch.dtype) -> None:
    a, b = normal(2, 3, 5, 7, dtype=dtype), normal(2, 3, 7, 4, dtype=dtype, seed=1)
    c = a @ b
    bound = threshold(Product(a, b, c, dtype))
    assert bound.shape == (2, 3, 5)
    for at in ((i, j) for i in range(2) for j in range(3)):
        one = threshold(Product(a[at], b[at], c[at], dtype))
        torch.testing.assert_close(bound[at], one, rtol=1e-12, atol=0)
    for shared in (
        Product(a[0, 0], b, a[0, 0] @ b, dtype),
        Product(a, b[0, 0], a @ b[0, 0], dtype),
    ):
        expanded = dataclasses.replace(shared, a=shared.a.expand_as(a), b=shared.b.expand_as(b))
        torch.testing.assert_close(threshold(shared), threshold(expanded), rtol=1e-12, atol=0)


@every_member
@every_dtype
@for_each("rows", [torch.arange(24), torch.randperm(24)])
def test_strides_and_the_order_of_the_rows_do_not_matter(
    threshold: Threshold, dtype: torch.dtype, rows: torch.Tensor
) -> None:
    product = random_product(dtype)
    assert product.c is not None
    a, b, c = (x.t().contiguous().t() for x in (product.a[rows], product.b, product.c[rows]))
    assert not a.is_contiguous()
    strided = dataclasses.replace(product, a=a, b=b, c=c)
    torch.testing.assert_close(threshold(strided), threshold(product)[rows], rtol=1e-12, atol=0)


@every_member
@every_dtype
@for_each("scale", [2.0, 64.0])
@for_each("side", ["a", "b"])
def test_it_scales_with_the_data(
    threshold: Threshold, dtype: torch.dtype, scale: float, side: str
) -> None:
    """Up to what underflow may lose, which is what is left at zero."""
    product = random_product(dtype)
    assert product.c is not None
    nothing = dataclasses.replace(product, a=product.a * 0, c=product.c * 0)
    scaled = {side: getattr(product, side) * scale, "c": product.c * scale}
    floor = threshold(nothing)
    grown = threshold(dataclasses.replace(product, **scaled)) - floor
    torch.testing.assert_close(grown, scale * (threshold(product) - floor), rtol=1e-9, atol=0)


@every_member
@every_dtype
def test_online_is_never_looser(threshold: Threshold, dtype: torch.dtype) -> None:
    product = random_product(dtype)
    online = threshold(dataclasses.replace(product, online=True))
    offline = threshold(product)
    assert (online <= offline).all()
    if dtype.itemsize == 2:
        assert (100 * online < offline).all()


@every_member
@for_each("operand", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_operands_take_the_outputs_rounding(threshold: Threshold, operand: torch.dtype) -> None:
    a, b = normal(6, 32, dtype=operand), normal(32, 8, dtype=operand, seed=1)
    c = (a.float() @ b.float()).half()
    narrow = Product(a, b, c, torch.float16)
    wide = Product(a.half(), b.half(), c, torch.float16)
    assert torch.equal(threshold(narrow), threshold(wide))


@every_member
def test_it_takes_no_part_in_autograd(threshold: Threshold) -> None:
    a, b = normal(3, 8, dtype=torch.float32), normal(8, 5, dtype=torch.float32, seed=1)
    product = computed(a.requires_grad_(), b.requires_grad_())
    assert not threshold(product).requires_grad


@every_member
@for_each("unknown", [torch.int32, torch.complex64, torch.bool])
def test_an_unknown_dtype_is_named(threshold: Threshold, unknown: torch.dtype) -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    with pytest.raises(ValueError, match=str(unknown)):
        threshold(Product(a, b, a @ b, unknown))


@every_member
@every_dtype
@for_each("inner", [7, 64, 1000])
def test_the_rounding_of_random_data_stays_below_it(
    threshold: Threshold, dtype: torch.dtype, inner: int
) -> None:
    products = [random_product(dtype, inner, seed) for seed in range(5)]
    assert any(residual(product, threshold).any() for product in products)
    assert sum(int(flagged(product, threshold).sum()) for product in products) == 0


@every_member
@every_dtype
def test_a_fault_above_twice_the_threshold_is_seen_in_its_row_alone(
    threshold: Threshold, dtype: torch.dtype
) -> None:
    product = random_product(dtype)
    assert product.c is not None
    faulty = product.c.double().clone()
    faulty[5, 7] += 3 * threshold(product)[5]
    assert not torch.equal(faulty, product.c.double())
    rows = flagged(dataclasses.replace(product, c=faulty), threshold)
    assert rows.nonzero().flatten().tolist() == [5]


IMPOSSIBLE = [
    (VAbft, {"variance": "sample"}, "variance is 'sample'"),
    (VAbft, {"c_sigma": -1.0}, r"c_sigma is -1\.0"),
    (VAbft, {"c_sigma": math.nan}, "c_sigma is nan"),
    (VAbft, {"tile": (128, 0, 256)}, r"tile is \(128, 0, 256\)"),
    (EMax, {"constant": -1e-7}, "is not a bound"),
    (EMax, {"constant": math.nan}, "is not a bound"),
    (EMax, {"constant": 1e-7, "growth": math.inf}, "is not a bound"),
    *((AAbft, {"y": y}, "y is") for y in (0.0, -1.0, math.inf, math.nan, "largest")),
    (AAbft, {"sigmas": 0.0}, "sigmas is 0"),
    (Norm, {"scope": "column"}, "scope is 'column'"),
]


@for_each(("made", "arguments", "message"), IMPOSSIBLE)
def test_impossible_parameters_are_refused(
    made: type, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(**arguments)

"""A-ABFT against the V-ABFT paper's tables, its two computed y, and where it fails."""

import pytest
import torch
from case_loops import for_each
from threshold_cases import DTYPES, flagged, in_order, random_product, residual, uniform

from holdfast.abft.thresholds import AAbft, Analytic, Product

# Tables 4 and 5: the calibrated threshold, which depends on the size alone.
CALIBRATED = [
    (torch.float64, 128, 2.08e-12),
    (torch.float64, 2048, 1.32e-10),
    (torch.float32, 128, 2.23e-3),
    (torch.float32, 2048, 1.42e-1),
]


@for_each(("dtype", "size", "published"), CALIBRATED)
def test_a_calibrated_y_gives_the_published_threshold(
    dtype: torch.dtype, size: int, published: float
) -> None:
    product = Product(
        torch.zeros(1, size, dtype=dtype), torch.zeros(size, 1, dtype=dtype), None, dtype
    )
    assert AAbft(y=21.0)(product).item() == pytest.approx(published, rel=5e-3)


@for_each(("size", "published"), [(128, 2.53e2), (256, 1.38e3), (512, 7.66e3)])
def test_a_computed_y_gives_the_published_threshold(size: int, published: float) -> None:
    """Table 6, U(0, 1) in bf16."""
    a, b = (uniform(size, size, dtype=torch.bfloat16, low=0.0, seed=seed) for seed in (0, 1))
    product = Product(a, b, None, torch.bfloat16)
    assert AAbft()(product).mean().item() == pytest.approx(published, rel=0.05)


def test_both_y_by_hand() -> None:
    a = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    b = torch.tensor([[1.0, 1.0, -3.0], [2.0, 2.0, 1.0]])  # row sums −1 and 5
    product = Product(a, b, None, torch.float32)
    sigma = ((2 * 3 * 2.5 + 4) / 24) ** 0.5 * 2.0**-23
    assert AAbft()(product).tolist() == pytest.approx([3 * sigma * 3 * 5] * 2, rel=1e-12)
    by_product = AAbft(y="product")(product)
    assert by_product.tolist() == pytest.approx([3 * sigma * 10, 3 * sigma * 3], rel=1e-12)
    assert AAbft(sigmas=6.0)(product).tolist() == (2 * AAbft()(product)).tolist()


@for_each("dtype", DTYPES)
def test_the_product_is_never_looser_than_the_maxima(dtype: torch.dtype) -> None:
    product = random_product(dtype)
    assert (AAbft(y="product")(product) <= AAbft()(product)).all()


def test_a_calibrated_y_does_not_follow_the_data() -> None:
    a, b = uniform(64, 64, dtype=torch.float32), uniform(64, 64, dtype=torch.float32, seed=1)
    large = Product(a * 1e6, b, (a * 1e6) @ b, torch.float32)
    assert flagged(large, AAbft(y=21.0)).any()
    assert not flagged(large, AAbft()).any()


def test_rows_of_b_that_sum_to_zero_raise_false_alarms() -> None:
    half = (torch.arange(256 * 64).reshape(256, 64) * 37 % 129 - 64).double()
    b = torch.cat([half, half.flip(0), -(half + half.flip(0))], dim=1) / 64
    a = uniform(32, 256, dtype=torch.bfloat16)
    product = Product(a, b.bfloat16(), (a.double() @ b).bfloat16(), torch.bfloat16)
    assert torch.equal(b.bfloat16().double(), b)
    assert residual(product, AAbft()).any()
    assert flagged(product, AAbft()).any()
    assert not flagged(product, Analytic()).any()


def test_coherent_data_raise_false_alarms() -> None:
    product = in_order(torch.ones(4, 512), torch.full((512, 16), 0.1))
    assert flagged(product, AAbft()).all()

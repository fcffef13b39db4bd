"""How far the thresholds are above the actual rounding, against the V-ABFT paper's tables 4, 5."""

import torch
from case_loops import for_each
from threshold_cases import Product, computed, exact_residual, residual, uniform

from holdfast.abft.thresholds import AAbft, Analytic, Norm, Sea, Threshold, VAbft
from holdfast.abft.thresholds.vabft import H100

ROWS = 16


def square(size: int, dtype: torch.dtype) -> Product:
    """U(−1, 1), as in the tables."""
    a, b = (uniform(size, size, dtype=dtype, seed=seed) for seed in (0, 1))
    return computed(a, b)


def tightness(threshold: Threshold, product: Product) -> float:
    """Mean threshold over mean |residual|, which is free of rounding of its own."""
    if product.output is torch.float64:
        actual = sum(exact_residual(product, ROWS)) / ROWS
    else:
        actual = residual(product, threshold).mean().item()
    return threshold(product).mean().item() / actual


# The published range of V-ABFT and that of A-ABFT; the tests allow twice as much on either side.
PUBLISHED = {torch.float64: ((7, 15), (159, 164)), torch.float32: ((7, 20), (321, 633))}


@for_each(("dtype", "size"), [(torch.float64, 128), *((torch.float32, n) for n in (128, 256, 512))])
def test_it_is_within_twice_the_published_range(dtype: torch.dtype, size: int) -> None:
    product = square(size, dtype)
    for threshold, (low, high) in zip(
        (VAbft(e_max=H100), AAbft(y=21.0)), PUBLISHED[dtype], strict=True
    ):
        assert low / 2 <= tightness(threshold, product) <= high * 2


def test_a_worst_case_is_orders_of_magnitude_looser() -> None:
    """Section 1 says 10⁴ to 10⁵ of analytic bounds, 10³ to 10⁴ of SEA: row checksums add to it."""
    for dtype in (torch.float64, torch.float32):
        product = square(256, dtype)
        statistical = tightness(AAbft(y=21.0), product)
        for threshold in (Analytic(), Norm(), Sea()):
            assert 10**4 <= tightness(threshold, product) <= 2 * 10**5
            assert tightness(threshold, product) > 10 * statistical

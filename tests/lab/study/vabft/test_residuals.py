"""Residuals, exact to a hundred digits where asked, and margins over them."""

from math import inf, nan

import pytest
import torch
from case_loops import for_each

from holdfast.abft.checksums.weights import ones, signs
from holdfast.abft.thresholds import REGISTRY
from holdfast.abft.thresholds.protocol import Product
from holdfast_lab.distributions import COHERENT, RANDOM
from holdfast_lab.study.vabft.residuals import Margin, Margins, exact_residuals, exceeds, residuals


def in_a_hundred_digits(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, v: torch.Tensor
) -> list[float]:
    """``C v − A (B v)`` as the paper computes its baseline."""
    mp = pytest.importorskip("mpmath").mp
    with mp.workdps(100):
        encoded = [mp.fdot(zip(row, v.tolist(), strict=True)) for row in b.double().tolist()]
        sums = [mp.fdot(zip(row, v.tolist(), strict=True)) for row in c.double().tolist()]
        dots = [mp.fdot(zip(row, encoded, strict=True)) for row in a.double().tolist()]
        return [float(total - dot) for total, dot in zip(sums, dots, strict=True)]


@for_each("name", ["u11", "t3", "huge_range", "subnormal"])
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_exact_baseline_is_mpmaths(name: str, dtype: torch.dtype) -> None:
    a, b = (RANDOM | COHERENT)[name](5, 70, 40, dtype, torch.Generator().manual_seed(1))
    c = a @ b
    exact = exact_residuals(a, b, c)
    assert exact["ones"].tolist() == in_a_hundred_digits(a, b, c, ones(40))
    assert exact["signs"].tolist() == in_a_hundred_digits(a, b, c, signs(40))
    assert exact["ones"].abs().max() > 0


def test_fp64_arithmetic_is_exact_enough_for_lower_precisions_but_not_for_itself() -> None:
    def disagreement(dtype: torch.dtype) -> float:
        a, b = RANDOM["u11"](8, 256, 64, dtype, torch.Generator().manual_seed(2))
        c = a @ b
        exact = exact_residuals(a, b, c)["ones"]
        return float(((residuals(a, b, c)["ones"] - exact) / exact).abs().max())

    assert disagreement(torch.float32) < 1e-6
    assert disagreement(torch.float64) > 1e-3


def test_batches_have_the_residuals_of_their_matrices() -> None:
    a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    whole = residuals(a, b, a @ b)
    for index in ((0, 0), (1, 2)):
        one = residuals(a[index], b[index], (a @ b)[index])
        assert all(torch.allclose(whole[name][index], one[name], atol=1e-12) for name in one)


def test_what_is_not_finite_exceeds() -> None:
    threshold = torch.tensor([1.0, 1.0, 1.0, inf, nan])
    residual = torch.tensor([1.0, -1.5, nan, 0.0, 0.0])
    assert exceeds(threshold, residual).tolist() == [False, True, True, True, True]


def test_a_margin_tells_the_worst_row_and_the_typical_one() -> None:
    margin = Margin()
    margin.add(torch.tensor([4.0, 6.0]), torch.tensor([-2.0, 0.0]))
    margin.add(torch.tensor([2.0]), torch.tensor([4.0]))
    assert (margin.rows, margin.over, margin.tightness) == (3, 1, 0.5)
    assert margin.threshold == 4.0
    assert margin.typical == pytest.approx((20 / 3) ** 0.5)


def test_margins_add_up() -> None:
    threshold, residual = torch.tensor([4.0, 6.0, 2.0]), torch.tensor([-2.0, 1.0, 4.0])
    whole, parts = Margin(), Margin()
    whole.add(threshold, residual)
    for rows in (slice(0, 1), slice(1, 3)):
        part = Margin()
        part.add(threshold[rows], residual[rows])
        parts.include(part)
    assert vars(parts) | {"products": [4.0]} == vars(whole)  # of one product, not of two


def test_a_margin_without_any_error_is_unbounded() -> None:
    margin = Margin()
    margin.add(torch.ones(2), torch.zeros(2))
    assert (margin.tightness, margin.over) == (inf, 0)


def test_every_threshold_meets_the_residual_of_its_own_weights() -> None:
    a, b = RANDOM["n01"](16, 64, 32, torch.bfloat16, torch.Generator().manual_seed(3))
    c = a @ b
    found = residuals(a, b, c)
    margins = Margins()
    margins.add(Product(a, b, c, c.dtype), found)
    assert list(margins) == list(REGISTRY)
    for name, member in REGISTRY.items():
        assert margins[name].square == float(found[member.weights].square().sum())
        assert margins.tightness()[name] > 1
        assert margins.share_over()[name] == 0

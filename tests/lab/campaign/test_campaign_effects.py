"""The effect of a fault: classes at their borders, and rounding errors against exact fractions."""

import math
from fractions import Fraction

import pytest
import torch
from case_loops import for_each

from holdfast_lab.campaign.effects import (
    BELOW_ROUNDING,
    EFFECTS,
    HARMFUL,
    HARMLESS,
    MASKED,
    Scale,
    change,
    scale_of,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def operands(dtype: torch.dtype, m: int = 3, k: int = 37, n: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    a, b, added = (
        torch.randn(1, rows, columns, dtype=torch.float64, generator=generator).to(dtype)
        for rows, columns in ((m, k), (k, n), (m, n))
    )
    return [torch.baddbmm(added, a, b), a, b, added.double()]


def exact_errors(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, added: torch.Tensor) -> list:
    """The largest |C − (A B + added)| of each row of the first batch, in exact arithmetic."""
    left, right, extra, got = (
        [[Fraction(x) for x in row] for row in t[0].tolist()] for t in (a, b, added, c)
    )
    rows = []
    for i, row in enumerate(left):
        errors = []
        for j in range(len(right[0])):
            true = extra[i][j] + sum(x * right[at][j] for at, x in enumerate(row))
            errors.append(abs(got[i][j] - true))
        rows.append(float(max(errors)))
    return rows


@for_each("dtype", DTYPES)
def test_the_rounding_level_is_the_true_rounding_error(dtype):
    problem = operands(dtype)
    scale = scale_of(*problem)
    expected = exact_errors(*problem)
    assert all(error > 0 for error in expected)
    assert scale.rounding[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert scale.norm[0].tolist() == pytest.approx(problem[0][0].double().norm(dim=1).tolist())
    assert scale.bar == pytest.approx(math.sqrt(torch.finfo(dtype).eps / 2))
    _, a, b, _ = problem
    c = torch.bmm(a, b)
    expected = exact_errors(c, a, b, torch.zeros_like(c))
    assert scale_of(c, a, b).rounding[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_fp64_samples_columns_of_wide_products():
    problem = operands(torch.float64, n=80)
    sampled = scale_of(*problem).rounding[0].tolist()
    everywhere = exact_errors(*problem)
    assert all(0 < some <= every for some, every in zip(sampled, everywhere, strict=True))


def test_rows_of_zeros_are_measured_by_the_smallest_normal_number():
    zeros = torch.zeros(1, 2, 4)
    scale = scale_of(zeros, torch.zeros(1, 2, 3), torch.zeros(1, 3, 4))
    assert scale.norm[0].tolist() == pytest.approx([2 * torch.finfo(torch.float32).tiny] * 2)
    assert scale.rounding[0].tolist() == [0, 0]


def test_classes_at_their_borders():
    level, norm = torch.tensor([[[1e-3, 1e-3]], [[10.0, 20.0]]], dtype=torch.float64)
    scale = Scale(level, norm, bar=0.01)
    nan, inf = math.nan, math.inf
    changes = torch.tensor([0.0, 1e-3, 1.001e-3, 0.1, 0.1001, nan, inf], dtype=torch.float64)
    rows = (torch.tensor(0), torch.tensor(0))
    classes = scale.classify(changes, changes, rows).tolist()
    expected = [MASKED, BELOW_ROUNDING, HARMLESS, HARMLESS, HARMFUL, HARMFUL, HARMFUL]
    assert classes == expected
    second = (torch.tensor(0), torch.tensor(1))
    assert scale.classify(changes, changes, second).tolist()[4] == HARMLESS
    assert len(EFFECTS) == HARMFUL + 1


def test_changes_of_special_values():
    inf, nan = math.inf, math.nan
    old = torch.tensor([inf, nan, 0.0, 1.0, inf, 1.0, 1.0])
    new = torch.tensor([inf, nan, -0.0, inf, 1.0, nan, 3.0])
    found = change(new, old)
    assert found.dtype == torch.float64
    assert found[:5].tolist() == [0, 0, 0, inf, inf]
    assert found[5].isnan()
    assert found[6] == 2

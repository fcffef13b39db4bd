"""Operands: shapes, dtypes, seeds, moments, and that no healthy product overflows."""

import pytest
import torch
from case_loops import for_each

from holdfast_lab.distribution_families import FAMILIES
from holdfast_lab.distributions import COHERENT, RANDOM, Distribution

EVERY = RANDOM | COHERENT | FAMILIES
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def drawn(draw: Distribution, dtype: torch.dtype, m: int, k: int, n: int) -> list[torch.Tensor]:
    return list(draw(m, k, n, dtype, torch.Generator().manual_seed(5)))


@for_each("dtype", DTYPES)
@for_each("name", EVERY)
def test_operands_have_the_shape_and_dtype_asked_and_a_finite_product(
    name: str, dtype: torch.dtype
) -> None:
    for m, k, n in ((1, 1, 1), (3, 2, 5), (6, 4097, 3)):
        a, b = drawn(EVERY[name], dtype, m, k, n)
        assert (a.shape, b.shape, a.dtype, b.dtype) == ((m, k), (k, n), dtype, dtype)
        assert (a @ b).isfinite().all()
        again = drawn(EVERY[name], dtype, m, k, n)
        assert torch.equal(a, again[0])
        assert torch.equal(b, again[1])


@for_each(
    ("name", "mean", "deviation", "low", "high"),
    [
        ("n01", 0, 1, -9, 9),
        ("n11", 1, 1, -9, 9),
        ("u11", 0, 3**-0.5, -1, 1),
        ("u01", 0.5, 12**-0.5, 0, 1),
        ("truncated", 0, 0.5395, -1, 1),
    ],
)
def test_random_elements_have_the_moments_of_their_name(
    name: str, mean: float, deviation: float, low: float, high: float
) -> None:
    for matrix in drawn(RANDOM[name], torch.float64, 300, 300, 300):
        assert float(matrix.mean()) == pytest.approx(mean, abs=0.02)
        assert float(matrix.std()) == pytest.approx(deviation, rel=0.02)
        assert low <= float(matrix.min()) < float(matrix.max()) <= high


def test_student_t_has_its_quantiles() -> None:
    a, _ = drawn(RANDOM["t3"], torch.float64, 400, 400, 1)
    beyond = [float((a.abs() > q).double().mean()) for q in (0.7649, 2.3534, 5.8409)]
    assert beyond == pytest.approx([0.5, 0.1, 0.01], rel=0.06)


def test_coherent_operands_are_what_their_names_say() -> None:
    a, b = drawn(COHERENT["correlated_signs"], torch.float32, 4, 30, 5)
    assert (a.unsqueeze(-1) * b >= 0).all()
    a, _ = drawn(COHERENT["softmax"], torch.float64, 4, 30, 5)
    assert a.sum(-1).tolist() == pytest.approx([1] * 4)
    a, _ = drawn(COHERENT["one_hot"], torch.float32, 4, 30, 5)
    assert a.sum(-1).tolist() == a.max(-1).values.tolist() == [1] * 4
    a, _ = drawn(COHERENT["padding"], torch.float32, 4, 32, 5)
    assert a[2:].abs().sum() + a[:, 24:].abs().sum() == 0
    assert (a[:2, :24] != 0).all()
    a, _ = drawn(COHERENT["outlier_1e3"], torch.float32, 64, 30, 5)
    assert float(a[:, 10].std() / a[:, 0].std()) == pytest.approx(1e3, rel=0.3)
    a, _ = drawn(COHERENT["repeated_rows"], torch.float32, 4, 30, 5)
    assert (a == a[0]).all()
    _, b = drawn(COHERENT["repeated_columns"], torch.float32, 4, 30, 5)
    assert (b == b[:, :1]).all()
    a, _ = drawn(COHERENT["subnormal"], torch.float32, 4, 30, 5)
    assert 0 < float(a.abs().max()) < torch.finfo(torch.float32).smallest_normal
    a, _ = drawn(COHERENT["huge_range"], torch.float32, 40, 30, 5)
    assert float(a.abs().max() / a.abs().min()) > 1e12

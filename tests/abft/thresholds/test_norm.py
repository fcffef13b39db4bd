"""The SDC study's tolerance: its norms, and how blind it is."""

import pytest
import torch
from case_loops import for_each
from threshold_cases import DTYPES, flagged, random_product

from holdfast.abft.thresholds import Norm, Product

A = torch.tensor([[1.0, -2.0], [3.0, 4.0], [0.5, 0.0]])
B = torch.tensor([[1.0, -1.0, 1.0], [2.0, 0.0, -3.0]])


def test_both_norms_are_largest_absolute_row_sums() -> None:
    tau, norm_a, norm_b = 2 * 2.0**-23, 7.0, 5.0
    bound = Norm()(Product(A, B, None, torch.float32))
    assert bound.tolist() == [tau * norm_a * norm_b] * 3


def test_a_rows_own_norm_takes_the_matrixs_place() -> None:
    bound = Norm(scope="row")(Product(A, B, None, torch.float32))
    assert bound.tolist() == [2 * 2.0**-23 * row * 5.0 for row in (3.0, 7.0, 0.5)]


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


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="scope is 'column'"):
        Norm(scope="column")  # type: ignore[arg-type]

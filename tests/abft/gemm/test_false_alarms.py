"""No event and no changed bit on more than 200,000 healthy rows, coherent operands included."""

import pytest
import torch
from case_loops import for_each
from gemm_distributions import DISTRIBUTIONS
from struck import DTYPES
from torch import nn

import holdfast
from holdfast import events
from holdfast.digest.tensors import tensor_digest

pytestmark = pytest.mark.usefixtures("two_threads")

ROWS, INNER, COLUMNS = 2400, 96, 33
INNERS = [1, 2, 3, 5, 8, 17, 64, 255, 1024, 3000, 8192]


def checked_rows(protection: holdfast.Protection) -> int:
    return sum(site.rows for site in protection.report().sites)


@for_each("dtype", DTYPES)
@for_each("name", DISTRIBUTIONS)
def test_healthy_rows_raise_no_event(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(name))
    a, b = DISTRIBUTIONS[name](ROWS, INNER, COLUMNS, dtype, generator)
    expected = tensor_digest(a @ b)
    with holdfast.protect(nn.Identity()) as protection:
        protection.reset_counters()
        assert tensor_digest(a @ b) == expected
        assert checked_rows(protection) == ROWS
    assert events.recent() == []


@for_each("dtype", DTYPES)
@for_each("inner", INNERS)
def test_any_inner_length_raises_no_event(inner: int, dtype: torch.dtype) -> None:
    with holdfast.protect(nn.Identity()) as protection:
        for index, (name, make) in enumerate(DISTRIBUTIONS.items()):
            a, b = make(6, inner, 5, dtype, torch.Generator().manual_seed(index))
            bias = torch.full((5,), 0.3, dtype=dtype)
            protection.reset_counters()
            torch.addmm(bias, a, b)
            assert checked_rows(protection) == 6, name
            assert events.recent() == [], name

"""Operands of every shape and layout, outputs of every layout: verified, forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from case_loops import for_each
from gemm_strikes import strike
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs_shapes import BATCH_LAYOUTS, LAYOUTS
from struck import DTYPES, armed, kinds
from torch import nn

import holdfast
from holdfast import events

REAL = sorted(set(LAYOUTS) - {"real part", "conjugate's imaginary part"})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Random tensors are of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@settings(suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(st.integers(0, 3), *[st.integers(1, 70)] * 3),
    layouts=st.tuples(st.sampled_from(REAL), st.sampled_from(REAL)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_operands(
    sizes: tuple[int, int, int, int], layouts: tuple[str, str], dtype: torch.dtype, seed: int
) -> None:
    batch, m, k, n = sizes
    lead = (batch,) if batch else ()
    torch.manual_seed(seed)
    with default_dtype(dtype), torch.no_grad():
        a = BATCH_LAYOUTS[layouts[0]]((*lead, m, k))[1]
        b = BATCH_LAYOUTS[layouts[1]]((*lead, k, n))[1]
    expected = torch.matmul(a, b)
    events.clear()
    with holdfast.protect(nn.Identity()), torch.no_grad():
        assert torch.equal(torch.matmul(a, b), expected)
        assert events.recent() == []
        with armed(strike(0)):
            assert torch.equal(torch.matmul(a, b), expected)
    assert kinds() == ["gemm_fault"]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@for_each("shape", [(0,), (2, 2), (3, 5), (7, 9)])
def test_an_output_that_torch_resizes_is_verified(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    expected = torch.mm(a, b)
    with holdfast.protect(nn.Identity()) as protection:
        with armed(strike(0)):
            assert torch.equal(torch.mm(a, b, out=torch.empty(shape)), expected)
        assert all(site.covered for site in protection.report().sites)
    assert kinds() == ["gemm_fault"]

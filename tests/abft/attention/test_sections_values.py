"""The sections' numbers are torch's, and healthy data raises nothing, however coherent."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from case_loops import for_each
from fused_cases import COHERENT, OVERFLOWS_FP16
from hypothesis import given
from hypothesis import strategies as st
from section_cases import BATCH, HEADS, LENGTH, WIDTH, Plain, data, error, module, results
from struck import DTYPES, kinds, same_bits, struck

from holdfast import events
from holdfast.abft import counters
from holdfast.nn import Attention

AHEAD = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4]])
ROWS = (torch.arange(LENGTH) < 3)[:, None].expand(LENGTH, LENGTH)

# name: settings of the module, keyword arguments of the call, and the mask for plain torch.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], torch.Tensor | None]] = {
    "plain": ({}, {}, None),
    "no bias": ({"bias": False}, {}, None),
    "causal": ({"causal": True}, {}, AHEAD),
    "bool mask": ({}, {"mask": AHEAD}, AHEAD),
    "padding": ({}, {"key_padding_mask": PADDING}, PADDING[:, None, None]),
    "causal, padding": (
        {"causal": True},
        {"key_padding_mask": PADDING},
        PADDING[:, None, None] | AHEAD,
    ),
    "window": ({"causal": True, "window": 3}, {}, AHEAD | torch.ones_like(AHEAD).tril(-3)),
    "blocked rows": ({}, {"mask": ROWS}, ROWS),
}
dtypes = for_each("dtype", DTYPES)


@dtypes
@for_each("variant", VARIANTS)
def test_the_bits_are_torchs_whether_checked_or_not_and_errors_at_most_twice_torchs(
    variant: str, dtype: torch.dtype
) -> None:
    made, call, blocked = VARIANTS[variant]
    verified, unchecked = module(dtype, **made), module(dtype, **made, frequencies=(0, 0, 0))
    ours = results(verified, data(dtype), **call)
    torchs = results(Plain(verified), data(dtype), blocked=blocked)
    # The input's gradient is a sum of three, which autograd adds in an order of its own.
    assert same_bits([ours[0], *ours[2:]], [torchs[0], *torchs[2:]])
    assert same_bits(ours, results(unchecked, data(dtype), **call))
    exact = Plain(deepcopy(verified).double())
    truth = results(exact, data(dtype).double(), blocked=blocked)
    assert error(ours, truth) <= 2 * error(torchs, truth) + 4 * torch.finfo(torch.float64).eps
    assert events.recent() == []


@for_each("shared", [1, 3])
@for_each("rope", [None, 10000.0])
def test_gradients_are_right(shared: int, rope: float | None) -> None:
    made = Attention(12, 3, kv_heads=shared, rope=rope, dtype=torch.float64)
    x = torch.randn(2, 4, 12, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    parameters = dict(made.named_parameters())

    def function(x: torch.Tensor, bias: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given = dict(zip(parameters, weights, strict=True))
        return torch.func.functional_call(made, given, (x,), {"mask": bias})

    assert torch.autograd.gradcheck(function, (x, bias, *parameters.values()), fast_mode=True)
    assert events.recent() == []


def test_only_wanted_gradients_are_computed() -> None:
    made = module().requires_grad_(False)
    made.v_proj.weight.requires_grad_(True)
    counters.reset()
    made(data()).sum().backward()
    sites = {(row["site"][1], row["site"][3]) for row in counters.counters()}
    assert {site for site in sites if site[1]} == {("S_O.O", 1), ("S_CL.CL", 2), ("S_CL.V", 2)}
    made.v_proj.weight.requires_grad_(False)
    assert not made(data()).requires_grad


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    groups=st.integers(1, 3),
    shared=st.integers(1, 2),
    size=st.integers(1, 5),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_is_near_the_oracle(
    sizes: tuple[int, int, int], groups: int, shared: int, size: int, masked: bool, seed: int
) -> None:
    generator, (batch, queries, keys) = torch.Generator().manual_seed(seed), sizes
    width = groups * shared * size
    made = Attention(width, groups * shared, kv_heads=shared, kdim=3, vdim=2, dtype=torch.float64)
    shapes = (batch, queries, width), (batch, keys, 3), (batch, keys, 2)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    blocked = torch.rand(queries, keys, generator=generator) < 0.5 if masked else None
    ours = results(made, *inputs, mask=blocked)
    torch.testing.assert_close(
        ours, results(Plain(made), *inputs, blocked=blocked), rtol=1e-11, atol=1e-11
    )
    assert events.recent() == []


def test_blocked_queries_get_the_output_bias_and_no_gradient() -> None:
    made, x = module(), data().requires_grad_()
    output = made(x, key_padding_mask=torch.ones(BATCH, LENGTH, dtype=torch.bool))
    assert torch.equal(output, made.out_proj.bias.expand(output.shape))
    grads = torch.autograd.grad(output.sum(), [x, made.q_proj.weight, made.v_proj.weight])
    assert all(not grad.any() for grad in grads)
    assert torch.equal(made(data(), mask=torch.full((LENGTH, LENGTH), -math.inf)), output)
    assert events.recent() == []


@dtypes
@for_each("name", sorted(COHERENT.keys() - OVERFLOWS_FP16))
@for_each("causal", [False, True])
def test_healthy_data_raises_no_event(name: str, dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(3)
    made = Attention(48, 4, causal=causal, dtype=torch.float64).to(dtype)
    x = torch.randn(2, 65, 48, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    counters.reset()
    results(made, COHERENT[name](x).to(dtype))
    rows = counters.counters()
    assert len(rows) == 19
    assert sum(row["rows"] for row in rows) > 4000
    assert events.recent() == []


@dtypes
@for_each("inner", [1, 3, 200, 1500])
def test_any_inner_length_raises_no_event(inner: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(inner)
    made = Attention(8, 2, kdim=inner, vdim=inner, dtype=torch.float64).to(dtype)
    query = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64).to(dtype)
    keys = torch.randn(2, 300, inner, generator=generator, dtype=torch.float64).to(dtype)
    results(made, query, keys, keys.abs())
    assert events.recent() == []


@dtypes
@for_each("value", [torch.nan, torch.inf])
def test_nan_and_inf_of_the_input_are_named_and_left(value: float, dtype: torch.dtype) -> None:
    x = data(dtype)
    x[0, 3, 5] = value
    made = module(dtype)
    output = made(x)
    assert torch.equal(output.isnan(), Plain(made)(x).isnan())
    assert torch.equal(output[1], made(data(dtype))[1])
    assert set(kinds()) == {"nonfinite_input"}


def test_an_overflow_of_fp16_is_named_and_is_no_fault() -> None:
    made, x = module(torch.float16), data(torch.float16) * 600
    assert made.q_proj(x).isfinite().all()
    assert (made.q_proj(x) @ made.k_proj(x).mT).isinf().any()
    assert not made(x).isfinite().all()
    assert set(kinds()) == {"nonfinite_input"}
    assert any("overflows" in event.detail["reason"] for event in events.recent())


def test_beside_a_nan_of_the_input_a_fault_is_still_repaired() -> None:
    x = data()
    x[0, 3, 5] = torch.nan  # the first sequence; the fault strikes the second
    healthy = module()(x)
    events.clear()
    with struck((HEADS, 4, 4), 1e9, site="S_AS.AS/forward"):
        assert torch.equal(module()(x)[1], healthy[1])
    assert kinds().count("gemm_fault") == 1


@pytest.mark.parametrize("batch", [0, BATCH])
def test_empty_sequences_are_empty(batch: int) -> None:
    assert module()(torch.empty(batch, 0, WIDTH)).shape == (batch, 0, WIDTH)
    assert events.recent() == []

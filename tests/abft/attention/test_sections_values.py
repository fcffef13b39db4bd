"""The numbers: those of the unprotected code bit for bit, and as near to fp64 as torch's."""

import math
from typing import Any

import torch
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st
from section_cases import (
    BATCH,
    DTYPES,
    LENGTH,
    Plain,
    copied,
    data,
    error,
    module,
    results,
    same_bits,
)

from holdfast import events
from holdfast.nn import Attention

AHEAD = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [4]])

# name: settings of the module, keyword arguments of the call, and the same for plain torch.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "no bias": ({"bias": False}, {}, {}),
    "causal": ({"causal": True}, {}, {"blocked": AHEAD}),
    "bool mask": ({}, {"mask": AHEAD}, {"blocked": AHEAD}),
    "padding": ({}, {"key_padding_mask": PADDING}, {"blocked": PADDING[:, None, None]}),
    "causal, padding": (
        {"causal": True},
        {"key_padding_mask": PADDING},
        {"blocked": PADDING[:, None, None] | AHEAD},
    ),
    "window": (
        {"causal": True, "window": 3},
        {},
        {"blocked": AHEAD | torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-3)},
    ),
    "blocked rows": (
        {},
        {"mask": (torch.arange(LENGTH) < 3)[:, None].expand(LENGTH, LENGTH)},
        {"blocked": (torch.arange(LENGTH) < 3)[:, None].expand(LENGTH, LENGTH)},
    ),
}
variants = for_each("variant", VARIANTS)
dtypes = for_each("dtype", DTYPES)


@dtypes
@variants
def test_the_bits_are_torchs_whether_checked_or_not_and_errors_at_most_twice_torchs(
    variant: str, dtype: torch.dtype
) -> None:
    made, call, plain = VARIANTS[variant]
    verified, unchecked = module(dtype, **made), module(dtype, **made, frequencies=(0, 0, 0))
    ours = results(verified, data(dtype), **call)
    torchs = results(Plain(verified), data(dtype), **plain)
    # The input's gradient is a sum of three, which autograd adds in an order of its own.
    assert same_bits([ours[0], *ours[2:]], [torchs[0], *torchs[2:]])
    assert same_bits(ours, results(unchecked, data(dtype), **call))
    exact = copied(verified, torch.float64)
    truth = results(Plain(exact), data(dtype).double(), **plain)
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
    made = module()
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    made.v_proj.weight.requires_grad_(True)
    (grad,) = torch.autograd.grad(made(data()).sum(), made.v_proj.weight)
    whole = results(module(), data())
    assert grad.shape == made.v_proj.weight.shape
    assert len(whole) == 2 + len(list(made.parameters()))
    made.v_proj.weight.requires_grad_(False)
    assert not made(data()).requires_grad


def test_the_gradient_of_an_additive_mask() -> None:
    made, x = module(), data()
    bias = torch.randn(LENGTH, LENGTH, requires_grad=True)
    (ours,) = torch.autograd.grad(made(x, mask=bias).square().sum(), bias)
    (torchs,) = torch.autograd.grad(Plain(made)(x, bias=bias).square().sum(), bias)
    torch.testing.assert_close(ours, torchs)


@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 7),
    keys=st.integers(1, 7),
    groups=st.integers(1, 3),
    shared=st.integers(1, 2),
    size=st.integers(1, 5),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_is_near_the_oracle(
    batch: int,
    queries: int,
    keys: int,
    groups: int,
    shared: int,
    size: int,
    masked: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = groups * shared * size
    made = Attention(width, groups * shared, kv_heads=shared, kdim=3, vdim=2, dtype=torch.float64)
    query = torch.randn(batch, queries, width, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, keys, 3, generator=generator, dtype=torch.float64)
    value = torch.randn(batch, keys, 2, generator=generator, dtype=torch.float64)
    blocked = torch.rand(queries, keys, generator=generator) < 0.5 if masked else None
    ours = results(made, query, key, value, mask=blocked)
    exact = results(Plain(made), query, key, value, blocked=blocked)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert events.recent() == []


def test_blocked_queries_get_the_output_bias_and_no_gradient() -> None:
    made, x = module(), data().requires_grad_()
    output = made(x, key_padding_mask=torch.ones(BATCH, LENGTH, dtype=torch.bool))
    assert torch.equal(output, made.out_proj.bias.expand(output.shape))
    grads = torch.autograd.grad(output.sum(), [x, made.q_proj.weight, made.v_proj.weight])
    assert all(not grad.any() for grad in grads)
    minus = torch.full((LENGTH, LENGTH), -math.inf)
    assert torch.equal(made(data(), mask=minus), output)
    assert events.recent() == []

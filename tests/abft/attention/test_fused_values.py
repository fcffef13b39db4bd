"""The fused kernel computes attention: values, gradients, layouts, any number of threads."""

import mpmath
import torch
import torch.nn.functional as F
from case_loops import for_each
from fused_cases import DTYPES, NATIVE, Case, backward, check_twice, exact, forward, ours, torchs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.attention.reference import attention

pytestmark = NATIVE

CASES = {
    "small": Case(),
    "tiles of queries": Case(queries=130, keys=130, width=64),
    "tiles of keys": Case(queries=40, keys=1100, width=32),
    "causal": Case(queries=130, keys=130, width=64, causal=True),
    "causal, fewer keys": Case(queries=150, keys=70, causal=True),
    "causal, more keys": Case(queries=70, keys=600, causal=True),
    "decode": Case(batch=2, heads=4, kv_heads=2, queries=1, keys=77, width=32),
    "grouped": Case(batch=2, heads=6, kv_heads=2, queries=33, keys=40),
    "one of everything": Case(heads=1, kv_heads=1, queries=1, keys=1, width=1),
    "odd width": Case(queries=17, keys=19, width=40),
    "wide": Case(queries=20, keys=33, width=256),
    "scale": Case(scale=-0.7),
    "mask": Case(queries=70, keys=600, mask="full"),
    "mask of keys": Case(batch=2, queries=20, keys=50, mask="keys"),
    "mask of rows": Case(batch=2, queries=20, keys=50, mask="rows"),
    "mask of heads": Case(batch=2, queries=20, keys=50, mask="heads"),
    "empty rows": Case(queries=20, keys=50, mask="empty_rows"),
    "mask and causal": Case(queries=70, keys=70, mask="full", causal=True),
}


@for_each("dtype", DTYPES)
@for_each("case", CASES.values())
def test_no_further_from_the_truth_than_twice_torch(case: Case, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    found = ours(case, operands)
    check_twice(found, torchs(case, operands), exact(case, operands))
    assert events.recent() == []


shapes = st.builds(
    lambda groups, kv_heads, **rest: Case(heads=groups * kv_heads, kv_heads=kv_heads, **rest),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    batch=st.integers(1, 2),
    queries=st.integers(1, 90),
    keys=st.integers(1, 90),
    width=st.integers(1, 48),
    causal=st.booleans(),
    mask=st.sampled_from(["", "full", "keys", "rows", "heads", "empty_rows"]),
)


@settings(derandomize=True)
@given(shapes, st.sampled_from(DTYPES))
def test_any_shape(case: Case, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    check_twice(ours(case, operands), torchs(case, operands), exact(case, operands))
    assert events.recent() == []


def test_layouts_are_torchs() -> None:
    case = Case(batch=2, heads=4, kv_heads=4, queries=9, keys=12)
    q, k, v, grad = case.operands(torch.float32)
    packed = torch.randn(2, 9, 3, 4, 8)[:, :, 0].transpose(1, 2)
    for query in (q, q.transpose(1, 2).contiguous().transpose(1, 2), packed, q[:, :1].expand_as(q)):
        operands = [query, k, v, grad]
        expected, found = torchs(case, operands), ours(case, operands)
        assert [t.stride() for t in found] == [t.stride() for t in expected]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_rows_that_are_not_contiguous() -> None:
    case = Case(queries=40, keys=70, width=16)
    operands = case.operands(torch.float32)
    apart = [torch.stack([t, t], -1)[..., 0] for t in operands]
    assert all(t.stride(-1) == 2 for t in apart)
    for mine, theirs in zip(ours(case, apart), ours(case, operands), strict=True):
        assert torch.equal(mine, theirs)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    case = Case(batch=2, heads=4, kv_heads=2, queries=150, keys=600, width=16, causal=True)
    operands, before = case.operands(torch.float32), torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append(ours(case, operands))
        finally:
            torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@for_each("shape", [(0, 2, 5), (1, 0, 5), (1, 2, 0)])
def test_nothing_to_compute(shape: tuple[int, int, int]) -> None:
    batch, heads, queries = shape
    q, k = torch.randn(batch, heads, queries, 8), torch.randn(batch, heads, 7, 8)
    with holdfast.protect(nn.Identity()):
        out, lse = forward(q, k, k)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]


def test_no_keys_give_zeros() -> None:
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 0, 8)
    with holdfast.protect(nn.Identity()):
        out, lse = forward(q, k, k)
    assert not out.any()
    assert not lse.any()


def test_autograd_reaches_both_kernels_whichever_ran_forward() -> None:
    case = Case(queries=70, keys=90, width=16)
    q, k, v, grad = case.operands(torch.float32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    true = exact(case, [q, k, v, grad])[2:]

    def gradients(protect_forward: bool, protect_backward: bool) -> tuple[torch.Tensor, ...]:
        with holdfast.protect(nn.Identity(), verify=True) as protection:
            if not protect_forward:
                protection.remove()
            out = F.scaled_dot_product_attention(*leaves)
        with holdfast.protect(nn.Identity()) as protection:
            if not protect_backward:
                protection.remove()
            return torch.autograd.grad(out, leaves, grad)

    for which in ((True, True), (True, False), (False, True)):
        for mine, truth in zip(gradients(*which), true, strict=True):
            torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5)
    assert events.recent() == []


def test_a_bool_mask_and_grouped_heads_through_the_public_function() -> None:
    case = Case(heads=4, kv_heads=2, queries=20, keys=30)
    q, k, v, _ = case.operands(torch.float32)
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(0)) < 0.6
    with holdfast.protect(nn.Identity()) as protection:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        names = [site.site for site in protection.report().sites if site.covered]
    assert names == ["(outside)/sdpa/forward"]
    torch.testing.assert_close(found, attention(q, k, v, mask)[0])


@for_each(("dtype", "lowest"), [(torch.float32, -80.0), (torch.float64, -690.0)])
def test_exponentials_are_good_to_one_unit(dtype: torch.dtype, lowest: float) -> None:
    """With one query and dO = 1, dV is P: exponentials alone, of what lse leaves."""
    scores = torch.linspace(lowest, 0.0, 4000, dtype=dtype)
    lse = scores.double().logsumexp(0).to(dtype)
    keys, one = scores.view(1, 1, -1, 1), torch.ones(1, 1, 1, 1, dtype=dtype)
    with holdfast.protect(nn.Identity()):
        found = backward(one, one, keys, keys * 0, one * 0, lse.view(1, 1, 1), 0.0, False)[2]
    with mpmath.workdps(40):
        for mine, argument in zip(found.flatten().tolist(), (scores - lse).tolist(), strict=True):
            true = mpmath.exp(mpmath.mpf(argument))
            assert abs(mine - true) <= torch.finfo(dtype).eps * true
    assert events.recent() == []

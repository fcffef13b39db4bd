"""The fused kernel computes attention, and healthy data raises nothing, coherent or not.

Non-finite inputs are named.
"""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from case_loops import for_each
from fused_cases import (
    COHERENT,
    DTYPES,
    NATIVE,
    OVERFLOWS_FP16,
    Case,
    backward,
    check_twice,
    exact,
    forward,
    ours,
    torchs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from struck import kinds, same_bits
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.attention.reference import attention
from holdfast.digest.tensors import tensors_digest
from holdfast.protection import CoverageReport

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
    check_twice(case, operands)
    assert events.recent() == []


@for_each("case", [Case(queries=130, keys=130, width=w, causal=c) for w, c in ((16, 0), (64, 1))])
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@for_each("low", [1.0, 4.0])
def test_nor_on_positive_inputs(case: Case, dtype: torch.dtype, low: float) -> None:
    generator = torch.Generator().manual_seed(3)
    *inputs, upstream = case.operands(dtype)
    positive = [(low * (1 + torch.rand(x.shape, generator=generator))).to(dtype) for x in inputs]
    check_twice(case, [*positive, upstream])
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
    check_twice(case, operands)
    assert events.recent() == []


def test_layouts_are_torchs() -> None:
    case = Case(batch=2, heads=4, kv_heads=4, queries=9, keys=12)
    q, k, v, grad = case.operands(torch.float32)
    packed = torch.randn(2, 9, 3, 4, 8)[:, :, 0].transpose(1, 2)
    for query in (q, q.transpose(1, 2).contiguous().transpose(1, 2), packed, q[:, :1].expand_as(q)):
        operands = [query, k, v, grad]
        expected, found = torchs(case, operands), ours(case, operands)
        assert [t.stride() for t in found] == [t.stride() for t in expected]
        torch.testing.assert_close(found, expected)
    apart = [torch.stack([t, t], -1)[..., 0] for t in (q, k, v, grad)]
    assert all(t.stride(-1) == 2 for t in apart)
    assert same_bits(ours(case, apart), ours(case, [q, k, v, grad]))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    case = Case(batch=2, heads=4, kv_heads=2, queries=150, keys=600, width=16, causal=True)
    operands, before, digests = case.operands(torch.float32), torch.get_num_threads(), set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            digests.add(tensors_digest(ours(case, operands)))
        finally:
            torch.set_num_threads(before)
    assert len(digests) == 1


@for_each(("shape", "keys"), [((0, 2, 5), 7), ((1, 0, 5), 7), ((1, 2, 0), 7), ((1, 2, 5), 0)])
def test_nothing_to_compute_gives_zeros(shape: tuple[int, int, int], keys: int) -> None:
    q, k = torch.randn(*shape, 8), torch.randn(*shape[:2], keys, 8)
    with holdfast.protect(nn.Identity()):
        out, lse = forward(q, k, k)
    assert (out.shape, lse.shape) == (q.shape, shape)
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


CASE = Case(queries=140, keys=600, width=32)


def protected(
    case: Case, operands: list[torch.Tensor], mask: torch.Tensor | None = None
) -> CoverageReport:
    """The report of one forward and backward pass."""
    with holdfast.protect(nn.Identity()) as protection:
        protection.reset_counters()
        torchs(case, operands, mask)
        return protection.report()


@for_each("causal", [False, True])
@for_each("dtype", DTYPES)
@for_each("name", COHERENT)
def test_coherent_data_raises_no_event(name: str, dtype: torch.dtype, causal: bool) -> None:
    if dtype == torch.float16 and name in OVERFLOWS_FP16:
        return
    case = Case(queries=140, keys=600, width=32, causal=causal)
    operands = [COHERENT[name](t.float()).to(dtype) for t in case.operands(torch.float32)]
    report = protected(case, operands)
    assert events.recent() == []
    assert [site.rows for site in report.sites] == [280, 280]
    assert name != "random" or [site.suspects for site in report.sites] == [0, 0]


def test_the_report_covers_both_passes() -> None:
    report = protected(CASE, CASE.operands(torch.float32))
    assert {site.site: site.covered for site in report.sites} == {
        "(outside)/sdpa/forward": True,
        "(outside)/sdpa_backward/grad_qkv": True,
    }
    assert all(0 < site.line < 1e-3 for site in report.sites)
    assert all(site.product_s > 0 for site in report.sites)


class Block(nn.Module):
    """Attention as BERT's: three projections, fused attention with a padding mask, one more."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = [
            part(x).unflatten(-1, (4, 8)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))


def test_a_block_is_covered_under_the_names_of_its_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("attention", Block())
    mask = torch.zeros(2, 1, 1, 20)
    mask[1, ..., 12:] = torch.finfo(torch.float32).min
    with holdfast.protect(model) as protection:
        model.attention(torch.randn(2, 20, 32), mask).square().sum().backward()
        report = protection.report()
    assert [site.site for site in report.sites if not site.covered] == []
    names = {site.site for site in report.sites}
    assert {"attention/sdpa/forward", "attention/sdpa_backward/grad_qkv"} <= names
    assert events.recent() == []


@for_each("value", [math.nan, math.inf])
@for_each("which", [0, 1, 2, 3])
def test_a_nan_or_inf_in_the_inputs_is_named_as_such(which: int, value: float) -> None:
    operands = CASE.operands(torch.float32)
    operands[which][0, 1, 7, 3] = value
    found = ours(CASE, operands)
    assert set(kinds()) == {"nonfinite_input"}
    for mine, theirs in zip(found, torchs(CASE, operands), strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())


@for_each("value", [math.nan, math.inf])
def test_a_nan_or_inf_in_the_mask_is_named_as_such(value: float) -> None:
    mask = torch.zeros(140, 600)
    mask[5, 550] = value
    with holdfast.protect(nn.Identity()):
        out, lse = forward(*CASE.operands(torch.float32)[:3], attn_mask=mask)
    (event,) = events.recent()
    assert event.kind == "nonfinite_input"
    assert "mask is NaN or INF" in event.detail["reason"]
    assert out[:, :, 5].isnan().all()
    assert lse[:, :, 5].isnan().all()
    assert out[:, :, :5].isfinite().all()


def test_scores_that_overflow_are_inputs_not_faults() -> None:
    operands = [t * 1e25 for t in CASE.operands(torch.float32)]
    with holdfast.protect(nn.Identity()):
        forward(*operands[:3])
    assert set(kinds()) == {"nonfinite_input"}


def test_part_of_the_keys_with_the_logarithm_of_all_is_no_fault() -> None:
    """As ring attention calls the backward pass: rows of P sum to less than 1."""
    q, k, v, grad = Case(queries=20, keys=30).operands(torch.float32)
    out, lse = forward(q, k, v)
    with holdfast.protect(nn.Identity()):
        backward(grad, q, k[:, :, :10], v[:, :, :10], out, lse, 0.0, False)
    assert events.recent() == []


def test_a_damaged_logarithm_is_seen_in_backward() -> None:
    q, k, v, grad = Case(queries=20, keys=30).operands(torch.float32)
    out, lse = forward(q, k, v)
    lse[0, 1, 4] -= 0.5
    with holdfast.protect(nn.Identity()), pytest.raises(holdfast.UncorrectableFault):
        backward(grad, q, k, v, out, lse, 0.0, False)


def test_what_is_left_to_torch_is_listed() -> None:
    q = torch.randn(1, 2, 4, 8)
    with holdfast.protect(nn.Identity()) as protection:
        with pytest.raises(RuntimeError, match="dropout"):
            forward(q, q, q, 0.5)
        (site,) = protection.report().sites
    assert (site.covered, site.reason) == (False, "dropout within fused attention")


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_finite_mask_hides_whole_raise_nothing(dtype: torch.dtype) -> None:
    """At -1e9 the logarithm of 4,096 keys is less than a rounding of the logsumexp."""
    q, k, v = (torch.randn(1, 1, n, 16, dtype=dtype).requires_grad_() for n in (4, 4096, 4096))
    mask = torch.zeros(1, 1, 4, 4096, dtype=dtype)
    mask[:, :, 1] = -1e9
    with holdfast.protect(nn.Identity()):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    assert kinds() == []

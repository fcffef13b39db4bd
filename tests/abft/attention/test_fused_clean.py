"""Healthy attention raises nothing, coherent data included; non-finite inputs are named."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from case_loops import for_each
from fused_cases import DTYPES, NATIVE, Case, forward, ours, torchs
from torch import nn

import holdfast
from holdfast import events
from holdfast.protection import CoverageReport

pytestmark = NATIVE

CASE = Case(queries=140, keys=600, width=32)

Change = Callable[[torch.Tensor], torch.Tensor]


def _outlier(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., 3] *= 1e5
    return x


def _wide_row(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, :, 5] *= 1e5
    return x


EVERY: dict[str, Change] = {
    "random": lambda x: x,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "tenths": lambda x: torch.full_like(x, 0.1),
    "constant rows": lambda x: x[:, :, :1].expand_as(x).contiguous(),
    "constant columns": lambda x: x[..., :1].expand_as(x).contiguous(),
    "positive": torch.abs,
    "around five": lambda x: x * 0.01 + 5,
    "sorted": lambda x: x.sort(2).values,
    "outlier channel": _outlier,
    "outlier row": _wide_row,
    "one-hot": lambda x: x * 30,
    "tiny": lambda x: x * 1e-20,
    "subnormal": lambda x: x * 1e-40,
    "large": lambda x: x * 1e8,
}
OVERFLOWS_FP16 = {"outlier channel", "outlier row", "large"}


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
@for_each("name", EVERY)
def test_coherent_data_raises_no_event(name: str, dtype: torch.dtype, causal: bool) -> None:
    if dtype == torch.float16 and name in OVERFLOWS_FP16:
        pytest.skip("does not fit into fp16")
    case = Case(queries=140, keys=600, width=32, causal=causal)
    operands = [EVERY[name](t.float()).to(dtype) for t in case.operands(torch.float32)]
    report = protected(case, operands)
    assert events.recent() == []
    assert [site.rows for site in report.sites] == [280, 280]


@for_each("dtype", DTYPES)
def test_random_data_raises_no_suspicion(dtype: torch.dtype) -> None:
    for seed in range(4):
        report = protected(CASE, CASE.operands(dtype, seed))
        assert [site.suspects for site in report.sites] == [0, 0], seed


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
    kinds = {event.kind for event in events.recent()}
    assert kinds == {"nonfinite_input"}
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


def test_masks_of_minus_infinity_are_nothing_special() -> None:
    mask = torch.full((140, 600), -math.inf)
    mask[:, 300:] = 0
    mask[9] = -math.inf
    report = protected(CASE, CASE.operands(torch.float32), mask)
    assert events.recent() == []
    assert sum(site.suspects for site in report.sites) == 0


def test_scores_that_overflow_are_inputs_not_faults() -> None:
    operands = [t * 1e25 for t in CASE.operands(torch.float32)]
    with holdfast.protect(nn.Identity()):
        forward(*operands[:3])
    assert {event.kind for event in events.recent()} == {"nonfinite_input"}


def test_part_of_the_keys_with_the_logarithm_of_all_is_no_fault() -> None:
    """As ring attention calls the backward pass: rows of P sum to less than 1."""
    case = Case(queries=20, keys=30)
    q, k, v, grad = case.operands(torch.float32)
    out, lse = forward(q, k, v)
    with holdfast.protect(nn.Identity()):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k[:, :, :10], v[:, :, :10], out, lse, 0.0, False
        )
    assert events.recent() == []


def test_a_damaged_logarithm_is_seen_in_backward() -> None:
    case = Case(queries=20, keys=30)
    q, k, v, grad = case.operands(torch.float32)
    out, lse = forward(q, k, v)
    lse[0, 1, 4] -= 0.5
    with holdfast.protect(nn.Identity()), pytest.raises(holdfast.UncorrectableFault):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False
        )


def test_what_is_left_to_torch_is_listed() -> None:
    q = torch.randn(1, 2, 4, 8)
    with holdfast.protect(nn.Identity()) as protection:
        with pytest.raises(RuntimeError, match="dropout"):
            forward(q, q, q, 0.5)
        (site,) = protection.report().sites
    assert not site.covered
    assert site.reason == "dropout within fused attention"

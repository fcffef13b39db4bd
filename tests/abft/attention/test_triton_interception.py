"""``protect(model, attention="fused")`` with CPU as the device whose attention is intercepted."""

import math
from collections.abc import Iterator

import pytest
import torch
from case_loops import for_each
from site_reports import covered, uncovered
from struck import same_bits
from torch import nn
from torch.nn import functional
from triton_attention_cases import fault, faults
from triton_device import CUDA, DEVICE, MARKS

import holdfast
from holdfast.abft.attention import cuda as fused
from holdfast.abft.attention import interception
from holdfast.abft.attention.cuda import Place
from holdfast.sites import SiteTuple, site_name

pytestmark = MARKS

OURS = {"0/sdpa/forward": 1, "0/sdpa_backward/grad_qkv": 1}


class Attends(nn.Module):
    """Self-attention of two query heads that share a key head, by one projection."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.project = dropout, nn.Linear(24, 4 * 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (4, 24)).transpose(1, 2).split([2, 1, 1], 1)
        out = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).sum(2)


@pytest.fixture(autouse=True)
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, torch.Tensor]]:
    """The slots of a ledger by site, while CPU stands in for CUDA if there is none."""
    slots: dict[str, torch.Tensor] = {}

    def slot(tensor: torch.Tensor, site: SiteTuple) -> torch.Tensor:
        new = torch.zeros(1, dtype=torch.int32, device=tensor.device)
        return slots.setdefault(site_name(site), new)

    monkeypatch.setattr(interception, "ledger_slot", slot)
    monkeypatch.setattr(interception, "KEY", "CUDA" if CUDA else "CPU")
    yield slots
    torch.compiler.reset()


def _problem(*layers: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(*(layers or (Attends(),))).to(DEVICE)
    return model, torch.randn(1, 20, 24, device=DEVICE)


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_our_kernels_run_while_protected_and_torchs_before_and_after() -> None:
    model, x = _problem()
    before = _step(model, x)
    with holdfast.protect(model, attention="fused") as protection:
        found = _step(model, x)
        report = protection.report()
    assert not same_bits(found, before)
    for mine, theirs in zip(found, before, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert same_bits(_step(model, x), before)
    rows = {row.site: row for row in report.sites if "sdpa" in row.site}
    assert rows.keys() == OURS.keys()
    for row in rows.values():
        assert (row.covered, row.method, row.calls, row.rows) == (True, "fused tiles", 1, 40)


@for_each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_at_most_twice_those_of_torchs_kernel(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v, grad = (
        torch.randn(1, heads, length, 24, generator=generator).to(DEVICE, dtype)
        for heads, length in ((2, 20), (1, 33), (1, 33), (2, 20))
    )

    def step(wanted: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(wanted).requires_grad_() for each in (q, k, v)]
        out = functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        gradients = torch.autograd.grad(out, leaves, grad.to(wanted))
        return [out.detach(), *gradients]

    theirs, truth = step(dtype), step(torch.float64)
    with holdfast.protect(nn.Identity(), attention="fused"):
        found = step(dtype)
    for mine, torchs, true in zip(found, theirs, truth, strict=True):
        error, allowed = ((x.double() - true).abs().max() for x in (mine, torchs))
        # The interpreter cuts bf16 off where a device rounds to nearest.
        cut = 2 if dtype == torch.bfloat16 and not CUDA else 1
        assert error <= 2 * allowed + 4 * cut * torch.finfo(dtype).eps * true.abs().max()


def test_the_last_protection_ends_the_interception() -> None:
    model, x = _problem()
    first = holdfast.protect(model, attention="fused")
    second = holdfast.protect(model, attention="fused")
    ours = _step(model, x)
    first.remove()
    first.remove()
    assert same_bits(_step(model, x), ours)
    second.remove()
    assert interception._library is None
    assert not same_bits(_step(model, x), ours)


def test_unverified_passes_have_the_same_bits_and_are_not_counted() -> None:
    model, x = _problem()
    with holdfast.protect(model, attention="fused") as protection:
        verified = _step(model, x)
    with holdfast.protect(model, attention="fused", verify=False) as protection:
        assert same_bits(_step(model, x), verified)
        assert not covered(protection.report())


def test_a_fault_that_stays_reaches_the_slot_of_its_site_alone(
    ledger: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _problem()
    struck = faults(fault(Place.ACCUMULATOR, row=5, column=3, value=1e4, attempts=9))
    passing = faults(fault(Place.ACCUMULATOR, row=6, column=3, value=1e4))
    attend = fused.attention_forward
    with holdfast.protect(model, attention="fused") as protection:
        clean = _step(model, x)
        assert {name: slot.item() for name, slot in ledger.items()} == dict.fromkeys(OURS, 0)
        for injected, value, suspects in ((passing, 0.0, 1), (struck, 2.0, 2)):
            monkeypatch.setattr(
                interception,
                "attention_forward",
                lambda *a, faults=injected, **o: attend(*a, faults=faults, **o),
            )
            assert same_bits(_step(model, x), clean) == (value == 0.0)
            raised = {name: slot.view(torch.float32).item() for name, slot in ledger.items()}
            assert raised == {"0/sdpa/forward": value, "0/sdpa_backward/grad_qkv": 0.0}
            (row,) = (r for r in protection.report().sites if r.site == "0/sdpa/forward")
            assert row.suspects == suspects


def test_compiled_code_keeps_our_kernels_whole_and_names_them_as_eager_mode_does() -> None:
    torch.compiler.reset()
    model, x = _problem(Attends(), Attends())
    with holdfast.protect(model, attention="fused") as protection:
        eager = _step(model, x)
        protection.reset_counters()
        found = _step(torch.compile(model, fullgraph=True), x)
        report = protection.report()
    for mine, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    attentions = {site: calls for site, calls in covered(report).items() if "sdpa" in site}
    ops = ("sdpa/forward", "sdpa_backward/grad_qkv")
    assert attentions == {f"{module}/{op}": 1 for module in "01" for op in ops}


def _heads(dtype: torch.dtype = torch.float32, heads: int = 2) -> torch.Tensor:
    return torch.randn(1, heads, 8, 16, dtype=dtype, device=DEVICE)


# What is left to torch's kernels, and a part of the reason.
LEFT = {
    "dropout": (lambda: _call(_heads(), dropout_p=0.5), "dropout"),
    "double": (lambda: _call(_heads(torch.float64)), "q is torch.float64; verified are float32"),
    "learned mask": (lambda: _call(_heads(), attn_mask=_heads(heads=1)[..., :8].requires_grad_()),
                     "the mask requires grad"),
    "three dimensions": (lambda: _call(_heads()[0]), "give [batch, heads, L, d]"),
    "torch.func": (lambda: torch.func.grad(lambda x: _call(x).sum())(_heads()), "torch.func"),
}  # fmt: skip


def _call(x: torch.Tensor, **options: object) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, **options)  # type: ignore[arg-type]


@for_each("name", LEFT)
def test_what_is_left_to_torch_is_listed_with_the_reason(name: str) -> None:
    call, reason = LEFT[name]
    with holdfast.protect(nn.Identity(), attention="fused") as protection:
        call()
        reasons = uncovered(protection.report())
    assert reason in reasons["(outside)/sdpa/forward"]


def test_masks_inference_mode_and_strides_go_to_our_kernels() -> None:
    x, seen = _heads(), torch.ones(8, 8, dtype=torch.bool, device=DEVICE).tril()
    with holdfast.protect(nn.Identity(), attention="fused") as protection:
        for mask in (seen, seen.float().log()):
            masked = _call(x, attn_mask=mask)
            assert same_bits(masked, _call(x, is_causal=True))
        with torch.inference_mode():
            assert same_bits(_call(x.clone(), is_causal=True), masked)
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        out = _call(turned, scale=1 / math.sqrt(16), is_causal=True)
        assert same_bits(out, masked)
        assert out.stride() == turned.stride()  # so that heads are joined without a copy
        assert covered(protection.report()) == {"(outside)/sdpa/forward": 6}

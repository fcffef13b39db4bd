"""What is not verified is in the report, with its reason; nothing is left out in silence."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast
from holdfast import events, native
from holdfast.protection import CoverageReport

NO_CHECKSUM = "no checksum for this op yet"


def uncovered(report: CoverageReport) -> dict[str, str]:
    """Reasons of the sites that are not covered."""
    return {site.site: site.reason for site in report.sites if not site.covered}


def covered(report: CoverageReport) -> set[str]:
    """Names of the sites that are."""
    return {site.site for site in report.sites if site.covered}


def test_fused_attention_is_covered_by_the_native_core_and_listed_without_it() -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    with holdfast.protect(nn.Identity()) as protection:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        report = protection.report()
    if native.core is None:
        assert set(uncovered(report).values()) == {NO_CHECKSUM}
        assert len(uncovered(report)) == 2
    else:
        names = {"(outside)/sdpa/forward", "(outside)/sdpa_backward/grad_qkv"}
        assert covered(report) == names


def test_multi_head_attention_shows_its_fused_part_and_covers_its_projections() -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 8, 16)
    with holdfast.protect(model) as protection:
        model(x, x, x, need_weights=False)[0].sum().backward()
        report = protection.report()
    assert any("/sdpa/" in site.site for site in report.sites)
    assert any(name.startswith("MultiheadAttention/addmm") for name in covered(report))


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_layer_never_disappears_from_the_report(training: bool) -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).train(training)
    with holdfast.protect(model) as protection, torch.no_grad():
        model(torch.randn(2, 8, 16))
        names = {site.site for site in protection.report().sites}
    for part in ("self_attn", "linear1", "linear2"):
        assert any(part in name for name in names), names


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        (nn.Conv1d(4, 4, 3), (2, 4, 9), "convolution"),
        (nn.Conv2d(4, 4, 3), (2, 4, 9, 9), "convolution"),
        (nn.ConvTranspose2d(4, 4, 3), (2, 4, 9, 9), "convolution"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_convolutions_are_listed(module: nn.Module, shape: tuple[int, ...], words: str) -> None:
    with holdfast.protect(nn.Sequential(module)) as protection:
        protection.model(torch.randn(shape))
        assert words in uncovered(protection.report())["0"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_listed_or_covered(kind: type[nn.RNNBase]) -> None:
    model = nn.Sequential(kind(8, 8))
    with holdfast.protect(model) as protection:
        model[0](torch.randn(4, 2, 8))[0].sum().backward()
        assert any(site.site.split("/")[0] == "0" for site in protection.report().sites)


def test_products_of_vectors_are_listed() -> None:
    x = torch.randn(6)
    with holdfast.protect(nn.Identity()) as protection:
        torch.randn(4, 6) @ x
        x @ x
        found = uncovered(protection.report())
    assert found == {"(outside)/dot/forward": NO_CHECKSUM}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.complex64, torch.complex128])
def test_other_dtypes_pass_unchanged_and_are_listed(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 6).mul(9).to(dtype), torch.randn(6, 5).mul(9).to(dtype)
    expected = a @ b
    with holdfast.protect(nn.Identity()) as protection:
        assert torch.equal(a @ b, expected)
        found = uncovered(protection.report())
    assert found == {"(outside)/mm/forward": "dtype has no rounding threshold"}


@pytest.mark.skipif(native.core is None, reason="the plain-torch backend has no such check")
def test_complex_factors_are_listed() -> None:
    a = torch.randn(3, 3, dtype=torch.complex64)
    with holdfast.protect(nn.Identity()) as protection:
        torch.addmm(a, a, a, alpha=1j)
        found = uncovered(protection.report())
    assert found == {"(outside)/addmm/forward": "dtype has no rounding threshold"}


def test_a_site_with_one_unverified_call_is_not_called_covered() -> None:
    with holdfast.protect(nn.Identity()) as protection:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.mm(torch.ones(2, 2).int(), torch.ones(2, 2).int())
        assert covered(protection.report()) == set()


def test_autocast_is_covered_in_its_own_dtype() -> None:
    model = nn.Linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    with holdfast.protect(model) as protection, torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        assert output.dtype is torch.bfloat16
        output.float().sum().backward()
        assert covered(protection.report()) == {
            f"Linear/addmm/{role}" for role in ("forward", "grad_a", "grad_b")
        }
    assert events.recent() == []

"""What is not verified is in the report, with its reason; nothing is left out in silence."""

import torch
import torch.nn.functional as F
from case_loops import for_each
from site_reports import covered, uncovered
from torch import nn

import holdfast
from holdfast import events


def test_fused_attention_is_covered() -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    with holdfast.protect(nn.Identity()) as protection:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
        report = protection.report()
    names = {"(outside)/sdpa/forward", "(outside)/sdpa_backward/grad_qkv"}
    assert covered(report).keys() == names


def test_multi_head_attention_shows_its_fused_part_and_covers_its_projections() -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 8, 16)
    with holdfast.protect(model) as protection:
        model(x, x, x, need_weights=False)[0].sum().backward()
        report = protection.report()
    assert any("/sdpa/" in site.site for site in report.sites)
    assert any(name.startswith("MultiheadAttention/addmm") for name in covered(report))


@for_each("training", [True, False])
def test_an_encoder_layer_never_disappears_from_the_report(training: bool) -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).train(training)
    with holdfast.protect(model) as protection, torch.no_grad():
        model(torch.randn(2, 8, 16))
        names = {site.site for site in protection.report().sites}
    for part in ("self_attn", "linear1", "linear2"):
        assert any(part in name for name in names), names


@for_each(
    ("module", "shape", "words"),
    [
        (nn.Conv1d(4, 4, 3), (2, 4, 9), "convolution"),
        (nn.Conv2d(4, 4, 3), (2, 4, 9, 9), "convolution"),
        (nn.ConvTranspose2d(4, 4, 3), (2, 4, 9, 9), "convolution"),
    ],
)
def test_convolutions_are_listed(module: nn.Module, shape: tuple[int, ...], words: str) -> None:
    with holdfast.protect(nn.Sequential(module)) as protection:
        protection.model(torch.randn(shape))
        assert words in uncovered(protection.report())["0"]


@for_each("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_listed_or_covered(kind: type[nn.RNNBase]) -> None:
    model = nn.Sequential(kind(8, 8))
    with holdfast.protect(model) as protection:
        model[0](torch.randn(4, 2, 8))[0].sum().backward()
        assert any(site.site.split("/")[0] == "0" for site in protection.report().sites)


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
        assert covered(protection.report()) == {}


def test_autocast_is_covered_in_its_own_dtype() -> None:
    model = nn.Linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    with holdfast.protect(model) as protection, torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        assert output.dtype is torch.bfloat16
        output.float().sum().backward()
        assert covered(protection.report()).keys() == {
            f"Linear/addmm/{role}" for role in ("forward", "grad_a", "grad_b")
        }
    assert events.recent() == []

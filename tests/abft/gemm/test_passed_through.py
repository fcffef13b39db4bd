"""What has no checksum is torch's, bit for bit and error for error, and is listed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from case_loops import for_each
from site_reports import covered, uncovered
from struck import same_bits
from torch import nn

import holdfast
from holdfast import events
from holdfast.digest.tensors import tensors_digest


def both_ways(
    op: Callable[..., torch.Tensor], left: tuple[int, ...], right: tuple[int, ...]
) -> list[torch.Tensor]:
    a, b = torch.randn(left, requires_grad=True), torch.randn(right, requires_grad=True)
    output = op(a, b)
    return [output.detach(), *torch.autograd.grad(output.sum(), (a, b))]


EMPTY: dict[str, Callable[[], list[torch.Tensor]]] = {
    f"{left} by {right}": lambda left=left, right=right: both_ways(torch.matmul, left, right)
    for left, right in [
        ((0, 4), (4, 5)),
        ((3, 0), (0, 5)),
        ((3, 4), (4, 0)),
        ((0, 0), (0, 0)),
        ((0, 3, 4), (0, 4, 5)),
        ((2, 0, 4), (2, 4, 5)),
        ((2, 3, 0), (2, 0, 5)),
        ((2, 3, 4), (2, 4, 0)),
        ((2, 3, 0), (0, 5)),
        ((0, 3, 4), (4, 5)),
        ((5, 1, 0, 3), (2, 3, 6)),
        ((0,), (0,)),
        ((3, 0), (0,)),
    ]
} | {
    "addmm": lambda: [torch.addmm(torch.randn(5), torch.randn(3, 0), torch.randn(0, 5))],
    "addmm_": lambda: [torch.ones(3, 5).addmm_(torch.randn(3, 0), torch.randn(0, 5), beta=2)],
    "mm out": lambda: [torch.mm(torch.randn(3, 0), torch.randn(0, 5), out=torch.randn(3, 5))],
    "baddbmm": lambda: [
        torch.baddbmm(torch.randn(2, 1, 5), torch.randn(2, 3, 0), torch.randn(2, 0, 5))
    ],
    "linear": lambda: both_ways(F.linear, (0, 4), (5, 4)),
    "linear of nothing": lambda: [F.linear(torch.randn(3, 0), torch.randn(5, 0), torch.randn(5))],
    "einsum": lambda: [torch.einsum("bij,bjk->bik", torch.randn(0, 3, 4), torch.randn(0, 4, 5))],
}


@for_each("name", EMPTY)
def test_products_of_nothing_are_torchs(name: str) -> None:
    def digest() -> str:
        torch.manual_seed(0)
        return tensors_digest(EMPTY[name]())

    expected = digest()
    with holdfast.protect(nn.Identity()) as protection:
        assert digest() == expected
        assert sum(site.rows for site in protection.report().sites) == 0
    assert events.recent() == []


def test_an_empty_batch_does_not_upset_the_ones_around_it() -> None:
    layer = nn.Linear(6, 5)
    with holdfast.protect(layer) as protection:
        for rows in (3, 0, 4):
            layer(torch.randn(rows, 6)).sum().backward()
        (forward, weight) = protection.report().sites
    assert (forward.site, forward.rows) == ("Linear/addmm/forward", 7)
    assert (weight.site, weight.covered) == ("Linear/addmm/grad_b", True)
    assert events.recent() == []


UNCHECKED = [torch.int8, torch.int32, torch.int64, torch.complex64, torch.float8_e4m3fn]


@for_each("dtype", UNCHECKED)
@for_each("op", ["mm", "bmm"])
def test_other_dtypes_pass_through_uncovered(op: str, dtype: torch.dtype) -> None:
    lead = (2,) if op == "bmm" else ()
    a, b = (torch.randn(*lead, *s).mul(3).to(dtype) for s in ((16, 32), (32, 16)))
    call = getattr(torch, op)
    try:
        expected, refusal = call(a, b), ""
    except (RuntimeError, NotImplementedError) as error:
        expected, refusal = None, str(error)
    with holdfast.protect(nn.Identity()) as protection:
        if expected is None:
            with pytest.raises((RuntimeError, NotImplementedError)) as raised:
                call(a, b)
            assert str(raised.value) == refusal
        else:
            assert same_bits(call(a, b), expected)
        reasons = uncovered(protection.report())
    assert reasons == {f"(outside)/{op}/forward": "dtype has no rounding threshold"}
    assert events.recent() == []


def int4_packed() -> torch.Tensor:
    weight = torch.randint(0, 15, (64, 64), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 1)
    scales = torch.ones(2, 64, 2, dtype=torch.bfloat16)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)


def dynamically_quantized() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(16, 8))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    result: torch.Tensor = quantized(torch.randn(4, 16))
    return result


def whole() -> torch.Tensor:
    """Integers of 8 bits."""
    return torch.arange(32 * 32).remainder(7).view(32, 32).to(torch.int8)


def scaled_mm() -> torch.Tensor:
    """Floats of 8 bits; where the CPU has no such product, one of fp32 inside."""
    operand, one = torch.randn(32, 32).to(torch.float8_e4m3fn), torch.ones(())
    return torch._scaled_mm(operand, operand.t(), one, one, out_dtype=torch.float32)


# By the name that begins their site.
OTHERS: dict[str, list[Callable[[], torch.Tensor]]] = {
    "": [
        lambda: torch.randn(4) @ torch.randn(4),
        lambda: torch.vdot(torch.randn(4), torch.randn(4)),
        lambda: torch.inner(torch.randn(4), torch.randn(4)),
        lambda: F.linear(torch.randn(4), torch.randn(4)),
    ],
    "_int_mm": [
        lambda: torch._int_mm(whole(), whole().t()),
        lambda: torch._int_mm(whole(), whole(), out=torch.empty(32, 32, dtype=torch.int32)),
    ],
    "_scaled_mm": [scaled_mm],
    "_weight_int8pack_mm": [
        lambda: torch._weight_int8pack_mm(
            torch.randn(4, 32).bfloat16(), whole()[:8].contiguous(), torch.ones(8).bfloat16()
        )
    ],
    "_weight_int4pack_mm": [int4_packed],
    "quantized_linear": [dynamically_quantized],
    "sparse": [],
}


def matrix(layout: torch.layout) -> torch.Tensor:
    return torch.randn(3, 4).to_sparse(layout=layout)


OTHERS["sparse"] += [
    lambda: torch.sparse.mm(matrix(torch.sparse_coo), torch.randn(4, 5)),
    lambda: torch.sparse.mm(matrix(torch.sparse_coo), torch.randn(4, 5).to_sparse()).to_dense(),
    lambda: torch.randn(3, 5).addmm_(matrix(torch.sparse_coo), torch.randn(4, 5)),
    lambda: torch.addmm(
        torch.randn(3, 5), matrix(torch.sparse_coo), torch.randn(4, 5), out=torch.empty(3, 5)
    ),
    lambda: torch.bmm(torch.randn(2, 3, 4).to_sparse(), torch.randn(2, 4, 5)),
]
for each in (torch.sparse_coo, torch.sparse_csr):
    OTHERS["sparse"] += [
        lambda each=each: matrix(each) @ torch.randn(4, 5),
        lambda each=each: matrix(each) @ torch.randn(4),
        lambda each=each: torch.addmm(torch.randn(3, 5), matrix(each), torch.randn(4, 5)),
    ]


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*is deprecated", "ignore:.*quant")
@for_each(("name", "product"), [(name, each) for name in OTHERS for each in OTHERS[name]])
def test_products_without_a_checksum_are_torchs_and_uncovered(
    name: str, product: Callable[[], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    expected = product()
    torch.manual_seed(0)
    with holdfast.protect(nn.Identity()) as protection:
        assert same_bits(product(), expected)
        reasons = uncovered(protection.report())
        assert all(not site.covered for site in protection.report().sites)
    assert set(reasons.values()) == {"no checksum for this op yet"}
    assert all(site.startswith(f"(outside)/{name}") for site in reasons)
    assert events.recent() == []


@for_each("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_weight_does_not_upset_the_names_of_dense_products(layout: torch.layout) -> None:
    class Mixed(nn.Module):
        """A sparse product between two dense ones."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = matrix(layout)
            return (weight @ (x @ x)) @ torch.ones(4, 2)

    model = Mixed()
    with holdfast.protect(model) as protection:
        model(torch.randn(4, 4))
        report = protection.report()
    assert {site.site for site in report.sites if site.covered} == {
        "Mixed/mm/forward",
        "Mixed/mm#2/forward",
    }
    (name,) = uncovered(report)
    assert name.startswith("Mixed/sparse_")


BAD: dict[str, Callable[[], object]] = {
    "inner sizes": lambda: torch.mm(torch.ones(2, 3), torch.ones(4, 5)),
    "dtypes": lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 5).double()),
    "integers": lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4).long()),
    "one dimension": lambda: torch.mm(torch.ones(2, 3), torch.ones(3)),
    "dimensions": lambda: torch.mm(torch.ones(2, 3, 4), torch.ones(4, 5)),
    "batches": lambda: torch.bmm(torch.ones(2, 3, 4), torch.ones(3, 4, 5)),
    "addend": lambda: torch.addmm(torch.ones(7), torch.ones(2, 3), torch.ones(3, 5)),
    "addend's dtype": lambda: torch.addmm(
        torch.ones(5, dtype=torch.float64), torch.ones(2, 3), torch.ones(3, 5)
    ),
    "output's dtype": lambda: torch.mm(
        torch.ones(2, 3), torch.ones(3, 5), out=torch.ones(2, 5, dtype=torch.float64)
    ),
    "output's memory": lambda: torch.mm(
        torch.ones(2, 3), torch.ones(3, 5), out=torch.ones(1, 5).expand(2, 5)
    ),
    "in place, its memory": lambda: (
        torch.ones(1, 5).expand(2, 5).addmm_(torch.ones(2, 3), torch.ones(3, 5))
    ),
    "_int_mm": lambda: torch._int_mm(torch.ones(2, 3), torch.ones(3, 2)),
    "_weight_int8pack_mm": lambda: torch._weight_int8pack_mm(*[torch.ones(2, 3)] * 3),
    "in place, a leaf": lambda: torch.ones(2, 5, requires_grad=True).addmm_(
        torch.ones(2, 3), torch.ones(3, 5)
    ),
}


@for_each("name", BAD)
def test_what_torch_refuses_is_refused_in_torchs_words(name: str) -> None:
    with pytest.raises(RuntimeError) as plain:
        BAD[name]()
    with holdfast.protect(nn.Identity()), pytest.raises(RuntimeError) as guarded:
        BAD[name]()
    assert str(guarded.value).splitlines()[0] == str(plain.value).splitlines()[0]
    assert events.recent() == []


@for_each(
    ("module", "shape"),
    [
        (nn.Conv2d(4, 4, 3), (2, 4, 9, 9)),
        *((kind(8, 8), (4, 2, 8)) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    ],
)
def test_convolutions_are_covered_and_recurrent_layers_listed(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    with holdfast.protect(nn.Sequential(module)) as protection:
        protection.model(torch.randn(shape))
        report = protection.report()
    if isinstance(module, nn.RNNBase):
        assert any(site.site.split("/")[0] == "0" for site in report.sites)
    else:
        assert covered(report) == {"0/convolution/forward": 1}


@for_each("training", [True, False])
def test_an_encoder_layer_never_disappears_from_the_report(training: bool) -> None:
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).train(training)
    with holdfast.protect(model) as protection, torch.no_grad():
        model(torch.randn(2, 8, 16))
        names = {site.site for site in protection.report().sites}
    for part in ("self_attn", "linear1", "linear2"):
        assert any(part in name for name in names), names


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

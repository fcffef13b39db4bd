"""Scaled (fp8) and grouped products of a device, as which CPU stands in."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from case_loops import for_each
from device_stand_in import slots
from site_reports import covered, uncovered
from struck import Strike, armed, same_bits
from torch import nn

import holdfast
from holdfast import native
from holdfast.abft.gemm.cpu import configured_core
from holdfast.errors import UncorrectableFault
from holdfast_lab.emulation.stand_in import cpu_as_device

pytestmark = pytest.mark.skipif(native.core is None, reason="the native core is not built")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
M, K, N = 35, 64, 48
ENDS = (8, 8, 29)  # of rows; the last six are in no group
SCALED, GROUPED = "Calls/_scaled_mm/forward", "Calls/_grouped_mm/forward"

Product = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def _device(one_thread: None) -> Iterator[None]:
    with cpu_as_device():
        yield


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Calls(nn.Module):
    """A model that computes one product."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self) -> torch.Tensor:
        return self.product()


def scaled(
    left: torch.dtype = E4M3,
    right: torch.dtype = E4M3,
    *,
    each: bool = False,
    bias: torch.dtype | None = None,
    **options: Any,
) -> Product:
    """A product with two scales, or one of each row and column, that range over two decades."""
    a, b = drawn(M, K).to(left), drawn(N, K, seed=1).to(right).T
    scales = torch.tensor(0.03), torch.tensor([5.0])
    if each:
        scales = drawn(M, 1, seed=2).exp(), drawn(1, N, seed=3).exp()
    added = None if bias is None else drawn(N, seed=4).to(bias)
    given = {"out_dtype": BF16} | options
    return lambda: torch._scaled_mm(a, b, *scales, bias=added, **given)


def v2(recipe: int, out_dtype: torch.dtype = BF16) -> Product:
    """A product whose scales have a recipe: 0 is of tensors, 1 of rows and columns."""
    a, b = drawn(M, K).to(E4M3), drawn(N, K, seed=1).to(E4M3).T
    left, right = [torch.tensor(0.03)], [torch.tensor([5.0])]
    if recipe == 1:
        left, right = [drawn(M, 1, seed=2).exp()], [drawn(1, N, seed=3).exp()]
    given = left, [recipe], [0], right, [recipe], [0], drawn(N, seed=4).bfloat16(), out_dtype
    return lambda: torch.ops.aten._scaled_mm_v2(a, b, *given)


def into(product: torch.Tensor) -> Product:
    """A product like ``scaled`` that is written to a tensor."""
    a, b, one = drawn(M, K).to(E4M3), drawn(N, K, seed=1).to(E4M3).T, torch.tensor(1.0)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=product.dtype, out=product)


def grouped(kind: str, dtype: torch.dtype) -> Product:
    a, b = drawn(M, K).to(dtype), drawn(len(ENDS), K, N, seed=1).to(dtype)
    if kind == "batch":
        return lambda: torch._grouped_mm(drawn(3, M, K).to(dtype), b)
    if kind == "inner":
        b = drawn(M, N, seed=1).to(dtype)
        return lambda: torch._grouped_mm(a.T, b, ends(*ENDS))
    return lambda: torch._grouped_mm(a, b, ends(*ENDS))


COVERED: dict[str, tuple[str, Product]] = {
    "scaled": (SCALED, scaled()),
    "out": (SCALED, into(torch.empty(M, N, dtype=BF16))),
    "fp16": (SCALED, scaled(E5M2, E4M3, out_dtype=FP16)),
    "fp32, bias": (SCALED, scaled(E4M3, E5M2, each=True, bias=FP32, out_dtype=FP32)),
    "each, bias": (SCALED, scaled(each=True, bias=BF16)),
    "fast": (SCALED, scaled(each=True, use_fast_accum=True)),
    "v2": (SCALED, v2(0)),
    "v2, each": (SCALED, v2(1)),
    "rows": (GROUPED, grouped("rows", BF16)),
    "rows, fp32": (GROUPED, grouped("rows", FP32)),
    "inner": (GROUPED, grouped("inner", FP16)),
    "batch": (GROUPED, grouped("batch", BF16)),
}


@for_each("name", COVERED)
def test_a_clean_product_is_silent_and_a_fault_is_found(name: str) -> None:
    site, product = COVERED[name]
    model = Calls(product)
    known = product().clone()
    judged = slice(0, ENDS[-1]) if name.startswith("rows") else slice(None)
    with holdfast.protect(model) as protection:
        for _ in range(2):
            assert same_bits(model()[..., judged, :], known[..., judged, :])
        assert 0 < slots()[site] < 1
        protection.check()
        assert covered(protection.report()) == {site: 2}
        with armed(Strike((..., 3, 5), 1e4)):
            model()
        with pytest.raises(UncorrectableFault, match=site):
            protection.check()
    with holdfast.protect(model, verify=False), armed(Strike((..., 3, 5), 1e4)):
        assert (model()[..., 3, 5] == torch.tensor(1e4).to(known.dtype)).all()


def test_scales_and_offsets_may_change_between_calls() -> None:
    a, b, scale = drawn(M, K).to(E4M3), drawn(N, K).to(E4M3), drawn(1, N).exp()
    weight, limits = nn.Parameter(b.float().T.repeat(3, 1, 1)), ends(*ENDS)
    model = Calls(
        lambda: (
            torch._scaled_mm(a, b.T, torch.ones(M, 1), scale, out_dtype=FP32)
            + torch._grouped_mm(a.float(), weight, limits)
        )
    )
    model.weight = weight  # whose checksums are kept
    with torch.no_grad(), holdfast.protect(model) as protection:
        model()
        scale.mul_(drawn(1, N, seed=7).exp())
        limits.copy_(ends(2, 20, M))
        model()
        protection.check()
        assert set(covered(protection.report()).values()) == {2}


def test_rows_in_no_group_are_not_judged() -> None:
    model = Calls(grouped("rows", BF16))
    with holdfast.protect(model) as protection:
        with armed(Strike((slice(ENDS[-1], None),), torch.nan)):
            model()
        protection.check()
        assert slots()[GROUPED] < 1


class Experts(nn.Module):
    """A layer of experts, whose rows come sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(len(ENDS), K, N).bfloat16())

    def forward(self, x: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch._grouped_mm(x, self.weight, limits)[: ENDS[-1]]
        return out


COMPILED = pytest.param(True, marks=[pytest.mark.compile, pytest.mark.timeout(120)])


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_a_layer_of_experts_is_verified_forward_and_backward(compiled: bool) -> None:
    model, x, limits = Experts(), drawn(M, K).bfloat16().requires_grad_(), ends(*ENDS)
    sites = [f"Experts/_grouped_mm/{role}" for role in ("forward", "grad_a", "grad_b")]

    def gradients(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.autograd.grad(run(x, limits).sum(), [x, model.weight]))

    torch.compiler.reset()
    expected = gradients(torch.compile(model, fullgraph=True) if compiled else model)
    torch.compiler.reset()
    with holdfast.protect(model) as protection:
        run = torch.compile(model, fullgraph=True) if compiled else model
        ours = gradients(run)
        assert all(
            map(torch.equal, (ours[0][: ENDS[-1]], ours[1]), (expected[0][: ENDS[-1]], expected[1]))
        )
        protection.check()
        assert covered(protection.report()) == dict.fromkeys(sites, 1)
        assert uncovered(protection.report()) == {}
        for site in sites:
            with armed(Strike((..., 3, 5), 1e4, site=site)):
                gradients(run)
            with pytest.raises(UncorrectableFault, match=site):
                protection.check()
    torch.compiler.reset()


@pytest.mark.compile
@pytest.mark.timeout(120)
@for_each("name", ["scaled", "fp32, bias", "v2, each", "fp8"])
def test_a_scaled_product_in_compiled_code_has_a_verdict_or_its_reason(name: str) -> None:
    site, product = {**COVERED, "fp8": (SCALED, REFUSED["fp8"][0])}[name]
    expected = product()
    torch.compiler.reset()
    model = Calls(product)
    with holdfast.protect(model) as protection, torch.no_grad():
        run = torch.compile(model, fullgraph=True)
        assert same_bits(run(), expected)
        protection.check()
        if name == "fp8":
            assert uncovered(protection.report()) == {site: REFUSED["fp8"][1]}
            return
        assert covered(protection.report()) == {site: 1}
        with armed(Strike((3, 5), 1e4)):
            run()
        with pytest.raises(UncorrectableFault, match=site):
            protection.check()
    torch.compiler.reset()
    with holdfast.protect(model, verify=False), torch.no_grad(), armed(Strike((3, 5), 1e4)):
        assert torch.compile(model, fullgraph=True)()[3, 5] > 9e3
    torch.compiler.reset()


REFUSED: dict[str, tuple[Product, str]] = {
    "fp8": (scaled(out_dtype=E4M3), "its output is rounded to fp8"),
    "default": (scaled(out_dtype=None), "its output is rounded to fp8"),
    "result": (scaled(scale_result=torch.tensor(1.0)), "its result is scaled"),
    "v2, fp8": (v2(0, E4M3), "its output is rounded to fp8"),
    "columns": (
        lambda: torch._grouped_mm(drawn(3, M, K), drawn(K, N), ends(8, 8, N)),
        "its groups are of columns of its right operand",
    ),
}


@for_each("name", REFUSED)
def test_what_is_not_verified_is_counted_with_a_reason(name: str) -> None:
    product, reason = REFUSED[name]
    model = Calls(product)
    with holdfast.protect(model) as protection:
        model()
        assert list(uncovered(protection.report()).values()) == [reason]
        assert covered(protection.report()) == {}


def test_scales_of_blocks_are_refused() -> None:
    """No kernel for them is on CPU: what it raises is the product's own."""
    a, b = drawn(M, 256).to(E4M3), drawn(N, 256).to(E4M3).T
    blocks = torch.ones(M, 2), torch.ones(2, N)
    of_blocks = lambda: torch._scaled_mm(a, b, *blocks, out_dtype=BF16)  # noqa: E731
    for product, expected in (
        (of_blocks, "its scales are not fp32 of whole rows and columns, on its device"),
        (v2(4), "its scales are not those of whole operands, or of rows and columns"),
    ):
        model = Calls(product)
        with holdfast.protect(model) as protection:
            with pytest.raises((ValueError, NotImplementedError)):
                model()
            (reason,) = uncovered(protection.report()).values()
        assert reason == expected


def test_twice_the_threshold_is_found_in_every_row() -> None:
    core, slot = configured_core(), torch.zeros(1, dtype=torch.int32)
    a, b = drawn(M, K).to(E4M3), drawn(K, N, seed=1).to(E4M3)
    rest = {"row_scale": drawn(M, 1, seed=2).exp(), "column_scale": drawn(1, N, seed=3).exp()}
    exact = (rest["row_scale"] * a.float()) @ (b.float() * rest["column_scale"])
    c = exact.to(BF16)
    given = a, b, None, 1.0, 1.0
    thresholds = core.device_thresholds(c, *given, **rest)[0]
    for row in range(M):
        struck = c.clone().double()
        struck[row, row % N] += 2.2 * float(thresholds[row]) * (-1) ** row
        core.device_judge("aten", struck.to(BF16), *given, slot.zero_(), **rest)
        assert float(slot.view(FP32)) > 1


def in_matrix_unit(a: torch.Tensor, b: torch.Tensor, *, fast: bool) -> torch.Tensor:
    """A B as a Hopper GPU sums fp8 products, fp32.

    Each step of 32 cuts its products and the sum so far 13 bits below the largest of them. Unless
    the sum is fast, it is added into fp32 every 128.
    """
    total, part = torch.zeros(2, len(a), b.shape[1]).double()
    for step, (left, right) in enumerate(
        zip(a.double().split(32, 1), b.double().split(32), strict=True)
    ):
        terms = torch.cat([part[..., None], left[:, None] * right.T], -1)
        last_bit = (torch.frexp(terms.abs().amax(-1, keepdim=True))[1] - 14).double().exp2()
        part = (torch.trunc(terms / last_bit) * last_bit).sum(-1)
        if not fast and step % 4 == 3:
            total, part = (total + part).float().double(), torch.zeros_like(part)
    return (total + part).float()


OPERANDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "normal": lambda a, b: (a, b),
    "of one sign": lambda a, b: (a.abs() + 0.5, b.abs() + 0.5),
    "with large columns": lambda a, b: (100 * a * (torch.arange(a.shape[1]) % 37 == 0) + a, b),
    "of equal rows": lambda a, b: (a.abs()[:, :1].expand_as(a), b.abs()[:1].expand_as(b)),
    "with one large value": lambda a, b: (torch.cat([a[:, :1] * 100, a[:, 1:]], 1), b),
}


@for_each("kind", OPERANDS)
def test_sums_that_a_matrix_unit_cuts_are_silent(kind: str) -> None:
    core, slot = configured_core(), torch.zeros(1, dtype=torch.int32)
    for fast, inner in ((False, 256), (False, 1024), (True, 256), (True, 1024)):
        drawn_ab = drawn(8, inner, seed=inner), drawn(inner, 40, seed=8)
        a, b = (each.to(E4M3) for each in OPERANDS[kind](*drawn_ab))
        c = in_matrix_unit(a, b, fast=fast)
        core.device_judge("aten", c, a, b, None, 1.0, 1.0, slot.zero_(), fast_sums=fast)
        assert float(slot.view(FP32)) < 1, (fast, inner, float(slot.view(FP32)))

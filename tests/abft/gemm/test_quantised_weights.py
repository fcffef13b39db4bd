"""Weights of 8 and 4 bits, and training in float8, as torchao does them: covered or listed."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from case_loops import for_each
from site_reports import covered, uncovered
from struck import kinds, struck
from torch import nn
from torch.utils._pytree import tree_map

import holdfast

ROWS, INNER, COLUMNS = 32, 64, 64


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Quantised(torch.Tensor):
    """A weight of int8 codes and scales, which ``linear`` dequantises or multiplies as it is."""

    codes: torch.Tensor
    scales: torch.Tensor
    dynamic: bool

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor, dynamic: bool) -> "Quantised":
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)
        made.codes, made.scales, made.dynamic = codes, scales, dynamic
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return weight.linear(x) + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantised(args[0].codes, args[0].scales, args[0].dynamic)
        whole = tree_map(lambda x: x.values() if isinstance(x, Quantised) else x, args)
        return func(*whole, **(kwargs or {}))

    def values(self) -> torch.Tensor:
        return self.codes.to(self.scales.dtype) * self.scales[:, None]

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        if not self.dynamic:
            return torch.mm(x, self.values().T)
        step = x.abs().amax() / 127
        return torch._int_mm((x / step).round().to(torch.int8), self.codes.T) * step * self.scales


def quantised_model(*, dynamic: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INNER, COLUMNS), nn.ReLU(), nn.Linear(COLUMNS, 8))
    codes = torch.randint(-128, 128, (COLUMNS, INNER), dtype=torch.int8)
    weight = Quantised(codes, torch.full((COLUMNS,), 0.01), dynamic)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    return model


def test_a_weight_that_is_dequantised_is_covered_and_a_fault_is_repaired() -> None:
    model, x = quantised_model(dynamic=False), drawn(ROWS, INNER)
    with torch.no_grad():
        expected = model(x)
        with holdfast.protect(model) as protection:
            assert torch.equal(model(x), expected)
            with struck((3, 5), 1e4, site="0/mm/forward", always=True) as strike:
                assert torch.allclose(model(x), expected)
            report = protection.report()
    assert strike.seen
    assert kinds() == ["gemm_fault"]
    assert covered(report) == {"0/mm/forward": 2, "2/addmm/forward": 2}
    assert uncovered(report) == {}


def test_a_product_of_int8_activations_and_weights_is_listed() -> None:
    model = quantised_model(dynamic=True)
    with torch.no_grad(), holdfast.protect(model) as protection:
        model(drawn(ROWS, INNER))
        report = protection.report()
    assert covered(report) == {"2/addmm/forward": 1}
    assert list(uncovered(report)) == ["0/_int_mm/forward"]


def int8_packed(x: torch.Tensor) -> torch.Tensor:
    codes = drawn(COLUMNS, INNER).to(torch.int8)
    return torch._weight_int8pack_mm(x.bfloat16(), codes, drawn(COLUMNS).bfloat16())


def int4_packed(x: torch.Tensor) -> torch.Tensor:
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.zeros((COLUMNS, INNER), dtype=torch.int32), 1
    )
    scales = drawn(INNER // 32, COLUMNS, 2).bfloat16()
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.bfloat16(), codes, 32, scales
    )
    return product


def scaled(x: torch.Tensor) -> torch.Tensor:
    b, one = drawn(COLUMNS, INNER).to(torch.float8_e4m3fn).T, torch.tensor(1.0)
    return torch._scaled_mm(x.to(torch.float8_e4m3fn), b, one, one, out_dtype=torch.bfloat16)


class Calls(nn.Module):
    """Calls one of torch's products of quantised operands between two layers."""

    def __init__(self, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x).float()


PRODUCTS = {
    "_weight_int8pack_mm": int8_packed,
    "_weight_int4pack_mm": int4_packed,
    "_scaled_mm": scaled,
}


@for_each("name", PRODUCTS)
def test_torchs_products_of_quantised_operands_are_listed_by_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(INNER, INNER), Calls(PRODUCTS[name]))
    with torch.no_grad(), holdfast.protect(model) as protection:
        model(drawn(ROWS, INNER))
        report = protection.report()
    assert covered(report) == {"0/addmm/forward": 1}
    assert list(uncovered(report)) == [f"1/{name}/forward"]


class matmul_with_hp_or_float8_args(torch.autograd.Function):
    """Calls torch's products forward and backward, as torchao's function of this name does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x


class Float8Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(x, self.weight)
        return result


def test_float8_training_lists_its_products_and_not_the_function_around_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    name = "torchao.float8.float8_linear"
    monkeypatch.setattr(matmul_with_hp_or_float8_args, "__module__", name)
    with holdfast.protect(nn.Sequential(Float8Linear(INNER, COLUMNS))) as protection:
        protection.model(drawn(ROWS, INNER).requires_grad_()).sum().backward()
        report = protection.report()
    assert uncovered(report) == {}
    assert sum(covered(report).values()) == 3


INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")


@for_each("config", INT8)
def test_torchaos_int8_weights_are_covered_or_listed(config: str) -> None:
    ao = pytest.importorskip("torchao.quantization", reason="torchao is absent")
    model = nn.Sequential(nn.Linear(INNER, COLUMNS), nn.ReLU())
    ao.quantize_(model, getattr(ao, config)())
    with torch.no_grad(), holdfast.protect(model) as protection:
        model(drawn(ROWS, INNER))
        report = protection.report()
    found = covered(report), list(uncovered(report))
    listed = config == INT8[1]
    assert found == (({}, ["0/_int_mm/forward"]) if listed else ({"0/mm/forward": 1}, []))


@for_each("emulate", [False, True])
def test_torchaos_float8_training_is_covered_or_listed(emulate: bool) -> None:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is absent")
    model = nn.Sequential(nn.Linear(INNER, COLUMNS), nn.ReLU(), nn.Linear(COLUMNS, COLUMNS))
    model = model.bfloat16()
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=emulate))
    with holdfast.protect(model) as protection:
        model(drawn(ROWS, INNER).bfloat16()).sum().backward()
        report = protection.report()
    product = "mm" if emulate else "_scaled_mm"
    found = covered(report) if emulate else uncovered(report)
    assert {f"0/{product}/forward", f"2/{product}/forward"} <= set(found)
    assert (uncovered(report) if emulate else covered(report)) == {}

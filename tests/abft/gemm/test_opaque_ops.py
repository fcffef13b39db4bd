"""Operators of other packages, into whose kernels holdfast cannot see, are listed by name."""

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from case_loops import for_each
from site_reports import covered, uncovered
from torch import nn
from torch.nn.attention.varlen import varlen_attn

import holdfast
from holdfast import events
from holdfast.abft.gemm.unverified_ops import KERNEL_PACKAGES, OPAQUE
from holdfast.digest.tensors import tensors_digest

OPERATORS = {
    "flash_attn": "_flash_attn_forward(Tensor q, Tensor k) -> Tensor",
    "torchao": "quantized_gemm(Tensor a, Tensor b) -> Tensor",
    "xformers": "count(Tensor numbers, Tensor more) -> Tensor",
}


@pytest.fixture
def _packages() -> Iterator[None]:
    """Operators under the names of packages, until the test ends."""
    libraries = [torch.library.Library(space, "FRAGMENT") for space in OPERATORS]
    for library, schema in zip(libraries, OPERATORS.values(), strict=True):
        library.define(schema)
        name = schema.split("(")[0]
        library.impl(name, lambda a, b: torch.sub(a, b), "CompositeExplicitAutograd")
    yield
    for library in libraries:
        library._destroy()


class Attention(nn.Module):
    """Calls an operator of another package between two layers, and one on integers."""

    def __init__(self, space: str = "flash_attn", name: str = "_flash_attn_forward") -> None:
        super().__init__()
        self.operator = getattr(getattr(torch.ops, space), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(2, dtype=torch.int64)
        torch.ops.xformers.count(ones, ones)
        result: torch.Tensor = self.operator(x, x * 2)
        return result


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 4))


def forward_backward(model: nn.Module) -> str:
    output = model(torch.linspace(-1, 1, 16).view(2, 8))
    gradients = (
        []
        if torch.is_inference_mode_enabled()
        else torch.autograd.grad(
            output.sum(),
            list(model[2].parameters()),  # the operator has no gradient
        )
    )
    return tensors_digest([output.detach(), *gradients])


@pytest.mark.usefixtures("_packages")
@for_each("inference", [False, True])
def test_an_operator_is_listed_once_where_the_model_calls_it(inference: bool) -> None:
    with torch.inference_mode(inference):
        expected = forward_backward(small_model())
        with holdfast.protect(small_model()) as protection:
            assert [forward_backward(protection.model) for _ in range(3)] == [expected] * 3
            report = protection.report()
    assert uncovered(report) == {"1/flash_attn::_flash_attn_forward/forward": OPAQUE}
    assert [site.calls for site in report.sites if not site.covered] == [1]
    assert covered(report)["0/addmm/forward"] == 3
    assert events.recent() == []


@pytest.mark.usefixtures("_packages")
def test_an_operator_on_another_device_is_listed_beside_the_products() -> None:
    model = small_model().to("meta")
    with holdfast.protect(model) as protection, torch.no_grad():
        model(torch.empty(2, 8, device="meta"))
        found = uncovered(protection.report())
    assert found.pop("1/flash_attn::_flash_attn_forward/forward") == OPAQUE
    assert {site.split("/")[0] for site in found} == {"0", "2"}


@pytest.mark.compile
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_packages", "one_thread")
def test_an_operator_in_a_compiled_graph_is_listed() -> None:
    torch.compiler.reset()
    with holdfast.protect(small_model()) as protection, torch.no_grad():
        torch.compile(protection.model, fullgraph=True)(torch.ones(2, 8))
        found = uncovered(protection.report())
    torch.compiler.reset()
    assert found == {"1/flash_attn::_flash_attn_forward/forward": OPAQUE}


class Compiled(nn.Module):
    """Calls a function that is compiled, as ``flex_attention`` does within torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.square = torch.compile(lambda x: x @ x.mT, backend="eager", fullgraph=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.square(self.layer(x))
        return result


@pytest.mark.compile
@pytest.mark.usefixtures("_packages")
@for_each("device", ["cpu", "meta"])
def test_a_function_is_compiled_without_breaks_in_a_pass_that_is_watched(device: str) -> None:
    torch.compiler.reset()
    model = Compiled().to(device)
    with holdfast.protect(model) as protection:
        for _ in range(2):
            assert model(torch.ones(2, 8, device=device)).shape == (2, 2)
        calls = {site.site: site.calls for site in protection.report().sites}
    torch.compiler.reset()
    assert calls == {
        "layer/addmm/forward": 2 if device == "cpu" else 1,
        "Compiled/mm/forward": 2 if device == "cpu" else 1,
    }


class LigerNorm(torch.autograd.Function):
    """A function whose kernels are not operators of torch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = LigerNorm.apply(x)
        return result


@for_each("package", sorted(KERNEL_PACKAGES))
def test_an_autograd_function_of_a_package_of_kernels_is_listed(package: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package, ModuleType(package))
        patch.setattr(LigerNorm, "__module__", f"{package}.ops.norm")
        with holdfast.protect(nn.Sequential(nn.Linear(8, 8), Norm())) as protection:
            with torch.no_grad():  # has no graph: the next pass is looked at
                protection.model(torch.ones(2, 8))
            for _ in range(2):
                protection.model(torch.ones(2, 8)).sum().backward()
            found = uncovered(protection.report())
    assert found == {f"Sequential/{package}::LigerNorm/forward": OPAQUE}


def test_a_function_of_the_users_own_is_not_listed() -> None:
    with holdfast.protect(nn.Sequential(nn.Linear(8, 8), Norm())) as protection:
        protection.model(torch.ones(2, 8)).sum().backward()
        assert uncovered(protection.report()) == {}


def test_torch_and_holdfast_alone_bring_no_opaque_operators() -> None:
    script = (
        "import torch, torch._inductor.compile_fx, holdfast\n"
        "from holdfast.abft.gemm.unverified_ops import opaque_ops_loaded\n"
        "raise SystemExit(opaque_ops_loaded())"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=100, check=False).returncode == 0


class PackedAttention(nn.Module):
    """Attends within two sequences of three tokens that are packed one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limits = torch.tensor([0, 3, 6], dtype=torch.int32)
        result: torch.Tensor = varlen_attn(x, x, x, limits, limits, 3, 3)
        return result


@for_each("attention", [None, "fused"])
def test_torchs_attention_of_packed_sequences_is_listed_where_it_is_called(attention: Any) -> None:
    library = torch.library.Library("torch_attn", "IMPL")  # torch has it for CUDA alone
    library.impl("_varlen_attn", lambda q, *rest: (q.clone(), q[..., 0], q[..., 0]), "CPU")
    model = nn.Sequential(nn.Identity(), PackedAttention())
    try:
        with torch.no_grad(), holdfast.protect(model, attention=attention) as protection:
            model(torch.ones(6, 2, 8))
            assert uncovered(protection.report()) == {"1/torch_attn::_varlen_attn/forward": OPAQUE}
    finally:
        library._destroy()

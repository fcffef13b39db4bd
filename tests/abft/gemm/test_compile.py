"""Models and functions that are compiled: their checks are in the graph, forward and backward.

The graphs have no breaks, and nothing is silent where a check is not in the graph.
"""

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from case_loops import for_each
from site_reports import covered, uncovered
from struck import armed, kinds
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config

import holdfast
from holdfast import events, native
from holdfast.digest.tensors import tensors_digest
from holdfast.inject import Fault, Injector
from holdfast.sites import Gemm

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

ROLES = ("forward", "grad_a", "grad_b")
PRODUCTS = ("0.up/addmm", "0.down/mm", "0/bmm", "0/bmm#2", "0/mm", "1/addmm")
SITES = {f"{name}/{role}" for name in PRODUCTS for role in ROLES}


class Block(nn.Module):
    """Two linear layers, two batched products, and one of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)
        self.mix = nn.Parameter(torch.eye(8) + 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.up(x).relu())
        scores = (hidden @ hidden.mT).softmax(-1)
        return (scores @ hidden + x) @ self.mix


def small_model() -> nn.Module:
    """A block and a head; the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(8, 4))


def batch(rows: int = 5) -> torch.Tensor:
    """[2, rows, 8], the same every time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, rows, 8, generator=generator)


def forward_backward(model: nn.Module, *, rows: int = 5) -> str:
    x = batch(rows).requires_grad_()
    output = model(x)
    gradients = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    return tensors_digest([output.detach(), *gradients])


def bit_flip(op: str, *, site: str = "output", bit: int = 29) -> Fault:
    """A fault of the first step."""
    return Fault(step=0, rank=0, kind="bitflip", op=op, site=site, bit=bit)


def injected(model: nn.Module, fault: Fault) -> str:
    """Digest of a pass with a fault, which must have struck."""
    events.clear()
    with Injector(model, [fault], rank=0).step(0):
        result = forward_backward(model)
    assert kinds()[:1] == ["injected"], f"{fault} did not strike"
    return result


@pytest.fixture(autouse=True)
def _no_graph_of_another_test(one_thread: None) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.representative
def test_a_graph_has_the_bits_and_the_names_of_eager_mode_and_every_product_is_repaired() -> None:
    model = torch.compile(small_model(), fullgraph=True)
    bare = forward_backward(model)  # compiled first, protected then
    with holdfast.protect(model) as protection:
        assert forward_backward(model) == bare
        assert uncovered(protection.report()) == {}
        assert covered(protection.report()) == dict.fromkeys(SITES, 1)
        protection.reset_counters()
        forward_backward(model._orig_mod)
        assert covered(protection.report()) == dict.fromkeys(SITES, 1)
        assert events.recent() == []
        faults = [(bit_flip(op), "gemm_fault") for op in sorted(SITES)]
        for op in ("0.up/addmm/forward", "0/bmm#2/grad_b"):
            faults.append((bit_flip(op, site="checksum", bit=62), "checksum_fault"))
        for fault, kind in faults:
            assert injected(model, fault) == bare
            assert [(event.kind, event.op) for event in events.recent()][1:] == [(kind, fault.op)]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_with_the_detector_off_the_same_faults_reach_the_result() -> None:
    with holdfast.protect(small_model(), verify=False) as protection:
        model = torch.compile(protection.model, fullgraph=True)
        healthy = forward_backward(model)
        for op in ("0.down/mm/forward", "0/bmm/grad_a", "1/addmm/grad_b"):
            assert injected(model, bit_flip(op)) != healthy
            assert kinds() == ["injected"]
        assert forward_backward(model) == healthy


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A program whose one product is verified, protected or not."""
    return holdfast.matmul(a, b).relu()


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_matmul_is_verified_in_a_compiled_function(backend: str) -> None:
    function = torch.compile(product, fullgraph=True, backend=backend)
    a, b = (torch.linspace(-1, 2, 48).reshape(shape).requires_grad_() for shape in [(6, 8), (8, 6)])

    def run() -> str:
        output = function(a, b)
        return tensors_digest([output.detach(), *torch.autograd.grad(output.sum(), [a, b])])

    healthy, expected = run(), torch.matmul(a, b).relu()
    gradients = torch.autograd.grad(expected.sum(), [a, b])
    assert healthy == tensors_digest([expected.detach(), *gradients])
    for role in ROLES:
        op = f"(outside)/mm/{role}"
        events.clear()
        with Injector(nn.Identity(), [bit_flip(op)], rank=0).step(0):
            assert run() == healthy
        found = [(event.kind, event.op) for event in events.recent()]
        assert found == [("injected", op), ("gemm_fault", op)]


def test_matmul_is_verified_in_a_process_that_begins_with_a_compiled_one() -> None:
    test = f"{__file__}::test_matmul_is_verified_in_a_compiled_function[eager]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout[-3000:]


@for_each("compiled", [True, False])
@for_each("lead", [(4,), (2, 3)])
def test_the_gradient_of_a_shared_factor_is_one_product_over_the_batch(
    lead: tuple[int, ...], compiled: bool
) -> None:
    function = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    a, b = torch.randn(*lead, 6, 8, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    expected = torch.autograd.grad(torch.matmul(a, b).relu().sum(), [a, b])
    shapes: dict[str, tuple[int, ...]] = {}

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is not None:
            shapes[site] = tuple(output.shape)

    with armed(hook):
        gradients = torch.autograd.grad(function(a, b).sum(), [a, b])
    rows = 6 * math.prod(lead)
    assert shapes == {
        "(outside)/mm/forward": (rows, 5),
        "(outside)/mm/grad_a": (rows, 8),
        "(outside)/mm/grad_b": (8, 5),
    }
    assert tensors_digest(gradients) == tensors_digest(expected)


def test_matmul_takes_the_dtype_of_autocast() -> None:
    function = torch.compile(product, fullgraph=True, backend="aot_eager")
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(8, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = function(a, b)
    gradients = torch.autograd.grad(output.sum(), [a, b])
    assert output.dtype is torch.bfloat16
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2


def test_one_graph_serves_many_shapes() -> None:
    model = nn.Linear(8, 4)
    with holdfast.protect(model) as protection:
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        before = graphs()
        for rows in (3, 5, 9):
            forward_backward(compiled, rows=rows)
        assert graphs() == before + 1
        assert covered(protection.report()) == {f"Linear/addmm/{role}": 3 for role in ROLES}
        injected(compiled, bit_flip("Linear/addmm/grad_b"))
    assert kinds() == ["injected", "gemm_fault"]


@for_each("inference", [True, False])
def test_the_encoding_of_a_weight_is_kept_until_it_changes(inference: bool) -> None:
    model = nn.Linear(8, 4)
    with holdfast.protect(model), torch.inference_mode(inference), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        for _ in range(2):
            compiled(batch())
            assert native.core.cached_encodings() == 1
            model.weight.mul_(2)
    assert events.recent() == []


def test_inference_under_autocast_is_verified_in_its_dtype() -> None:
    model = small_model()
    with holdfast.protect(model) as protection:
        compiled = torch.compile(model, fullgraph=True)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            healthy = compiled(batch())
            with Injector(model, [bit_flip("0/bmm/forward", bit=14)], rank=0).step(0):
                repaired = compiled(batch())
        assert healthy.dtype is torch.bfloat16
        assert torch.equal(repaired, healthy)
        forward = {site for site in SITES if site.endswith("forward")}
        assert covered(protection.report()) == dict.fromkeys(forward, 2)
    assert kinds() == ["injected", "gemm_fault"]


def test_a_product_that_inductor_computes_itself_is_listed() -> None:
    model = nn.Linear(8, 1)  # of one row: a dot product, which Inductor makes a reduction
    with holdfast.protect(model) as protection, torch.no_grad():
        torch.compile(model, fullgraph=True)(torch.ones(1, 8))
        report = protection.report()
    assert covered(report) == {}
    assert uncovered(report) == {"Linear/addmm/forward": "Inductor computes it by aten.mul.Tensor"}


def test_products_of_vectors_that_inductor_decomposes_are_listed() -> None:
    class Vectors(nn.Module):
        def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return a @ x + torch.addmv(x, a, x) + torch.dot(x, x)

    model = Vectors()
    with holdfast.protect(model) as protection:
        torch.compile(model, fullgraph=True)(torch.ones(4, 4), torch.ones(4))
        report = protection.report()
    assert covered(report) == {}
    sites = ["Vectors/addmv/forward", "Vectors/addmv#2/forward", "Vectors/dot/forward"]
    assert uncovered(report) == dict.fromkeys(sites, "Inductor computes it by aten.mul.Tensor")


def test_blocks_compiled_one_by_one_keep_their_names() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    with holdfast.protect(model) as protection, torch.no_grad():
        for block in model:
            block.compile(fullgraph=True)
        model(torch.ones(2, 8))
        assert covered(protection.report()) == {"0.0/addmm/forward": 1, "1.0/addmm/forward": 1}


def test_a_graph_that_layers_share_bears_one_name_and_the_report_says_so() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with holdfast.protect(model) as protection, torch.no_grad():
        for layer in model:
            layer.compile(fullgraph=True)
        model(torch.ones(2, 8))
        report = protection.report()
    assert covered(report) == {"0/addmm/forward": 2}
    assert "under the name of another module" in uncovered(report)["1"]


def test_another_compiler_is_covered_at_the_module_around() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="eager", fullgraph=True)
    with holdfast.protect(compiled) as protection, torch.no_grad():
        compiled(torch.ones(2, 8))
        report = protection.report()
    assert covered(report) == {"Sequential/addmm/forward": 1}
    assert "under the name of another module" in uncovered(report)["0"]


def test_a_pass_of_the_users_own_runs_before_and_is_there_after() -> None:
    seen = []

    def own(graph: torch.fx.Graph) -> None:
        seen.append([str(node.target) for node in graph.nodes if "addmm" in str(node.target)])

    with config.patch(post_grad_custom_post_pass=own):
        model = nn.Linear(8, 4)
        with holdfast.protect(model) as protection, torch.no_grad():
            torch.compile(model, fullgraph=True)(torch.ones(2, 8))
            assert covered(protection.report()) == {"Linear/addmm/forward": 1}
        assert config.post_grad_custom_post_pass is own
        assert config.joint_custom_pre_pass is None
    assert seen == [["aten.addmm.default"]]


def test_graphs_are_compiled_again_only_if_one_was_made_unprotected() -> None:
    a = torch.ones(2, 2)
    function = torch.compile(lambda: a @ a, backend="aot_eager")
    with holdfast.protect(nn.Identity()):
        function()
    before = graphs()
    with holdfast.protect(nn.Identity()):
        function()
    assert graphs() == before
    torch.compile(lambda: a + a, backend="aot_eager")()
    assert graphs() == before + 1
    with holdfast.protect(nn.Identity()):
        function()
    assert graphs() == before + 2

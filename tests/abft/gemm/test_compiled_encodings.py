"""Encodings that compiled graphs hand from the forward to the backward pass of a device.

CPU stands in as the device.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from site_reports import covered, uncovered
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import native
from holdfast.abft.gemm import compiled
from holdfast.errors import UncorrectableFault
from holdfast.inject import Fault, Injector
from holdfast_lab.emulation.stand_in import cpu_as_device

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(120),
    pytest.mark.skipif(native.core is None, reason="the native core is not built"),
]


@pytest.fixture(autouse=True)
def _device(one_thread: None) -> Iterator[None]:
    torch.compiler.reset()
    with cpu_as_device():
        yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Node]]]:
    """The calls of holdfast's ops in each graph that is compiled."""
    seen: list[list[Node]] = []

    def recorded(graph: Graph) -> None:
        compiled._replace(graph)
        seen.append([node for node in graph.nodes if str(node.target).startswith("holdfast.")])

    monkeypatch.setitem(compiled.PASSES, compiled.REPLACE_PASS, recorded)
    with config.patch(fx_graph_cache=False):
        yield seen


def names(graph: list[Node]) -> list[str]:
    return sorted(str(node.target).removesuffix(".default") for node in graph)


def small_model() -> nn.Module:
    """Two linear layers, the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 8, bias=False))


def batch(rows: int = 13) -> torch.Tensor:
    """[rows, 24], the same every time."""
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(1))


def gradients(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(batch()).sum(), list(model.parameters())))


@pytest.fixture
def _empty_cache() -> Iterator[None]:
    with fresh_cache():
        yield


@pytest.mark.usefixtures("_empty_cache")
def test_a_cached_training_graph_judges_a_gradient_by_what_its_forward_pass_read() -> None:
    model, x = small_model(), batch()
    for found, other in (("miss", "hit"), ("hit", "miss")):
        torch.compiler.reset()
        counters.clear()
        with holdfast.protect(model) as protection:
            run, results = torch.compile(model, fullgraph=True, mode="reduce-overhead"), []
            for struck in (False, True):
                model[0].weight.grad = None
                loss = run(x).sum()
                with torch.no_grad():
                    x.data[3, 5] += 50 * struck  # in memory, which autograd does not see
                loss.backward()
                results.append(model[0].weight.grad)
                if struck:
                    with pytest.raises(UncorrectableFault, match="0/mm/grad_b"):
                        protection.check()
                    x.data[3, 5] -= 50
                protection.check()
            assert not torch.equal(*results)
            assert uncovered(protection.report()) == {}
        counts = counters["inductor"]
        assert (counts[f"fxgraph_cache_{found}"], counts[f"fxgraph_cache_{other}"]) == (2, 0)


def test_a_backward_pass_that_is_verified_alone_encodes_what_it_reads() -> None:
    model, core = small_model(), native.required()
    with holdfast.protect(model) as protection:
        run = torch.compile(model, fullgraph=True)
        loss = run(batch()).sum()
        core.change_process_depth(-1)
        loss = run(batch()).sum()
        core.change_process_depth(1)
        loss.backward()
        protection.check()
        assert covered(protection.report()) == dict.fromkeys(
            ("0/mm/forward", "0/mm/grad_b", "1/mm/forward", "1/mm/grad_a", "1/mm/grad_b"), 1
        )


def test_layers_of_one_input_share_an_encoding_and_inference_makes_none(
    graphs: list[list[Node]],
) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(24, 8, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [head(x) for head in self.heads]

    model = Heads()
    with holdfast.protect(model) as protection:
        run = torch.compile(model, fullgraph=True)
        torch.autograd.backward([each.sum() for each in run(batch())])
        protection.check()
        with torch.no_grad():
            run(batch())
    forward, backward, inference = graphs
    verdict = "holdfast.verdict"
    assert names(forward) == [verdict, verdict, f"{verdict}_and_encoding"]
    assert names(backward) == names(inference) == [verdict] * 3
    assert {str(node.args[-1]) for node in backward} == {"encoding_default"}


@pytest.mark.parametrize("budget", [1, 0])
def test_what_is_computed_again_is_encoded_again(graphs: list[list[Node]], budget: int) -> None:
    """By activation checkpointing, or with a budget that saves no activation at all."""
    model = small_model()

    def run(x: torch.Tensor) -> torch.Tensor:
        if budget == 0:
            return model(x.sin())
        result: torch.Tensor = checkpoint(model, x.sin(), use_reentrant=False)
        return result

    fault = Fault(step=0, rank=0, kind="bitflip", op="1/mm/grad_b", bit=29)
    with functorch.patch(activation_memory_budget=budget):
        expected = gradients(torch.compile(run, fullgraph=True), model)
        torch.compiler.reset()
        with holdfast.protect(model) as protection:
            ours = torch.compile(run, fullgraph=True)
            assert all(map(torch.equal, gradients(ours, model), expected))
            protection.check()
            with Injector(model, [fault], rank=0).step(0):
                gradients(ours, model)
            with pytest.raises(UncorrectableFault, match=fault.op):
                protection.check()
    _, backward = graphs
    last = {str(node.target).split(".")[1]: node.args[-1] for node in backward}
    assert last["verdict_of_gradients"] is None

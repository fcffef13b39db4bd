"""Compiled graphs with checks are kept in Inductor's cache, under keys that hold their sites."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from site_reports import covered, uncovered
from struck import kinds
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config
from torch._inductor import compile_fx, config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

import holdfast
from holdfast import events
from holdfast.abft.gemm import compiled
from holdfast.abft.gemm.compiled import JOINT, NOT_SEEN
from holdfast.abft.gemm.modules import identifier
from holdfast.errors import UncorrectableFault
from holdfast.inject import Fault, Injector
from holdfast_lab.emulation.stand_in import cpu_as_device

pytestmark = [pytest.mark.compile, pytest.mark.timeout(300)]

aten = torch.ops.aten
PROGRAM = """
import json, sys, torch, holdfast
from torch import nn
from torch._dynamo.utils import counters
from holdfast import events
from holdfast.inject import Fault, Injector

torch.set_num_threads(1)
others = [holdfast.protect(nn.Sequential(nn.Linear(3, 3))) for _ in range(int(sys.argv[1]))]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
protection = holdfast.protect(model)
compiled = torch.compile(model, fullgraph=True)

def run():
    model.zero_grad()
    compiled(torch.ones(3, 8)).square().sum().backward()
    return [parameter.grad.tolist() for parameter in model.parameters()]

healthy, found = run(), []
for op in [row.site for row in protection.report().sites if row.covered]:
    events.clear()
    with Injector(model, [Fault(step=0, rank=0, kind="bitflip", op=op, bit=29)], rank=0).step(0):
        assert run() == healthy
    found.append([op, [[str(event.kind), event.op] for event in events.recent()]])
cache = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
rows = {row.site: row.reason for row in protection.report().sites}
print(json.dumps({"cache": cache, "rows": rows, "found": found, "bits": healthy}))
"""
SITES = ("0/mm/forward", "0/mm/grad_b", "1/mm/forward", "1/mm/grad_a", "1/mm/grad_b")


def started(folder: Path, others: int) -> dict[str, object]:
    """Run the program in a process of its own, with that many other protections before."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(others)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.usefixtures("forked_python")
def test_a_restart_finds_its_graphs_and_their_faults_under_the_right_names(tmp_path: Path) -> None:
    first, second = started(tmp_path, 0), started(tmp_path, 2)
    assert first.pop("cache") == {"hit": 0, "miss": 2}
    assert second.pop("cache") == {"hit": 2, "miss": 0}
    assert first == second
    assert second["rows"] == dict.fromkeys(SITES, "")
    assert second["found"] == [
        [op, [["injected", op], ["gemm_fault", op]]] for op in second["rows"]
    ]


@pytest.fixture
def _cache(one_thread: None) -> Iterator[None]:
    """An empty cache for graphs."""
    torch.compiler.reset()
    with fresh_cache():
        yield
    torch.compiler.reset()


def lookups() -> tuple[int, int]:
    """Graphs that were found in the cache, and that were not, since this was last called."""
    counts = counters["inductor"]
    return counts.pop("fxgraph_cache_hit", 0), counts.pop("fxgraph_cache_miss", 0)


@pytest.mark.usefixtures("_cache")
def test_equal_blocks_have_a_cached_graph_each() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
    lookups()
    for expected in [(0, 2), (2, 0)]:
        torch.compiler.reset()
        with holdfast.protect(model) as protection, torch.no_grad():
            for block in model:
                block.compile(fullgraph=True)
            model(torch.ones(2, 8))
            assert lookups() == expected
            assert covered(protection.report()) == {"0.0/addmm/forward": 1, "1.0/addmm/forward": 1}


@pytest.mark.usefixtures("_cache")
def test_a_cached_graph_of_a_device_has_its_verdicts_and_is_not_one_of_cpu() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False))
    sites = {"0/addmm/forward": 1, "2/mm/forward": 1}
    fault = Fault(step=0, rank=0, kind="bitflip", op="2/mm/forward", bit=29)
    lookups()
    for where, expected in [
        (nullcontext, (0, 1)),
        (cpu_as_device, (0, 1)),
        (cpu_as_device, (1, 0)),
    ]:
        torch.compiler.reset()
        with where(), holdfast.protect(model) as protection, torch.no_grad():
            compiled = torch.compile(model, fullgraph=True)
            compiled(torch.ones(2, 8))
            assert lookups() == expected
            assert covered(protection.report()) == sites
            if where is cpu_as_device:
                with Injector(model, [fault], rank=0).step(0):
                    compiled(torch.ones(2, 8))
                with pytest.raises(UncorrectableFault, match=fault.op):
                    protection.check()


class Rewriting(CustomGraphPass):
    """A pass of the user's, which turns products of matrices into another op."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            node.target = torch.ops.rewritten.product.default

    def uuid(self) -> str:
        return "rewriting"


@pytest.fixture
def _product() -> Iterator[None]:
    """The operator that ``Rewriting`` puts in."""
    library = torch.library.Library("rewritten", "FRAGMENT")
    library.define("product(Tensor a, Tensor b) -> Tensor")
    kernel = lambda a, b: (a.unsqueeze(-1) * b).sum(-2)  # noqa: E731
    library.impl("product", kernel, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.usefixtures("_cache", "_product")
def test_a_product_lost_in_a_cached_graph_is_listed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    lookups()
    for expected, reason in [
        ((0, 1), "Inductor computes it by rewritten.product"),
        ((1, 0), NOT_SEEN),
    ]:
        torch.compiler.reset()
        with (
            config.patch(post_grad_custom_post_pass=Rewriting()),
            holdfast.protect(model) as protection,
            torch.no_grad(),
        ):
            torch.compile(model, fullgraph=True)(torch.ones(2, 8))
            assert lookups() == expected
            found = uncovered(protection.report())
            assert list(found) == ["1/mm/forward"]
            assert found["1/mm/forward"].startswith(reason)


@pytest.mark.usefixtures("_cache")
def test_with_the_detector_off_a_fault_in_a_cached_graph_reaches_the_result() -> None:
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    fault = Fault(step=0, rank=0, kind="bitflip", op="Linear/addmm/forward", bit=29)
    lookups()
    for verify, expected, lookup in [(True, ["gemm_fault"], (0, 1)), (False, [], (1, 0))]:
        torch.compiler.reset()
        events.clear()
        with holdfast.protect(model, verify=verify), torch.no_grad():
            compiled = torch.compile(model, fullgraph=True)
            healthy = compiled(x)
            with Injector(model, [fault], rank=0).step(0):
                assert torch.equal(compiled(x), healthy) == verify
        assert lookups() == lookup
        assert kinds() == ["injected", *expected]


@pytest.mark.usefixtures("_cache")
def test_a_graph_compiled_unprotected_is_not_taken_for_a_protected_one() -> None:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        torch.compile(model, fullgraph=True)(torch.ones(2, 8))
        fault = Fault(step=0, rank=0, kind="bitflip", op="Linear/addmm/forward", bit=29)
        with holdfast.protect(model):
            compiled = torch.compile(model, fullgraph=True)
            with Injector(model, [fault], rank=0).step(0):
                compiled(torch.ones(2, 8))
    assert kinds() == ["injected", "gemm_fault"]


@pytest.mark.usefixtures("_cache")
def test_passes_that_only_another_thread_could_remove_change_no_graph_of_an_unprotected_model() -> (
    None
):
    outer = holdfast.protect(nn.Linear(3, 3))  # adds the passes, in this thread
    entered, removed = threading.Event(), threading.Event()

    def inner() -> None:
        with holdfast.protect(nn.Linear(3, 3)):
            entered.set()
            assert removed.wait(60)

    thread = threading.Thread(target=inner)
    thread.start()
    assert entered.wait(60)
    outer.remove()
    removed.set()
    thread.join(60)  # removes them, in another thread
    model = nn.Linear(8, 8)
    for _ in range(2):  # the second time from the cache
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            compiled(torch.ones(2, 8))
            with holdfast.protect(model) as protection:
                compiled(torch.ones(2, 8))
                assert covered(protection.report()) == {"Linear/addmm/forward": 1}
                assert uncovered(protection.report()) == {}


@pytest.mark.usefixtures("_cache")
def test_a_users_pass_without_an_identity_keeps_graphs_out_of_the_cache() -> None:
    lookups()
    with (
        config.patch(post_grad_custom_post_pass=lambda graph: None),
        holdfast.protect(nn.Linear(8, 8)) as protection,
        torch.no_grad(),
    ):
        torch.compile(protection.model, fullgraph=True)(torch.ones(2, 8))
    assert lookups() == (0, 0)
    assert counters["inductor"]["fxgraph_cache_bypass"] > 0


def test_autograds_cache_is_off_while_a_graph_of_a_protected_model_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    name = JOINT[0]
    monkeypatch.setattr(
        compile_fx, name, lambda: seen.append(autograd_config.enable_autograd_cache)
    )
    with autograd_config.patch(enable_autograd_cache=True):
        getattr(compile_fx, name)()
        with holdfast.protect(nn.Linear(2, 2)):
            getattr(compile_fx, name)()
        getattr(compile_fx, name)()
    assert seen == [True, False, True]


LATE = """
import importlib.util, sys, torch, holdfast
from torch import nn
protection = holdfast.protect(nn.Linear(4, 4))
protection.model(torch.ones(2, 4))
assert "torch._inductor" not in sys.modules and "torch._dynamo" not in sys.modules
importlib.util.find_spec("torch._inductor.compile_fx")  # which imports nothing of it
from torch._inductor import compile_fx
wrapped = lambda: hasattr(compile_fx._compile_fx_inner, "__wrapped__")
assert wrapped()
protection.remove()
assert not wrapped()
"""
# A reset that imports Inductor, as on a machine with CUDA, must not wait for the import's end.
RESET = """
import sys, torch, holdfast
from torch import nn
holdfast.protect(nn.Linear(4, 4)).remove()
torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
assert "torch._inductor.compile_fx" not in sys.modules
def reset():
    import torch._inductor.compile_fx
torch.compiler.reset = reset
holdfast.protect(nn.Linear(4, 4))
from torch._inductor import compile_fx
assert hasattr(compile_fx._compile_fx_inner, "__wrapped__")
"""


@pytest.mark.parametrize("program", [LATE, RESET], ids=["late", "reset"])
def test_passes_are_added_when_inductor_is_imported(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_protection_that_could_not_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    users = compiled._users

    def failing() -> None:
        raise RuntimeError("no reset")

    monkeypatch.setattr(compiled, "graphs_compiled", lambda: -1)
    monkeypatch.setattr(torch.compiler, "reset", failing)
    with pytest.raises(RuntimeError, match="no reset"):
        holdfast.protect(nn.Linear(2, 2))
    assert compiled._users == users


def test_numbers_of_modules_follow_from_names_and_are_never_given_twice() -> None:
    def numbers() -> list[int]:
        modules = [nn.ReLU() for _ in range(2)]
        return [identifier(module, "a name of this test") for module in modules]

    first, second = numbers(), numbers()
    assert first[1] == first[0] + 1
    assert second == [first[1] + 1, first[1] + 2]
    assert events.recent() == []

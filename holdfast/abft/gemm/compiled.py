"""Verification of matmuls in graphs that Inductor compiles, named as they are in eager mode.

By itself Inductor would compute some products by kernels of its own (CPU templates), which no
dispatcher sees, and call the rest from one flat function, in which no module is entered. So while a
model is protected two passes run on every graph that the protecting thread compiles:

- on the joint graph, before autograd's two halves are parted, each product is labelled with the
  site it has in eager mode: its module, op, ordinal and role;
- on each half, after Inductor's own rewriting, ``aten.mm``, ``addmm``, ``bmm`` and ``baddbmm`` on
  CPU become ``holdfast::mm`` and so on, opaque ops that call the intercepted kernel under the
  label's name.

The arithmetic is what Inductor chose, so a healthy result keeps its bits (where ``max_autotune``
would choose a CPU template, ATen's kernel takes its place). Products that Inductor turned into
something else are kept in ``uncovered``, for the report.

Such graphs are not kept in Inductor's cache on disk, as their sites hold only in this process; the
C++ kernels in them are. Graphs compiled before are compiled again.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from holdfast.abft.gemm.graph_sites import GEMMS, Naming, factors, label, on_cpu, site_of
from holdfast.abft.gemm.modules import identifier_at
from holdfast.sites import SiteTuple

LABEL_PASS = "joint_custom_pre_pass"
REPLACE_PASS = "post_grad_custom_post_pass"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Installed:
    """Inductor's configuration with holdfast's graph passes, and its values before."""

    ours: dict[str, object]
    before: dict[str, object]


_installed: _Installed | None = None
_graphs_known = 0  # number of graphs compiled before the passes were last removed
_uncovered: dict[SiteTuple, str] = {}


def install() -> None:
    """Add holdfast's passes to Inductor; graphs compiled without them are compiled again."""
    global _installed
    if _installed is not None:
        return
    if graphs_compiled() != _graphs_known:
        torch.compiler.reset()
    from torch._inductor import config

    before = {name: getattr(config, name) for name in (LABEL_PASS, REPLACE_PASS)}
    ours = {
        LABEL_PASS: _chained(before[LABEL_PASS], _label),
        REPLACE_PASS: _chained(before[REPLACE_PASS], _replace),
    }
    _installed = _Installed(ours, before)
    for name, chained in ours.items():
        setattr(config, name, chained)


def uninstall() -> None:
    """Remove holdfast's passes from Inductor; compiled graphs stay but no longer verify."""
    global _installed, _graphs_known
    if _installed is None:
        return
    from torch._inductor import config

    for name, chained in _installed.ours.items():
        if getattr(config, name) is chained:
            setattr(config, name, _installed.before[name])
    _installed, _graphs_known = None, graphs_compiled()
    _uncovered.clear()


def graphs_compiled() -> int:
    """Count the graphs that Dynamo compiled in this process."""
    # Not yet there while another thread imports it.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def uncovered() -> dict[SiteTuple, str]:
    """Return the sites of compiled products that are not verified, and why."""
    return dict(_uncovered)


def _chained(before: Any, change: Callable[[Graph], None]) -> Any:
    """Append a pass to Inductor's existing one; it has no uuid, so that no graph is cached."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    passes = [*before] if isinstance(before, list | tuple) else [before] if before else []

    class Chained(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for run in (*passes, change):
                run(graph)

        def uuid(self) -> None:
            return None

    return Chained()


def _label(graph: Graph) -> None:
    decomposed = label(graph, _naming())
    _uncovered.update({site: _by(op) for site, op in decomposed.items()})


def _replace(graph: Graph) -> None:
    """Replace aten's matmuls by verified ops; note labelled products that Inductor transformed."""
    naming = _naming()
    products = [node for node in graph.nodes if node.target in GEMMS and _verifiable(node)]
    sites = {site_of(node) for node in products}
    for node in graph.nodes:
        site = site_of(node) if node.op == "call_function" and on_cpu(node) else None
        if site is not None and site not in sites:
            _uncovered[site] = _by(str(node.target))
    for node in products:  # Inductor's rewriting may have lost a label: then the name is a guess
        _check(node, site_of(node) or naming.site(node, GEMMS[node.target], factors(node)))


def _check(node: Node, site: SiteTuple) -> None:
    has_addend = len(node.args) == 3
    scalars = [node.kwargs.get(name, 1) for name in ("beta", "alpha")] if has_addend else []
    node.target = _checked_ops()[node.target]
    node.args = (*node.args, *scalars, *site)
    node.kwargs = {}


def _verifiable(node: Node) -> bool:
    return on_cpu(node) and node.meta["val"].dtype in DTYPES


def _by(op: str) -> str:
    return f"Inductor computes it by {op}"


def _naming() -> Naming:
    return Naming(identifier_at, identifier_at(_root_address()))


def _root_address() -> int:
    """Return ``id()`` of the module whose call Dynamo is compiling; 0 for a function."""
    from torch._dynamo import external_utils
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx()
    except AttributeError:  # the graph was compiled without Dynamo
        return 0
    code = frame.f_code
    # Modules of torch's own are called by a wrapper of Dynamo's; of others forward is compiled.
    wrapped = code.co_filename == external_utils.__file__
    name = "fn" if wrapped else next(iter(code.co_varnames), "")
    module = frame.f_locals.get(name)
    is_call_of = isinstance(module, torch.nn.Module) and (wrapped or hasattr(module, code.co_name))
    return id(module) if is_call_of else 0


@cache
def _checked_ops() -> dict[object, OpOverload]:
    """Map each aten product to its verified op, whose results have the same shape and type."""
    return {gemm: _with_fake(gemm, getattr(torch.ops.holdfast, GEMMS[gemm])) for gemm in GEMMS}


def _with_fake(gemm: Any, packet: Any) -> OpOverload:
    tensors = sum(isinstance(arg.type, torch.TensorType) for arg in gemm._schema.arguments)
    torch.library.register_fake(packet.default.name(), lambda *args: gemm(*args[:tensors]))
    checked: OpOverload = packet.default
    return checked

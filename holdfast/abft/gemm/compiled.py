"""Verification of matmuls in graphs that Inductor compiles, named as they are in eager mode.

Inductor alone would compute some products by kernels of its own (CPU templates), which cannot be
intercepted, and would call the others from one function that enters no module. While a model is
protected, two passes therefore run on every graph that the protecting thread compiles:

- In the joint graph, before it is split into forward and backward, each product is labelled with
  the site that it has in eager mode: its module, op, ordinal and role.
- In each half, after Inductor's own rewriting, ``aten.mm``, ``addmm``, ``bmm`` and ``baddbmm`` on
  CPU become ``holdfast::mm`` and so on, opaque ops that call the intercepted kernel under the
  labelled site.

Healthy results keep their bits, as Inductor's choice of arithmetic does not change (only where
``max_autotune`` would choose a CPU template, ATen's kernel is used). Products that Inductor turned
into something else are listed by ``uncovered``.

Such graphs are not stored in Inductor's cache on disk, as their sites hold only in this process;
their C++ kernels are. Graphs that were compiled before are compiled again.
"""

import sys
import threading
from collections.abc import Callable
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

_lock = threading.Lock()
_users = 0  # calls of install that no call of uninstall ended yet
_installed: dict[str, tuple[object, object]] = {}  # Inductor's passes before, and with holdfast's
_graphs_known = 0  # number of graphs compiled before the passes were last removed
_uncovered: dict[SiteTuple, str] = {}


def install() -> bool:
    """Add holdfast's passes to Inductor; graphs compiled without them are compiled again.

    Each call must be followed by one of ``uninstall``, the last of which removes the passes. Return
    whether this call added them.
    """
    global _users
    with _lock:
        if _users:
            _users += 1
            return False
        if graphs_compiled() != _graphs_known:
            torch.compiler.reset()
        from torch._inductor import config

        for name, change in ((LABEL_PASS, _label), (REPLACE_PASS, _replace)):
            before = getattr(config, name)
            chained = _chained(before, change)
            _installed[name] = before, chained
            setattr(config, name, chained)
        _users = 1
        return True


def uninstall() -> None:
    """Remove holdfast's passes from Inductor; compiled graphs stay but no longer verify."""
    global _users, _graphs_known
    with _lock:
        _users -= 1
        if _users:
            return
        from torch._inductor import config

        for name, (before, chained) in _installed.items():
            if getattr(config, name) is chained:
                setattr(config, name, before)
        _graphs_known = graphs_compiled()
        _installed.clear()
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
    """Append a pass to Inductor's existing ones, without a uuid, so that no graph is cached."""
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
    # Torch's own modules are called by a wrapper of Dynamo's; for others ``forward`` is compiled.
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

"""Naming of the products of a compiled graph by the names that they have in eager mode.

A joint graph holds forward and backward in one list of ``aten`` calls. What names them is in the
nodes' metadata: the modules that Dynamo traced through (``nn_module_stack``, keyed by the module's
address), and autograd's sequence number, which a backward product shares with the forward one that
it differentiates.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from holdfast.abft.coverage import unverified_device
from holdfast.abft.gemm.devices import PRODUCTS, is_intercepted, is_verified
from holdfast.abft.gemm.unverified_ops import OPAQUE, opaque_name, product_name
from holdfast.sites import SiteTuple

LABEL = "holdfast_site"
LAST_ORDINAL = 999  # loops inside one module share the last name, as in eager mode
FORWARD, GRAD_A, GRAD_B, GRAD_QKV = range(4)

aten = torch.ops.aten
GEMMS: dict[Any, str] = {
    aten.mm.default: "mm",
    aten.addmm.default: "addmm",
    aten.bmm.default: "bmm",
    aten.baddbmm.default: "baddbmm",
}
# Products that only the checks of a device verify, which read their other arguments themselves.
ON_DEVICES: dict[Any, str] = {
    getattr(aten, name).default: name.removesuffix("_v2")
    for name in sorted(PRODUCTS.difference(GEMMS.values()))
}
# Our attention kernels as they are called, and op, ordinal and role of a call in a module.
ATTENTIONS: dict[str, Callable[[int], tuple[str, int, int]]] = {
    "holdfast.attention.default": lambda ordinal: ("sdpa", ordinal, FORWARD),
    "holdfast.attention_backward.default": lambda ordinal: ("sdpa_backward", ordinal, GRAD_QKV),
}
# Products of which Inductor's own kernels may compute parts, by the name of the op, as metadata
# hold copies of ops. Those of vectors it always decomposes.
PARTS_OF = {str(gemm): name for gemm, name in GEMMS.items()} | {
    "aten.mv.default": "addmv",
    "aten.addmv.default": "addmv",
    "aten.dot.default": "dot",
    "aten.vdot.default": "dot",
}
TRANSPOSITIONS = {aten.permute.default, aten.t.default, aten.transpose.int}  # of a matrix
# Ops that an operand may pass through between a product and the product of its gradient.
SAME_BITS = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}
SAME_VALUES = SAME_BITS | {torch.ops.prims.convert_element_type.default}


@dataclass(frozen=True)
class Labels:
    """The products of a joint or inference graph.

    Attributes:
        checkable: Sites of the products on verified devices, whose nodes bear them as labels.
        unverified: Sites of the others, and why they are not verified.
    """

    checkable: frozenset[SiteTuple]
    unverified: dict[SiteTuple, str]


def label(graph: Graph, naming: "Naming") -> Labels:
    """Label every product of a joint or inference graph with its site.

    The site is also in the node's name: names are part of the key under which Inductor keeps a
    compiled graph, so that a graph is found again only where it has the same sites.

    Args:
        graph: Functional aten graph, of which only names and metadata of nodes change.
        naming: Used for this graph only.

    Returns:
        The sites of the products, also of those that were already decomposed into other ops.
    """
    checkable: set[SiteTuple] = set()
    unverified: dict[tuple[object, ...], tuple[SiteTuple, str]] = {}
    for node in list(graph.nodes):
        if name := product_of(node):
            site = naming.site(node, name, factors(node))
            node.meta["custom"] = {**node.meta.get("custom", {}), LABEL: site}
            node._rename("_".join(map(str, ("holdfast", *site))))
            if is_verified(device_of(node)):
                checkable.add(site)
            else:
                unverified[site] = site, unverified_device(device_of(node))
        elif str(node.target) in ATTENTIONS:
            _name_attention(node, naming)
        elif _is_part(node) and (product := _identity(node)) not in unverified:
            site = naming.site(node, PARTS_OF[str(node.meta["original_aten"])], node.args[:2])
            unverified[product] = site, computed_by(str(node.target))
        elif unnamed := _unverified(node):
            name, reason = unnamed
            site = naming.site(node, name, (None, None))
            unverified.setdefault(site[:3], (site, reason))  # the forward product stands for all
    return Labels(frozenset(checkable), dict(unverified.values()))


def _name_attention(node: Node, naming: "Naming") -> None:
    """Give a call of our kernels its site, which is its last arguments."""
    module, _, ordinal, _ = naming.site(node, "sdpa", (None, None))
    node.args = (*node.args[:-4], module, *ATTENTIONS[str(node.target)](ordinal))


def computed_by(op: str) -> str:
    """Return the reason to report for a product that Inductor computes by another op."""
    return f"Inductor computes it by {op}"


def _unverified(node: Node) -> tuple[str, str] | None:
    """Return name and reason of a product that holdfast never verifies; None for other nodes."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, OpOverload | HigherOrderOperator):
        return None
    if name := opaque_name(op, [each.meta.get("val") for each in node.all_input_nodes]):
        return name, OPAQUE
    name, device = product_name(op), device_of(node)
    listed = name and device not in ("", "cpu")  # on CPU the native core lists it when it runs
    return (name, f"{unverified_device(device, name)}; nor are its gradients") if listed else None


def site_of(node: Node) -> SiteTuple | None:
    """Return the site in a node's metadata, also if Inductor replaced the labelled node."""
    site: SiteTuple | None = node.meta.get("custom", {}).get(LABEL)
    return site


def read_one_gradient(grad_a: Node, grad_b: Node) -> bool:
    """Return whether two nodes are dX = dY W and dW = dYᵀ X, or Xᵀ dY, of the same matrix dY."""
    return grad_a.meta["val"].dim() == 2 and factors(grad_a)[0] in matrices(grad_b)


def matrices(node: Node) -> tuple[object, object]:
    """Return M and B of a product MᵀB, whose M is None if its left operand is not transposed."""
    a, b = factors(node)
    return a.args[0] if isinstance(a, Node) and a.target in TRANSPOSITIONS else None, b


def is_saved(value: object) -> bool:
    """Return whether a node of a backward graph has the bits that the forward graph computed."""
    return getattr(_source(value, SAME_BITS), "op", "") == "placeholder"


def product_of(node: Node) -> str:
    """Return the name of a product that can have a check; empty for other nodes."""
    on_device = ON_DEVICES.get(node.target, "")
    return GEMMS.get(node.target) or (on_device if is_intercepted(device_of(node)) else "")


def factors(node: Node) -> Sequence[object]:
    """Return the operands A and B of a product."""
    return node.args[-2:] if node.target in GEMMS else node.args[:2]


def device_of(node: Node) -> str:
    """Return the device type of a node's value, or of its first tensor; empty without one."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return next((each.device.type for each in leaves if isinstance(each, torch.Tensor)), "")


@dataclass(frozen=True)
class _Product:
    """A forward product and the nodes that computed its two factors."""

    site: SiteTuple
    a: object
    b: object


@dataclass
class Naming:
    """Assigns sites to the products of one graph, which are passed in program order.

    Args:
        identify: Returns the key in ``sites.module_names`` of the module at an address, or 0.
        root: Key of the module whose ``forward`` is the graph, or 0.
    """

    identify: Callable[[int], int]
    root: int
    _calls: Counter[tuple[object, ...]] = field(default_factory=Counter)
    _forward: dict[int, _Product] = field(default_factory=dict)  # by sequence number
    _gradients: Counter[int] = field(default_factory=Counter)  # by sequence number

    def site(self, node: Node, op: str, operands: Sequence[object]) -> SiteTuple:
        """Return the site of a product, given its node, or its first node if it was decomposed."""
        sources = [_source(operand) for operand in operands]
        if node.meta.get("partitioner_tag") == "is_backward":
            return self._backward(node, op, sources)
        module, call = self._module(node.meta.get("nn_module_stack"))
        ordinal = self._calls[op, call] if module else 0
        self._calls[op, call] += 1
        site = module, op, min(ordinal, LAST_ORDINAL), FORWARD
        if "seq_nr" in node.meta:
            # An op without an autograd node carries the number of an earlier op, which keeps it.
            self._forward.setdefault(node.meta["seq_nr"], _Product(site, *sources))
        return site

    def _backward(self, node: Node, op: str, sources: Sequence[object]) -> SiteTuple:
        sequence = node.meta.get("seq_nr", -1)
        product = self._forward.get(sequence)
        if product is None:
            module, _ = self._module(node.meta.get("fwd_nn_module_stack"))
            return module, op, 0, GRAD_A
        nth = self._gradients[sequence]
        self._gradients[sequence] += 1
        module, forward_op, ordinal, _ = product.site
        return module, forward_op, ordinal, _role(product, sources, nth)

    def _module(self, stack: dict[str, object] | None) -> tuple[int, tuple[str, ...]]:
        """Return the innermost known module, and which call of it this is."""
        keys = tuple(stack or ())
        for depth in range(len(keys), 0, -1):
            address = keys[depth - 1].split("@")[0]
            if address.isdigit() and (module := self.identify(int(address))):
                return module, keys[:depth]
        return self.root, ()


def _is_part(node: Node) -> bool:
    """Return whether a node computes part of a product, beyond viewing or converting a factor."""
    computes = node.target not in SAME_VALUES and bool(node.users)
    return computes and str(node.meta.get("original_aten")) in PARTS_OF and bool(device_of(node))


def _identity(node: Node) -> tuple[object, ...]:
    """Return a key that is equal for all nodes into which one product was decomposed."""
    names = ("original_aten", "seq_nr", "partitioner_tag")
    return tuple(str(node.meta.get(name)) for name in (*names, "nn_module_stack"))


def _source(value: object, skipped: Collection[object] = SAME_VALUES) -> object:
    """Return the node that computed a value, skipping views, copies and conversions."""
    while isinstance(value, Node) and value.target in skipped:
        value = value.args[0]
    return value


def _role(product: _Product, sources: Sequence[object], nth: int) -> int:
    """Return the role of a backward product: it is the gradient of the operand it does not read."""
    by_a, by_b = product.a in sources, product.b in sources
    if by_a != by_b:
        return GRAD_B if by_a else GRAD_A
    # Both or neither: torch differentiates mm and bmm by b first, addmm and baddbmm by a first.
    a_first = "add" in product.site[1]
    return GRAD_A if (nth % 2 == 0) == a_first else GRAD_B

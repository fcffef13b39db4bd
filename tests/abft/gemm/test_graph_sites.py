"""Names of a graph's products, from metadata as Dynamo and autograd write them."""

from typing import Any

import torch
from torch.fx import Graph, Node

from holdfast.abft.gemm.graph_sites import Naming, label, site_of

aten = torch.ops.aten
OUTER, INNER, STRANGER = "1", "2", "99"
IDS = {1: 10, 2: 20}


class Built:
    """A graph under construction; its factors are placeholders of shape [4, 4]."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.a, self.b, self.grad = (self._placeholder(name) for name in "abg")

    def _placeholder(self, name: str) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(4, 4)
        return node

    def call(self, target: Any, *args: Any, modules: tuple[str, ...] = (), **meta: Any) -> Node:
        """A call inside of modules, innermost last."""
        node = self.graph.call_function(target, args)
        node.meta = {
            "val": torch.empty(4, 4),
            "nn_module_stack": dict.fromkeys(modules, ("path", object)),
            **meta,
        }
        return node

    def backward(self, target: Any, *args: Any, of: int) -> Node:
        """A call that autograd makes for the forward node of that sequence number."""
        return self.call(target, *args, seq_nr=of, partitioner_tag="is_backward")

    def label(self, root: int = 0) -> dict[Any, str]:
        """Label the products."""
        return label(self.graph, Naming(lambda address: IDS.get(address, 0), root))


def test_products_of_one_kind_count_up_in_each_call_of_a_module() -> None:
    g = Built()
    modules = [(OUTER,), (OUTER,), (OUTER, INNER), (OUTER, INNER + "@1"), (OUTER, INNER + "@1")]
    nodes = [g.call(aten.mm.default, g.a, g.b, modules=stack) for stack in modules]
    g.label()
    assert [site_of(node) for node in nodes] == [
        (10, "mm", 0, 0),
        (10, "mm", 1, 0),
        (20, "mm", 0, 0),
        (20, "mm", 0, 0),
        (20, "mm", 1, 0),
    ]


def test_a_module_that_nobody_protects_counts_for_the_one_around_it() -> None:
    g = Built()
    inside = g.call(aten.bmm.default, g.a, g.b, modules=(INNER, STRANGER))
    alone = g.call(aten.bmm.default, g.a, g.b, modules=(STRANGER,))
    g.label(root=7)
    assert (site_of(inside), site_of(alone)) == ((20, "bmm", 0, 0), (7, "bmm", 0, 0))


def test_gradients_are_told_apart_by_what_they_multiply_with_whatever_their_order() -> None:
    g = Built()
    forward = g.call(aten.mm.default, g.a, g.b, modules=(INNER,), seq_nr=5)
    a_t, b_t = (g.backward(aten.permute.default, t, [1, 0], of=5) for t in (g.a, g.b))
    grad_a = g.backward(aten.mm.default, b_t, g.grad, of=5)  # as torch does for transposed factors
    grad_b = g.backward(aten.mm.default, a_t, g.grad, of=5)
    g.label()
    assert site_of(forward) == (20, "mm", 0, 0)
    assert (site_of(grad_a), site_of(grad_b)) == ((20, "mm", 0, 1), (20, "mm", 0, 2))


def test_gradients_of_a_product_with_itself_go_by_the_order_of_autograd() -> None:
    g = Built()
    mirrored = g.call(aten.permute.default, g.a, [1, 0])
    g.call(aten.mm.default, g.a, mirrored, seq_nr=5)
    first, second = (g.backward(aten.mm.default, g.grad, g.a, of=5) for _ in range(2))
    g.call(aten.addmm.default, g.b, g.a, mirrored, seq_nr=6)
    third, fourth = (g.backward(aten.mm.default, g.grad, g.a, of=6) for _ in range(2))
    g.label()
    roles = [site_of(node)[3] for node in (first, second, third, fourth)]
    assert roles == [2, 1, 1, 2]


def test_a_later_op_of_the_same_sequence_number_does_not_take_the_gradients_name() -> None:
    g = Built()
    g.call(aten.mm.default, g.a, g.b, modules=(INNER,), seq_nr=5)
    g.call(aten.bmm.default, g.a, g.b, modules=(OUTER,), seq_nr=5)  # makes no autograd node
    gradient = g.backward(aten.mm.default, g.grad, g.b, of=5)
    g.label()
    assert site_of(gradient) == (20, "mm", 0, 1)


def test_a_decomposed_product_is_named_once_and_its_views_and_casts_are_none() -> None:
    g = Built()
    part = {"original_aten": aten.addmm.default, "modules": (INNER,), "seq_nr": 5}
    squeezed = g.call(aten.squeeze.dim, g.a, 0, **part)
    scaled = g.call(aten.mul.Tensor, squeezed, g.b, **part)
    summed = g.call(aten.sum.dim_IntList, scaled, [0], **part)
    g.call(aten.relu.default, summed, modules=(INNER,))
    cast = {"original_aten": aten.mm.default, "modules": (OUTER,), "seq_nr": 6}
    widened = g.call(torch.ops.prims.convert_element_type.default, g.a, torch.float32, **cast)
    product = g.call(aten.mm.default, widened, g.b, **cast)
    assert g.label() == {(20, "addmm", 0, 0): "aten.mul.Tensor"}
    assert (site_of(scaled), site_of(product)) == (None, (10, "mm", 0, 0))

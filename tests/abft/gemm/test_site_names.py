"""What a product is called: by the module that asked for it and the operand it differentiates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from case_loops import for_each
from programs_layers import wanting
from programs_training import perceptron
from programs_transforms import Product
from struck import armed
from torch import nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast.abft.gemm.graph_sites import Labels, Naming, label, site_of
from holdfast.sites import Gemm

M, K, N = 3, 6, 5
SHAPE_OF = {"forward": (M, N), "grad_a": (M, K), "grad_b": (K, N)}


def outputs_of(run: Callable[[], object]) -> list[tuple[str, tuple[int, ...]]]:
    """Role and shape of every product."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is not None:
            seen.append((site.rsplit("/", 1)[1], tuple(output.shape[-2:])))

    with holdfast.protect(nn.Identity()), armed(hook):
        run()
    return seen


PRODUCTS = {
    "mm": (torch.mm, ()),
    "addmm": (partial(torch.addmm, torch.zeros(N)), ()),
    "bmm": (torch.bmm, (2,)),
    "baddbmm": (partial(torch.baddbmm, torch.zeros(N)), (2,)),
    "holdfast.matmul": (holdfast.matmul, ()),
}


def check_roles(product: Callable[..., torch.Tensor], lead: tuple[int, ...]) -> None:
    """Both gradients are named after the operand that has their shape."""

    def run() -> None:
        product(wanting(*lead, M, K), wanting(*lead, K, N)).sum().backward()

    seen = outputs_of(run)
    assert {role for role, _ in seen} == SHAPE_OF.keys()
    assert all(shape == SHAPE_OF[role] for role, shape in seen), seen


@for_each("name", PRODUCTS)
def test_a_gradient_is_named_after_the_operand_of_its_shape(name: str) -> None:
    check_roles(*PRODUCTS[name])


@pytest.mark.xfail(strict=True, reason="which gradient comes first is taken from their order")
def test_so_is_one_of_a_hand_written_derivative() -> None:
    check_roles(Product.apply, ())


@for_each("name", PRODUCTS)
@for_each("wanted", ["grad_a", "grad_b"])
def test_a_gradient_wanted_alone_is_named_so(name: str, wanted: str) -> None:
    product, lead = PRODUCTS[name]

    def run() -> None:
        a, b = torch.randn(*lead, M, K), torch.randn(*lead, K, N)
        (a if wanted == "grad_a" else b).requires_grad_()
        product(a, b).sum().backward()

    assert outputs_of(run) == [("forward", SHAPE_OF["forward"]), (wanted, SHAPE_OF[wanted])]


class Recomputing(nn.Module):
    """A layer and a product of the model's own, in a checkpoint that is no module."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:

        def body(y: torch.Tensor) -> torch.Tensor:
            return torch.mm(self.layer(y), self.layer.weight).sin()

        return checkpoint(body, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@pytest.mark.xfail(strict=True, reason="a product recomputed outside any module is called backward")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_product_recomputed_outside_a_module_is_forward(reentrant: bool) -> None:
    model = Recomputing(reentrant=reentrant)
    with holdfast.protect(model) as protection:
        model(wanting(3, 4)).sum().backward()
        calls = {site.site: site.calls for site in protection.report().sites}
    assert calls == {
        "Recomputing/mm/forward": 2,
        "Recomputing/mm/grad_a": 1,
        "Recomputing/mm/grad_b": 1,
        "layer/addmm/forward": 2,
        "layer/addmm/grad_a": 1,
        "layer/addmm/grad_b": 1,
    }


def test_a_second_derivative_is_named_by_its_module() -> None:
    model = perceptron()
    with holdfast.protect(model) as protection:
        x = wanting(3, 16)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        modules = {site.site.split("/")[0] for site in protection.report().sites}
    assert modules == {"0", "2"}


def test_a_product_of_a_gradient_hook_is_no_gradient() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda grad: grad @ torch.eye(4))
    with holdfast.protect(layer) as protection:
        layer(torch.randn(3, 4)).sum().backward()
        calls = {site.site: site.calls for site in protection.report().sites}
    assert calls == {
        "(outside)/mm/forward": 1,
        "Linear/addmm/forward": 1,
        "Linear/addmm/grad_b": 1,
    }


def test_a_layer_whose_weights_were_used_is_not_called_idle() -> None:
    model = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 2, 8)
    with holdfast.protect(model) as protection:
        model(x, x, x)
        idle = [site.site for site in protection.report().sites if site.reason == "not run yet"]
    assert idle == []


def test_a_layer_without_parameters_does_not_cut_the_report_short() -> None:
    frozen = nn.Linear(4, 4)
    for name in ("weight", "bias"):
        value = getattr(frozen, name).detach()
        delattr(frozen, name)
        frozen.register_buffer(name, value)
    model = nn.Sequential(frozen, nn.Conv1d(3, 3, 1), nn.Linear(4, 4))
    with holdfast.protect(model) as protection:
        assert {site.site for site in protection.report().sites} == {"0", "1", "2"}


# Products of a graph, from metadata as Dynamo and autograd write them.
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

    def label(self, root: int = 0) -> Labels:
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
    labels = g.label()
    assert labels.unverified == {(20, "addmm", 0, 0): "Inductor computes it by aten.mul.Tensor"}
    assert labels.checkable == {(10, "mm", 0, 0)}
    assert (site_of(scaled), site_of(product)) == (None, (10, "mm", 0, 0))

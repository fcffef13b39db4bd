"""What a product is called: by the module that asked for it and the operand it differentiates."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from case_loops import for_each
from programs_layers import wanting
from programs_training import perceptron
from programs_transforms import Product
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdfast
from holdfast import sites
from holdfast.sites import Gemm

M, K, N = 3, 6, 5
SHAPE_OF = {"forward": (M, N), "grad_a": (M, K), "grad_b": (K, N)}


def outputs_of(run: Callable[[], object]) -> list[tuple[str, tuple[int, ...]]]:
    """Role and shape of every product."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if output is not None:
            seen.append((site.rsplit("/", 1)[1], tuple(output.shape[-2:])))

    with holdfast.protect(nn.Identity()):
        sites.arm(hook)
        run()
        sites.disarm()
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
        """Both, activated."""

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

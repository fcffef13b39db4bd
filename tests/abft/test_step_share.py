"""The verified share of a step: what is counted, and what is not."""

import pytest
import torch
from torch import nn

import holdfast

TOKENS, WIDTH = 32, 64


class Net(nn.Module):
    """A verified layer and attention, and a product of complex numbers, which is not verified."""

    def __init__(self, *, complex_product: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.complex_product = complex_product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        heads = y.view(1, TOKENS, 4, -1).transpose(1, 2)
        found = nn.functional.scaled_dot_product_attention(heads, heads, heads).sum()
        if self.complex_product:
            found = (
                found
                + (x.detach().to(torch.complex64) @ x.detach().t().to(torch.complex64)).abs().sum()
            )
        return found


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(TOKENS, WIDTH, requires_grad=True)


def test_all_flops_of_layers_and_attention_are_verified(x: torch.Tensor) -> None:
    with holdfast.protect(Net(complex_product=False)) as protection:
        share = protection.measure(lambda: protection.model(x).backward())
    assert share.flops == 1.0
    products = {each.name: each for each in share.operators if each.flops}
    assert products["aten.mm"].flops == 3 * 2 * TOKENS * WIDTH * WIDTH  # forward and two gradients
    assert 0 < share.nbytes < 1


def test_a_product_that_is_not_verified_lowers_the_share_and_is_named(x: torch.Tensor) -> None:
    with holdfast.protect(Net(complex_product=True)) as protection:
        share = protection.measure(lambda: protection.model(x))
        report = protection.report()
    counted = sum(each.flops for each in share.operators)
    assert share.flops == 1 - 2 * TOKENS * TOKENS * WIDTH / counted
    assert report.step is share
    assert "aten.mm" in str(report)


def test_without_verification_no_flop_is_verified(x: torch.Tensor) -> None:
    with holdfast.protect(Net(complex_product=False), verify=False) as protection:
        assert protection.measure(lambda: protection.model(x)).flops == 0.0


def test_the_measured_step_computes_the_same_bits(x: torch.Tensor) -> None:
    with holdfast.protect(Net(complex_product=False)) as protection:
        protection.measure(lambda: protection.model(x).backward())
        measured = x.grad
        x.grad = None
        protection.model(x).backward()
    assert measured is not None
    assert x.grad is not None
    assert torch.equal(measured, x.grad)


def test_views_move_no_bytes_and_changes_in_place_do() -> None:
    a = torch.ones(8, 4)

    def step() -> None:
        a.t().reshape(-1)
        a.view(32).add_(1)

    with holdfast.protect(nn.Linear(1, 1)) as protection:
        operators = {each.name: each for each in protection.measure(step).operators}
    assert operators["aten.t"].nbytes == 0 == operators["aten.view"].nbytes
    assert operators["aten.add_"].nbytes == 2 * 32 * 4


def test_sparse_gradients_do_not_end_the_step() -> None:
    model = nn.EmbeddingBag(10, 4, sparse=True)
    with holdfast.protect(model) as protection:
        protection.measure(lambda: model(torch.tensor([[1, 2]])).sum().backward())
    assert model.weight.grad is not None


def test_a_layer_that_autograd_does_not_decompose_is_counted() -> None:
    with holdfast.protect(nn.Linear(8, 8), verify=False) as protection, torch.inference_mode():
        share = protection.measure(lambda: protection.model(torch.ones(2, 8)))
    assert share.flops == 0.0


def test_convolutions_count_by_the_share_of_their_calls_that_other_steps_check() -> None:
    with holdfast.protect(nn.Conv2d(3, 4, 3), convolutions=0.25) as protection:
        share = protection.measure(lambda: protection.model(torch.ones(2, 3, 8, 8)))
    assert share.flops == pytest.approx(0.25, rel=1e-3)

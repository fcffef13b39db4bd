"""What the three products of a linear layer read together, and that sharing hides no fault."""

import itertools

import pytest
import torch
from case_loops import for_each
from device_stand_in import verdicts
from struck import DTYPES, Strike, armed, kinds, struck
from torch import nn

import holdfast
from holdfast import events
from holdfast.abft.gemm.cpu import encode
from holdfast.digest.tensors import tensors_digest
from holdfast.sites import Gemm

SHAPES = [(192, 64, 48), (130, 33, 70), (5, 16, 16), (300, 512, 256)]
dtypes = for_each("dtype", DTYPES)
shapes = for_each("shape", SHAPES)


def gradients(layer: nn.Linear, x: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    output = layer(x)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], upstream)]


def layer_and_data(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    rows, inputs, outputs = shape
    torch.manual_seed(rows)
    layer = nn.Linear(inputs, outputs, dtype=dtype)
    x = torch.randn(rows, inputs, dtype=dtype, requires_grad=True)
    return layer, x, torch.randn(rows, outputs, dtype=dtype)


@dtypes
@shapes
def test_the_kept_encoding_of_an_activation_has_the_bits_of_a_fresh_one(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    layer, x, upstream = layer_and_data(dtype, shape)
    seen: list[tuple[torch.Tensor, ...]] = []

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "checksum" and site.endswith("grad_b"):
            seen.append((gemm.row_sum.clone(), gemm.statistics.clone(), *encode(gemm.b)))

    with holdfast.protect(layer), armed(hook):
        gradients(layer, x, upstream)
    (row_sum, statistics, fresh_sum, fresh_statistics) = seen[0]
    assert torch.equal(row_sum, fresh_sum)
    assert torch.equal(statistics, fresh_statistics)


@dtypes
@shapes
def test_clean_layers_are_silent_and_a_fault_in_any_of_the_three_products_is_repaired(
    dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    layer, x, upstream = layer_and_data(dtype, shape)
    expected = tensors_digest(gradients(layer, x, upstream))
    with holdfast.protect(layer) as protection:
        for _ in range(3):
            assert tensors_digest(gradients(layer, x, upstream)) == expected
        counted = protection.report().sites
        assert sum(site.rows for site in counted) == 3 * (2 * shape[0] + shape[2])
        assert sum(site.suspects for site in counted) == 0
        for role, row in itertools.product(("forward", "grad_a", "grad_b"), (0, -1)):
            events.clear()
            with struck((row, 2), lambda old: old * 16 + 1000, site=role):
                assert tensors_digest(gradients(layer, x, upstream)) == expected, (role, row)
            assert kinds() == ["gemm_fault"], (role, row)


@dtypes
def test_an_activation_damaged_between_forward_and_backward_is_seen(dtype: torch.dtype) -> None:
    layer, x, upstream = layer_and_data(dtype, (192, 64, 48))
    inner = torch.randn(192, 64, dtype=dtype)
    with holdfast.protect(layer):
        output = layer(inner * x.detach())
        activation = output.grad_fn._saved_mat1
        activation.data[3, 5] += 1000
        with pytest.raises(holdfast.UncorrectableFault, match="B changed in row 3"):
            output.backward(upstream)


def test_graphs_that_are_kept_or_never_used_do_no_harm() -> None:
    layer, x, upstream = layer_and_data(torch.float32, (192, 64, 48))
    with holdfast.protect(layer) as protection:
        for _ in range(600):  # more than are kept
            layer(x)
        output = layer(x)
        first = torch.autograd.grad(output, list(layer.parameters()), upstream, retain_graph=True)
        again = torch.autograd.grad(output, list(layer.parameters()), upstream)
        assert tensors_digest(first) == tensors_digest(again)
        assert sum(site.suspects for site in protection.report().sites) == 0
    assert events.recent() == []


@dtypes
def test_on_a_device_verdicts_without_a_bias_are_those_of_checks_that_share_nothing(
    dtype: torch.dtype,
) -> None:
    for struck_site in ("", "forward", "grad_b", "grad_a"):
        hook = [Strike((3, 2), lambda old: old + 100, site=struck_site or "-") for _ in range(2)]
        shared = verdicts("aten", dtype, hook[0], shared=True)
        assert shared == pytest.approx(verdicts("aten", dtype, hook[1], shared=False), rel=1e-4)
        sites = ("forward", "grad_b", "grad_a")
        assert [ratio > 1 for ratio in shared] == [site == struck_site for site in sites]


def test_on_a_device_dy_that_changed_between_the_gradients_of_a_layer_is_seen() -> None:
    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "operand" and site.endswith("grad_a"):
            gemm.a.data[3, 5] += 1000

    for shared in (True, False):  # without sharing dX is judged by the dY that was multiplied
        ratios = verdicts("aten", torch.float32, hook, shared=shared)
        assert [ratio > 1 for ratio in ratios] == [False, False, shared]

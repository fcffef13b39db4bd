"""The kept checksums of weights: used while the weight is unchanged, never longer."""

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from case_loops import for_each
from struck import armed, kinds
from torch import nn

import holdfast
from holdfast import events, native
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm

core = native.core


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    """A protected linear layer of known weights."""
    torch.manual_seed(0)
    model = nn.Linear(12, 8)
    with holdfast.protect(model):
        yield model
    assert core.cached_encodings() == 0


def step(model: nn.Module) -> None:
    """One forward and backward pass that needs every gradient."""
    model(torch.randn(5, 12, requires_grad=True)).square().sum().backward()


def test_forward_and_backward_each_keep_their_checksum_and_use_it(layer: nn.Linear) -> None:
    seen: list[int] = []

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "checksum":
            seen.append(gemm.row_sum.data_ptr())

    layer(torch.randn(5, 12))
    assert core.cached_encodings() == 1
    with armed(hook):
        step(layer)
        assert core.cached_encodings() == 2  # backward reads the other side
        step(layer)
    assert core.cached_encodings() == 2
    # addmm forward and grad_a read the weight; grad_b reads the input, encoded anew.
    assert seen[0] == seen[3]
    assert seen[1] == seen[4] or seen[2] == seen[5]


def test_an_unseen_edit_is_reported_and_the_result_is_right(layer: nn.Linear) -> None:
    x = torch.randn(3, 12)
    layer(x)
    layer.weight.data.mul_(3.0)
    expected = nn.functional.linear(x, layer.weight.detach().clone(), layer.bias)
    assert torch.equal(layer(x), expected)
    assert kinds() == ["weight_changed_unseen"]
    layer(x)
    assert kinds() == ["weight_changed_unseen"]


def test_an_unseen_edit_to_nan_is_no_arithmetic_fault(layer: nn.Linear) -> None:
    layer(torch.randn(3, 12))
    layer.weight.data.fill_(torch.nan)
    assert layer(torch.randn(3, 12)).isnan().all()
    assert kinds() == ["weight_changed_unseen"]


def test_one_flipped_element_of_a_kept_weight_is_a_fault_of_memory(layer: nn.Linear) -> None:
    x = torch.randn(3, 12)
    layer(x)
    layer.weight.data[2, 7] = 1e6
    with pytest.raises(UncorrectableFault, match="B changed in row 7 after encoding"):
        layer(x)
    with pytest.raises(UncorrectableFault, match=r"edited it where autograd .*torch\.no_grad\(\)"):
        layer(x)
    with torch.no_grad():
        layer.weight[2, 7] = 0.1
    events.clear()
    layer(x)
    assert kinds() == []


@for_each("index", [(2, 7), (slice(None), 7)])
def test_an_unseen_edit_of_an_input_column_names_the_cause_and_the_remedy(
    layer: nn.Linear, index: tuple[int | slice, int]
) -> None:
    """One entry of the checksum moves, as if memory were at fault: the message says both."""
    x = torch.randn(3, 12)
    layer(x)
    layer.weight.data[index] += 100.0
    remedy = r"through \.data or NumPy\).*torch\.no_grad\(\).*protection\.refresh\(\)"
    with pytest.raises(UncorrectableFault, match=remedy):
        layer(x)
    assert "protection.refresh()" in events.recent()[0].detail["reason"]
    events.clear()
    layer.weight.data[index] -= 100.0
    with holdfast.protect(layer) as protection:
        protection.refresh(layer.weight)


def test_freed_weights_leave_nothing_behind() -> None:
    outer = nn.Linear(12, 8)
    with holdfast.protect(outer):
        for seed in range(50):
            torch.manual_seed(seed)
            outer.weight = nn.Parameter(torch.randn(8, 12))
            with holdfast.protect(outer):
                step(outer)
            torch.mm(torch.randn(3, 8), torch.randn(8, 12))
        assert core.cached_encodings() == 0
    assert kinds() == []


def test_two_protections_of_one_model_end_independently() -> None:
    model = nn.Linear(12, 8)
    first, second = holdfast.protect(model), holdfast.protect(model)
    step(model)
    first.remove()
    assert core.cached_encodings() == 2
    step(model)
    assert all(site.covered and site.calls == 2 for site in second.report().sites)
    second.remove()
    assert core.cached_encodings() == 0
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@for_each("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own_weights(copied: Callable[[nn.Module], nn.Linear]) -> None:
    model = nn.Linear(12, 8)
    with holdfast.protect(model):
        step(model)
        twin = copied(model)
        with torch.no_grad():
            twin.weight.mul_(-7.0)
        x = torch.randn(3, 12)
        expected = nn.functional.linear(x, twin.weight.clone(), twin.bias)
        assert torch.equal(twin(x), expected)
        step(model)
    assert torch.equal(twin(x), expected)
    assert kinds() == []


def test_the_same_bytes_as_another_dtype_are_another_matrix() -> None:
    model = nn.Linear(12, 8, bias=False).bfloat16()
    with holdfast.protect(model):
        model(torch.randn(3, 12).bfloat16())
        torch.mm(torch.randn(3, 12).half(), model.weight.detach().view(torch.float16).t())
    assert kinds() == []


def test_inference_tensors_are_never_kept() -> None:
    with torch.inference_mode():
        model = nn.Linear(12, 8)
        with holdfast.protect(model) as protection:
            model(torch.randn(3, 12))
            model.weight.mul_(2)
            model(torch.randn(3, 12))
            assert core.cached_encodings() == 0
            assert [site.calls for site in protection.report().sites] == [2]
    assert kinds() == []


def test_parameters_without_a_dense_storage_are_left_alone() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().to_sparse())
    holdfast.protect(model).remove()
    with torch.device("meta"):
        meta = nn.Linear(4, 4)
    with holdfast.protect(meta):
        assert meta(torch.ones(2, 4, device="meta")).shape == (2, 4)

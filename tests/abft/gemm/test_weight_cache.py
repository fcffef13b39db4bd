"""The kept checksums of weights: used while the weight is unchanged, never longer."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events, native, sites
from holdfast.errors import UncorrectableFault
from holdfast.sites import Gemm

if native.core is None:
    pytest.skip("the native core is not built", allow_module_level=True)
core = native.core


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    """A protected linear layer of known weights."""
    torch.manual_seed(0)
    model = nn.Linear(12, 8)
    with holdfast.protect(model):
        yield model
    assert core.cached_encodings() == 0


def step(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    """One forward and backward pass that needs every gradient."""
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)) if x is None else x
    output = model(x.detach().requires_grad_())
    output.square().sum().backward()
    return output.detach()


def kinds() -> list[str]:
    """The kinds of the events so far."""
    return [event.kind for event in events.recent()]


def test_forward_and_backward_each_keep_their_view(layer: nn.Linear) -> None:
    layer(torch.randn(5, 12))
    assert core.cached_encodings() == 1
    step(layer)
    assert core.cached_encodings() == 2
    step(layer)
    assert core.cached_encodings() == 2


def test_a_kept_checksum_is_used(layer: nn.Linear) -> None:
    seen: list[int] = []

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "checksum":
            seen.append(gemm.row_sum.data_ptr())

    sites.arm(hook)
    step(layer)
    step(layer)
    # addmm forward and grad_a read the weight; grad_b reads the input, encoded anew.
    assert seen[0] == seen[3]
    assert seen[1] == seen[4] or seen[2] == seen[5]


CHANGES = {
    "in place": lambda m: m.weight.mul_(2.0),
    "copy_": lambda m: m.weight.copy_(torch.randn(8, 12)),
    "one element": lambda m: m.weight[3].__setitem__(4, 50.0),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.ones(8, 12), "bias": m.bias}),
    "load_state_dict assign": lambda m: m.load_state_dict(
        {"weight": torch.ones(8, 12), "bias": torch.ones(8)}, assign=True
    ),
    "new data": lambda m: setattr(m.weight, "data", torch.randn(8, 12)),
    "to float64 and back": lambda m: m.double().float(),
    "detached alias": lambda m: m.weight.detach().add_(1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_weight_is_encoded_again(layer: nn.Linear, name: str) -> None:
    step(layer)
    with torch.no_grad():
        CHANGES[name](layer)
        expected = nn.functional.linear(torch.ones(2, 12), layer.weight.clone(), layer.bias)
    assert torch.equal(layer(torch.ones(2, 12)).detach(), expected)
    step(layer)
    assert kinds() == []


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_with_kept_checksums_is_silent_and_unchanged(
    optimizer: type[torch.optim.Optimizer], foreach: bool
) -> None:
    def train(*, protected: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
        chosen = optimizer(model.parameters(), lr=0.05, foreach=foreach)  # type: ignore[call-arg]
        protection = holdfast.protect(model, verify=protected)
        for _ in range(20):
            chosen.zero_grad()
            step(model)
            chosen.step()
        protection.remove()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(protected=True), train(protected=False))
    assert kinds() == []


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
    with pytest.raises(UncorrectableFault):
        layer(x)
    with torch.no_grad():
        layer.weight[2, 7] = 0.1
    events.clear()
    layer(x)
    assert kinds() == []


def test_a_fault_in_a_kept_checksum_heals_once_and_for_all(layer: nn.Linear) -> None:
    x = torch.randn(3, 12)
    clean = layer(x)

    def hook(stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        if stage == "checksum":
            gemm.row_sum[0, 5] += 1e6

    sites.arm(hook)
    assert torch.equal(layer(x), clean)
    sites.disarm()
    assert kinds() == ["checksum_fault"]
    assert torch.equal(layer(x), clean)
    assert torch.equal(layer(x), clean)
    assert kinds() == ["checksum_fault"]


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


def test_tied_and_shared_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12, bias=False)
            self.second = nn.Linear(12, 12, bias=False)
            self.second.weight = self.first.weight
            self.again = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.second(self.first(x))) @ self.first.weight

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with holdfast.protect(model):
        for _ in range(3):
            step(model)
            optimizer.step()
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


def test_a_deep_copy_has_its_own_weights() -> None:
    model = nn.Linear(12, 8)
    with holdfast.protect(model):
        step(model)
        twin = copy.deepcopy(model)
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

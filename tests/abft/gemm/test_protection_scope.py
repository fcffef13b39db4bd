"""When protection begins and ends, in which thread, and what a repair leaves unseen."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from case_loops import for_each
from gemm_strikes import strike
from programs_layers import wanting
from struck import Strike, armed, kinds, same_bits
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import holdfast
from holdfast import events, native
from holdfast.abft.gemm import other_devices

PATIENCE_S = 30.0


@pytest.fixture
def busy_interpreter() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Run, wait, and raise what a thread raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    output = model(x)
    return [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))]


@pytest.mark.usefixtures("busy_interpreter")
@pytest.mark.parametrize("watched", [False, True])
@for_each("shared", [False, True])
def test_threads_protect_and_leave_independently(
    shared: bool, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether first passes are watched, as where operators of other packages are loaded.
    monkeypatch.setattr(other_devices, "opaque_ops_loaded", lambda: watched)
    models = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)) for _ in range(4)]
    x = torch.randn(3, 6)
    expected = [gradients(model, x) for model in models]

    def work(index: int) -> None:
        index = 0 if shared else index
        for _ in range(60):
            with holdfast.protect(models[index]):
                found = gradients(models[index], x)
            assert same_bits(found, expected[index])

    in_threads(work)
    assert events.recent() == []
    assert native.core.cached_encodings() == 0
    assert not any(module._forward_hooks for model in models for module in model.modules())
    with armed(strike(0)):
        assert not torch.equal(models[0](x), expected[0][0])  # nothing is verified any more


def test_a_hook_that_is_called_after_its_removal_does_nothing() -> None:
    # As another thread may remove it between torch's look at the hooks and the call.
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    expected, protection = layer(x), holdfast.protect(layer)
    handle = layer.register_forward_pre_hook(lambda *_: protection.remove(), prepend=True)
    assert torch.equal(layer(x), expected)
    handle.remove()
    assert not layer._forward_pre_hooks


def test_what_one_thread_watches_ends_with_its_pass_if_another_thread_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As where operators of other packages are loaded, so that the first pass is watched.
    monkeypatch.setattr(other_devices, "opaque_ops_loaded", lambda: True)
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(3, 6)
    expected, protection = model(x), holdfast.protect(model)
    handle = model[0].register_forward_hook(lambda *_: in_threads(lambda _: protection.remove(), 1))
    modes = _len_torch_dispatch_stack()
    assert torch.equal(model(x), expected)
    handle.remove()
    assert _len_torch_dispatch_stack() == modes
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.usefixtures("busy_interpreter")
def test_faults_in_several_threads_are_each_repaired_under_their_own_name() -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(6, 5)) for _ in range(4))
    x, rounds = torch.randn(3, 6), 25
    expected = [gradients(layer, x) for layer in model]

    def work(index: int) -> None:
        for _ in range(rounds):
            assert same_bits(gradients(model[index], x), expected[index])

    with holdfast.protect(model) as protection:
        with armed(Strike((0, 0), 3e4, always=True)):
            in_threads(work)
        suspects = {site.site: site.suspects for site in protection.report().sites}
    roles = ("forward", "grad_b")
    assert suspects == {f"{i}.0/addmm/{role}": rounds for i in range(4) for role in roles}
    assert sorted({event.op for event in events.recent()}) == sorted(suspects)
    assert kinds() == ["gemm_fault"] * (rounds * 8)


class Waiting(nn.Module):
    """Stays in its forward pass until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        return x


def test_a_thread_that_was_inside_a_module_at_removal_is_outside_afterwards() -> None:
    model, left, again = Waiting(), threading.Event(), threading.Event()

    def work() -> None:
        model(torch.ones(2, 2))
        left.set()
        if again.wait(PATIENCE_S):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    protection = holdfast.protect(model)
    worker = threading.Thread(target=work)
    worker.start()
    assert model.entered.wait(PATIENCE_S)
    protection.remove()
    model.go.set()
    assert left.wait(PATIENCE_S)
    with holdfast.protect(model) as protection:
        again.set()
        worker.join(PATIENCE_S)
        names = {site.site for site in protection.report().sites}
    assert names == {"(outside)/mm/forward"}


def test_a_protection_that_ends_inside_a_module_does_not_leave_it() -> None:
    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            holdfast.protect(nn.Linear(2, 2)).remove()
            return x @ x.mT

    with holdfast.protect(Outer()) as protection:
        protection.model(torch.ones(2, 2))
        assert {site.site for site in protection.report().sites} == {"Outer/mm/forward"}


def test_protection_that_begins_after_forward_covers_backward() -> None:
    layer, x = nn.Linear(6, 5), wanting(3, 6)
    wanted = [x, layer.weight]
    expected = torch.autograd.grad(layer(x).square().sum(), wanted)
    loss = layer(x).square().sum()
    with holdfast.protect(layer):
        for nth in range(2):
            with armed(strike(nth)):
                found = torch.autograd.grad(loss, wanted, retain_graph=True)
            assert same_bits(found, expected)
    assert kinds() == ["gemm_fault"] * 2


def test_protection_that_ends_before_backward_leaves_the_graph_intact() -> None:
    layer, x = nn.Linear(6, 5), wanting(3, 6)
    expected = gradients(layer, x)
    with holdfast.protect(layer):
        output = layer(x)
    found = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    assert same_bits(found, expected[1:])


class Log(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_repair_moves_no_random_state_and_no_count_of_the_programs() -> None:
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    seen = []
    with holdfast.protect(layer):
        for nth in (-1, 0):
            before = torch.get_rng_state()
            with armed(strike(nth)), FlopCounterMode(display=False) as flops, Log() as log:
                output = layer(x)
            assert torch.equal(torch.get_rng_state(), before)
            seen.append((flops.get_total_flops(), log.names, output._version))
    assert seen[0] == seen[1]
    assert kinds() == ["gemm_fault"]


CONTEXTS = {
    "another default device": lambda: torch.device("meta"),
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


@for_each("name", CONTEXTS)
def test_a_repair_does_not_depend_on_the_programs_context(name: str) -> None:
    layer, x = nn.Linear(6, 5), torch.randn(3, 6)
    with CONTEXTS[name]():
        expected = layer(x)
        with holdfast.protect(layer), armed(strike(0)):
            assert torch.equal(layer(x), expected)
    assert kinds() == ["gemm_fault"]


def test_nothing_is_kept_of_a_parameter_that_moved() -> None:
    layer = nn.Linear(6, 5)
    memory = layer.weight.data
    with holdfast.protect(layer):
        layer(torch.randn(3, 6))
        layer.weight.data = torch.randn(5, 6)
    assert native.core.cached_encodings() == 0
    assert memory.shape == (5, 6)

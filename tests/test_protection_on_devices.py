"""When an optimizer asks for the verdicts on products of a device, for which CPU stands in."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from struck import Strike, armed, kinds
from torch import nn

import holdfast
from holdfast.errors import UncorrectableFault
from holdfast_lab.emulation.stand_in import cpu_as_device


@pytest.fixture(autouse=True)
def _device(one_thread: None) -> Iterator[None]:
    with cpu_as_device():
        yield


def batch() -> torch.Tensor:
    """[12, 24], the same every time."""
    return torch.randn(12, 24, generator=torch.Generator().manual_seed(1))


def a_fault(site: str) -> Strike:
    return Strike((3, 5), 1e3, site=site)


def added_layer(model: nn.Sequential) -> list[nn.Parameter]:
    model[1] = nn.Linear(40, 8)
    return list(model[1].parameters())


def trained_input(_: nn.Sequential) -> list[nn.Parameter]:
    return [nn.Parameter(batch())]


@pytest.mark.parametrize("parameters", [added_layer, trained_input])
def test_an_optimizer_of_what_no_protection_knows_refuses_a_wrong_product(
    parameters: Callable[[nn.Sequential], list[nn.Parameter]],
) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    with holdfast.protect(model):
        given = parameters(model)
        before = [each.detach().clone() for each in given]
        optimizer = torch.optim.SGD(given, 0.1)
        inputs = given[0] if parameters is trained_input else batch()
        with armed(a_fault("0/addmm/forward")):
            model(inputs).square().mean().backward()
        with pytest.raises(UncorrectableFault, match="0/addmm/forward"):
            optimizer.step()
        assert all(map(torch.equal, given, before))
        optimizer.step()  # the verdict was given
        assert not any(map(torch.equal, given, before))


def test_an_optimizer_of_another_protected_model_leaves_the_verdict() -> None:
    ours, theirs = nn.Linear(24, 8), nn.Linear(24, 8)
    ours.weight.grad = torch.ones(8, 24)
    with holdfast.protect(ours), holdfast.protect(theirs) as other:
        with armed(a_fault("addmm/forward")):
            theirs(batch())
        torch.optim.SGD(ours.parameters(), 0.1).step()
        with pytest.raises(UncorrectableFault):
            other.check()


def test_a_wrong_product_in_the_closure_of_a_step_is_raised_as_the_step_ends() -> None:
    model = nn.Linear(24, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch()).square().mean()
        loss.backward()
        return loss

    with holdfast.protect(model):
        with armed(a_fault("addmm/forward")), pytest.raises(UncorrectableFault):
            optimizer.step(closure)
        optimizer.step(closure)


def test_a_wrong_product_of_the_optimizer_itself_is_not_left_to_the_next_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(24, 8, bias=False)
    guard = holdfast.Guard(model, torch.optim.Muon(model.parameters(), 0.01))

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    with holdfast.protect(model):
        guard.step(forward_backward, batch())
        fault = Strike((3, 5), lambda old: old + 0.1, site="(outside)/mm/forward")
        with armed(fault), pytest.raises(UncorrectableFault, match=r"\(outside\)/mm"):
            guard.step(forward_backward, batch())
        assert kinds() == ["gemm_fault"]


LEDGER_OF_A_NEW_PROCESS = """
import torch
import holdfast
from holdfast.abft.gemm.interception import interception
from holdfast.errors import UncorrectableFault
from holdfast_lab.emulation.stand_in import CPU, cpu_as_device

model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
with cpu_as_device(), holdfast.protect(model) as protection:
    with torch.inference_mode():
        model(x)
    ledger, _ = interception().ledger(CPU)
    assert not ledger.is_inference()
    c = x @ x.T
    for module in range(1, 1 << 14):  # of other models
        torch.ops.holdfast.verdict(c, x, x.T, None, 1, 1, module, "mm", 0, 0)
    ledger, sites = interception().ledger(CPU)
    assert len(ledger) == len(sites) == 1 << 14
    model(x).sum().backward()  # its gradients have no slot of their own
    ledger[-1] = 2**30
    try:
        protection.check()
    except UncorrectableFault:
        print("refused")
"""


@pytest.mark.processes
@pytest.mark.usefixtures("forked_python")
def test_a_ledger_begun_in_inference_mode_is_cleared_and_a_full_one_concerns_every_model() -> None:
    command = [sys.executable, "-c", LEDGER_OF_A_NEW_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "refused", done.stderr

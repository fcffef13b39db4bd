"""A training step whose products the kernels verify, from the interception to the repetition.

CPU stands in as the device, and the launches of the native core run in Triton's interpreter.
"""

# First, as it skips this file where Triton cannot run.
import triton_device  # noqa: F401  # isort: skip

from collections.abc import Iterator

import pytest
import torch
from interpreted_driver import Interpreter, core, interpreting
from struck import kinds
from torch import nn
from triton_device import CUDA, MARKS

import holdfast
from holdfast import events
from holdfast.abft.gemm import self_test
from holdfast.abft.gemm.self_test import failure
from holdfast.digest.tensors import tensors_digest
from holdfast.inject import Fault, Injector
from holdfast_lab.emulation.stand_in import CPU, cpu_as_device

pytestmark = [
    *MARKS,
    pytest.mark.skipif(core is None, reason="the native core is not built"),
    pytest.mark.skipif(CUDA, reason="tests/test_gpu.py trains on the device itself"),
]

SITES = [
    *("0/addmm/forward", "0/addmm/grad_b"),
    *("2/addmm/forward", "2/addmm/grad_a", "2/addmm/grad_b"),
]


@pytest.fixture
def launches() -> Iterator[Interpreter]:
    with interpreting() as interpreter, cpu_as_device("kernels"):
        yield interpreter


def trained(faults: list[Fault]) -> str:
    """Train one step for each site, and a last one; return the digest of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8))
    x = torch.randn(12, 24)
    guard = holdfast.Guard(model, torch.optim.SGD(model.parameters(), 0.1))

    def forward_backward(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with holdfast.protect(model):
        for step in range(len(SITES) + 1):
            due = [fault for fault in faults if fault.step == step]
            with Injector(model, due, rank=0).step(step):
                guard.step(forward_backward, x)
    return tensors_digest(list(model.parameters()))


def test_a_fault_in_each_product_of_a_step_is_found_and_the_step_repeated(
    launches: Interpreter,
) -> None:
    calm = trained([])
    assert events.recent() == []
    # One launch for each product, and one for each weight and view that is encoded.
    launched = len(launches.launches)
    assert launched >= (len(SITES) + 1) * len(SITES)
    storm = [Fault(step, 0, "bitflip", op=op, bit=29) for step, op in enumerate(SITES)]
    assert trained(storm) == calm
    assert kinds() == ["injected", "gemm_fault", "rerun"] * len(SITES)


def test_the_known_answer_test_passes(
    launches: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "SIZES", (33, 70, 40))  # as the interpreter is slow
    assert failure(CPU, "kernels") == ""
    assert launches.launches

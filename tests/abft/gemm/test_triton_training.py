"""A training step whose products the kernels verify, from the interception to the repetition.

CPU stands in as the device, and the launches of the native core run in Triton's interpreter.
"""

# First, as it skips this file where Triton cannot run.
import triton_device  # noqa: F401  # isort: skip

from collections.abc import Iterator

import pytest
import torch
from device_stand_in import slots, verdicts
from interpreted_driver import Interpreter, core, interpreting
from struck import Strike, kinds
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
    *("2/mm/forward", "2/mm/grad_a", "2/mm/grad_b"),
]


@pytest.fixture
def launches() -> Iterator[Interpreter]:
    with interpreting() as interpreter, cpu_as_device("kernels"):
        yield interpreter


def trained(faults: list[Fault]) -> str:
    """Train one step for each site, and a last one; return the digest of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8, bias=False))
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


def test_verdicts_without_a_bias_are_those_of_checks_that_share_nothing() -> None:
    found = []
    with interpreting() as interpreter:
        for shared in (True, False):
            hook = Strike((3, 2), lambda old: old + 100, site="grad_a")
            found.append(verdicts("kernels", torch.bfloat16, hook, shared=shared))
        turned = [launch.request.variant.turned for launch in interpreter.launches]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert [ratio > 1 for ratio in found[0]] == [False, False, True]
    assert sum(turned) == 1


def test_the_known_answer_test_passes(
    launches: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "SIZES", (33, 70, 40))  # as the interpreter is slow
    assert failure(CPU, "kernels") == ""
    assert launches.launches


def test_a_check_of_compiled_code_hands_on_the_encoding_of_what_it_reads(
    launches: Interpreter,
) -> None:
    torch.manual_seed(0)
    x, w, dy = torch.randn(13, 24), torch.randn(24, 8), torch.randn(13, 8)
    site = 0, "mm", 0
    with holdfast.protect(nn.Linear(2, 2)):
        made = torch.ops.holdfast.verdict_and_encoding(x @ w, x, w, None, 1, 1, *site, 0)
        for vector, expected in zip(made, core.kernel_encode(x), strict=True):
            assert torch.equal(vector[:13], expected[0])
        first, second = (dy @ w.T, dy, w.T), (dy.T @ x, dy.T, x)
        launches.launches.clear()
        for encoding, launched in ((made, 3), (None, 4)):  # the weight, dX and dW; X as well
            torch.ops.holdfast.verdict_of_gradients(
                *first, None, 1, 1, *second, None, 1, 1, *site, encoding
            )
            assert len(launches.launches) == launched
            launches.launches.clear()
        assert max(slots().values()) < 1

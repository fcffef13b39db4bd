"""Snapshots of a state on CUDA devices, whose streams are held up on purpose."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.digest.tensors import state_digest, tensor_digests, tensors_digest
from holdfast.snapshot.client.device_copy import CudaQueue
from holdfast.snapshot.client.snapshots import Snapshots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LATE_CYCLES = 10**9  # half a second on a GPU of 2 GHz
PROMPT_S = 0.1


class CudaRun:
    """Large and small layers, one of them strided, and an optimizer whose state has begun."""

    def __init__(self, run_dir: Path, devices: int = 1) -> None:
        torch.manual_seed(0)
        convolution = nn.Conv2d(3, 64, 5).to(memory_format=torch.channels_last)
        layers = [nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.Linear(2048, 9), convolution]
        self.model = nn.ModuleList(
            layer.to(f"cuda:{n % devices}") for n, layer in enumerate(layers)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.snapshots = Snapshots(self.model, self.optimizer, run_dir=run_dir)
        self.snapshots.begin(0)
        assert self.snapshots.wait_committed() == 0  # memory is registered, kernels are compiled

    def digest(self) -> str:
        torch.cuda.synchronize()
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])


@pytest.fixture
def run(run_dir: Path) -> Iterator[CudaRun]:
    run = CudaRun(run_dir)
    yield run
    run.snapshots.close(finished=False)


def test_digests_of_a_device_are_those_of_the_host() -> None:
    sizes = [1, 4096, 2**20 + 3, 0, 77]
    held = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    there = [tensor.cuda() for tensor in held]
    assert tensor_digests(there) == tensor_digests(held)
    assert tensors_digest(there) == tensors_digest(held)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
def test_a_copy_waits_for_a_late_step_in_any_stream_and_the_next_step_for_the_copy(
    run: CudaRun, side: bool, marks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.optimizer.step()
    right = run.digest()
    assert run.snapshots.rollback() == 0
    assert run.digest() != right
    if not marks:
        monkeypatch.setattr(CudaQueue, "mark", lambda *_: [])
    stream = torch.cuda.Stream()
    run.snapshots.begin(1)  # what a copy needs for the tensors that were loaded
    assert run.snapshots.wait_committed() == 1
    with torch.cuda.stream(stream):
        torch.cat([torch.ones(2**24, device="cuda")] * 2)  # memory for the other stream
    torch.cuda.synchronize()
    started_s = time.monotonic()
    with torch.cuda.stream(stream) if side else nullcontext():
        torch.cuda._sleep(LATE_CYCLES)
        run.optimizer.step()
    run.snapshots.begin(2)  # in the default stream, which waits for nothing
    with torch.cuda.stream(stream) if side else nullcontext():
        run.optimizer.step()  # without finish(): the optimizer's hook orders it
    assert time.monotonic() - started_s < PROMPT_S, "the host waited for the device"
    assert run.snapshots.wait_committed() == 2
    assert run.digest() != right
    assert run.snapshots.rollback() == 2
    assert (run.digest() == right) == marks


def test_memory_is_registered_with_the_driver_until_the_end(run: CudaRun) -> None:
    slots = run.snapshots._session.slots()
    assert slots
    assert slots[0].is_pinned()
    run.snapshots.close(finished=False)
    run.snapshots._copier._worker.shutdown(wait=True)
    assert not slots[0].is_pinned()


def test_memory_that_is_not_registered_costs_speed_and_nothing_else(
    run: CudaRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.snapshots._copier.queue.register([])
    monkeypatch.setattr(CudaQueue, "register", lambda *_: None)
    run.optimizer.step()
    run.snapshots.begin(1)
    assert run.snapshots.wait_committed() == 1
    right = run.digest()
    run.optimizer.step()
    assert run.snapshots.rollback() == 1
    assert run.digest() == right


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_state_on_several_devices_is_copied_by_a_stream_for_each(run_dir: Path) -> None:
    run = CudaRun(run_dir, devices=2)
    for device in range(2):
        with torch.cuda.device(device):
            torch.cuda._sleep(LATE_CYCLES)
    run.optimizer.step()
    run.snapshots.begin(1)
    run.optimizer.step()
    assert run.snapshots.wait_committed() == 1
    assert len(run.snapshots._copier.queue._copying) == 2
    after = run.digest()
    assert run.snapshots.rollback() == 1
    assert run.digest() != after
    run.optimizer.step()
    assert run.digest() == after
    run.snapshots.close(finished=False)

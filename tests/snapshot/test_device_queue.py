"""The calls that order CUDA streams and register memory, on a CUDA that is not there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from snapshot_trainer import Tiny

from holdfast import events
from holdfast.digest.tensors import tensor_digests
from holdfast.snapshot.client import device_copy
from holdfast.snapshot.client.device_copy import CudaQueue

Calls = list[tuple[Any, ...]]


class Stream:
    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self._calls = name, calls

    def wait_event(self, event: "FakeEvent") -> None:
        self._calls.append(("wait", self.name, event.stream))


class FakeEvent:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that waits for it must not take a core"
        self.reached, self.stream = False, ""

    def record(self, stream: Stream) -> None:
        self.stream = stream.name

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True


class Cuda:
    """What ``CudaQueue`` uses of ``torch.cuda``, which notes the calls."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.capturing, self.refuses = False, False
        self.now: dict[Any, Stream] = {}
        self._own: dict[Any, Stream] = {}

    def stream_of(self, device: Any, name: str) -> Stream:
        return Stream(f"{device} {name}", self.calls)

    def own(self, device: Any) -> Stream:
        return self._own.setdefault(device, self.stream_of(device, "default"))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def copying(device: str) -> Stream:
            return self.stream_of(device, "copy")

        def current(device: str) -> Stream:
            return self.now.get(device, self.own(device))

        def register(address: int, nbytes: int, flags: int) -> int:
            self.calls.append(("register", address, nbytes, flags))
            return 2 * self.refuses

        def unregister(address: int) -> int:
            self.calls.append(("unregister", address))
            return 0

        driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
        for name, value in {
            "Stream": copying,
            "Event": FakeEvent,
            "current_stream": current,
            "default_stream": self.own,
            "stream": self._entered,
            "cudart": lambda: driver,
            "is_current_stream_capturing": lambda: self.capturing,
        }.items():
            patch.setattr(torch.cuda, name, value)

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        self.calls.append(("enter", stream.name))
        yield
        self.calls.append(("leave", stream.name))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    cuda.install(monkeypatch)
    return cuda


def on(*devices: str) -> Any:
    """Tensors on these devices."""
    return [SimpleNamespace(device=device) for device in devices]


def streams(mark: Any) -> set[str]:
    return {event.stream for event in mark}


def test_a_copy_waits_for_the_current_the_default_and_the_optimizers_streams(cuda: Cuda) -> None:
    queue = CudaQueue()
    assert streams(queue.mark(on("gpu0"))) == {"gpu0 default"}
    cuda.now["gpu0"] = cuda.stream_of("gpu0", "optimizer")
    queue.note_streams()
    cuda.now["gpu0"] = cuda.stream_of("gpu0", "side")
    mark = queue.mark(on("gpu0", "gpu0"))
    assert streams(mark) == {"gpu0 default", "gpu0 optimizer", "gpu0 side"}
    with queue.following(mark):
        queue.run(lambda: cuda.calls.append(("copy",)))
        assert streams(queue.marked()) == {"gpu0 copy"}
    waits, rest = cuda.calls[:3], cuda.calls[3:]
    assert sorted(waits) == [("wait", "gpu0 copy", name) for name in sorted(streams(mark))]
    assert rest == [("enter", "gpu0 copy"), ("copy",), ("leave", "gpu0 copy")]
    assert streams(queue.mark(on("gpu0"))) == {"gpu0 default", "gpu0 side"}, "until the next mark"


def test_each_device_has_a_copy_stream(cuda: Cuda) -> None:
    queue = CudaQueue()
    with queue.following(queue.mark(on("gpu0", "gpu1"))):
        assert streams(queue.marked()) == {"gpu0 copy", "gpu1 copy"}
    entered = {call[1] for call in cuda.calls if call[0] == "enter"}
    assert entered == {"gpu0 copy", "gpu1 copy"}


def test_the_optimizers_stream_waits_only_for_what_is_not_done_and_not_in_a_capture(
    cuda: Cuda,
) -> None:
    queue = CudaQueue()
    queue.mark(on("gpu0"))
    cuda.now["gpu0"] = cuda.stream_of("gpu0", "optimizer")
    mark: Any = queue.marked()
    cuda.capturing = True
    queue.hold(mark)
    assert cuda.calls == []
    cuda.capturing = False
    queue.hold(mark)
    assert cuda.calls == [("wait", "gpu0 optimizer", "gpu0 copy")]
    mark[0].reached = True
    queue.hold(mark)
    assert len(cuda.calls) == 1


def test_slots_are_registered_once_and_unregistered_when_they_are_gone(cuda: Cuda) -> None:
    queue = CudaQueue()
    queue.mark(on("gpu0"))
    one, two = torch.zeros(64, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    queue.register([one, two])
    queue.register([two, one])
    registered = {("register", one.data_ptr(), 64, 1), ("register", two.data_ptr(), 128, 1)}
    assert set(cuda.calls) == registered
    assert len(cuda.calls) == 2
    queue.register([two])
    queue.register([])
    gone = [("unregister", one.data_ptr()), ("unregister", two.data_ptr())]
    assert cuda.calls[2:] == gone


def test_memory_that_the_driver_refuses_is_said_once_and_tried_once(
    cuda: Cuda, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, cleared = CudaQueue(), []

    def kernel(*_: Any, device: str) -> None:
        cleared.append(device)
        raise RuntimeError("out of memory: the error that the driver kept")

    monkeypatch.setattr(torch, "ones", kernel)
    queue.mark(on("gpu0"))
    cuda.refuses = True
    slots = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    for _ in range(3):
        queue.register(slots)
    assert [call[0] for call in cuda.calls] == ["register", "register"]
    assert cleared == ["gpu0", "gpu0"]
    (record,) = caplog.records
    assert "64 bytes of a snapshot's memory could not be registered" in record.getMessage()
    queue.register([])
    assert len(cuda.calls) == 2, "what was not registered is not unregistered"


@pytest.mark.processes
@pytest.mark.representative
def test_a_snapshot_goes_through_the_streams_of_cuda_bit_for_bit(
    cuda: Cuda, run: Tiny, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the device: tensors of the host are taken for tensors on a device."""

    def digests(_: CudaQueue, tensors: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        found = [bytes.fromhex(each) for each in tensor_digests(tensors)]
        return lambda: found

    monkeypatch.setattr(device_copy, "is_on_device", lambda tensor: True)
    monkeypatch.setattr(CudaQueue, "digests", digests)
    with run.snapshots(run_dir) as snapshots:
        right = run.train(range(1, 4), snapshots)[3]
        assert snapshots.wait_committed() == 3
        run.train(range(4, 5))
        assert run.digest() != right
        assert snapshots.rollback() == 3
        assert run.digest() == right
        assert events.recent()[-1].kind == "restored"
    registered = [call[1] for call in cuda.calls if call[0] == "register"]
    assert len(registered) == 3, "two clean slots and one in flight"
    snapshots._copier._worker.shutdown(wait=True)
    assert {call[1] for call in cuda.calls if call[0] == "unregister"} == set(registered)
    assert ("wait", "cpu copy", "cpu default") in cuda.calls

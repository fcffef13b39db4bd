"""Copies from a device that works late: ordered behind the optimizer, before the next, compared."""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed_queue import COPY, PATIENCE_S, TRAINER, DelayedQueue
from hypothesis import given
from hypothesis import strategies as st
from snapshot_shares import flat_of, seat_of
from snapshot_trainer import kinds
from snapshot_waits import kill, until
from torch import nn

from holdfast import events
from holdfast.digest.tensors import state_digest, tensor_digest
from holdfast.snapshot.client import device_copy
from holdfast.snapshot.client.copies import ShardedCopy
from holdfast.snapshot.client.device_copy import DeviceCopy
from holdfast.snapshot.client.memory_changes import mend
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout.flat_buffer import aligned
from holdfast.snapshot.layout.manifest import Entry

pytestmark = [pytest.mark.processes, pytest.mark.representative]


class LateOptimizer(torch.optim.SGD):
    """Adds 1 to each of its tensors, by an action of the device each; counted when it is called."""

    queue: DelayedQueue

    def held(self) -> list[torch.Tensor]:
        parameters = self.param_groups[0]["params"]
        return [*parameters, *(self.state[p]["momentum_buffer"] for p in parameters)]

    def step(self, closure: Any = None) -> None:
        for tensor in self.held():
            self.queue.compute(partial(tensor.data.add_, 1.0))  # data has a counter of its own
            torch.autograd.graph.increment_version(tensor)


class LateRun:
    """A model on the device that is not there, and its snapshots."""

    def __init__(self, run_dir: Path) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 8))
        self.model = nn.ParameterList([self.weight, nn.Parameter(torch.randn(16))])
        self.optimizer = LateOptimizer(self.model.parameters(), momentum=0.9)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)
        self.snapshots = Snapshots(self.model, self.optimizer, run_dir=run_dir)
        self.queues: list[DelayedQueue] = []

    def on(self, *arguments: Any, **options: Any) -> DelayedQueue:
        queue = DelayedQueue(*arguments, **options)
        self.snapshots._copier.queue = self.optimizer.queue = queue
        self.queues.append(queue)
        return queue

    def digest(self) -> str:
        return state_digest([self.model.state_dict(), self.optimizer.state_dict()])

    def digest_after(self, steps: int) -> str:
        """The digest of the state that so many steps from here leave."""
        before = [tensor.clone() for tensor in self.optimizer.held()]
        for tensor in self.optimizer.held():
            for _ in range(steps):
                tensor.data.add_(1.0)
        digest = self.digest()
        for tensor, old in zip(self.optimizer.held(), before, strict=True):
            tensor.data.copy_(old)
        return digest


@pytest.fixture
def run(run_dir: Path) -> Iterator[LateRun]:
    run = LateRun(run_dir)
    run.on(TRAINER).go()
    yield run
    run.optimizer.queue.go()
    run.snapshots.close(finished=False)
    for queue in run.queues:
        queue.close()


def begun(run: LateRun, step: int) -> None:
    """Begin a snapshot, and wait until the device has been given all of it."""
    run.snapshots.begin(step)
    assert run.optimizer.queue.begun.wait(PATIENCE_S)


@pytest.mark.parametrize(("marks", "gathered"), [(True, True), (True, False), (False, True)])
def test_a_copy_waits_for_the_optimizers_step_and_without_its_mark_holds_an_older_state(
    run: LateRun, marks: bool, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "GATHERED_BYTES", 2**20 if gathered else 0)
    queue, right = run.on(COPY, marks=marks), run.digest_after(1)
    run.optimizer.step()
    begun(run, 1)
    queue.go()
    assert run.snapshots.wait_committed() == 1
    run.optimizer.step()
    queue.synchronize()
    assert run.digest() != right
    assert run.snapshots.rollback() == 1
    assert (run.digest() == right) == marks, "which no digest and no version counter shows"
    assert kinds() == ["restored"]


@pytest.mark.parametrize(("holds", "finishes"), [(True, True), (True, False), (False, True)])
def test_the_next_step_waits_for_the_copy_and_nobody_for_the_device(
    run: LateRun, holds: bool, finishes: bool
) -> None:
    queue, right = run.on(TRAINER, holds=holds), run.digest_after(1)
    run.optimizer.step()
    begun(run, 1)
    if finishes:
        run.snapshots.finish()
    run.optimizer.step()
    queue.go()
    assert run.snapshots.wait_committed() == 1
    queue.synchronize()
    assert run.digest() != right
    assert run.snapshots.rollback() == 1
    assert (run.digest() == right) == holds


@pytest.mark.parametrize("compares", [True, False])
def test_a_write_that_no_stream_waits_for_is_found_by_the_digests(
    run: LateRun, compares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compares:
        monkeypatch.setattr(DeviceCopy, "differing", lambda self, *_: self.drain() or "")
    queue = run.optimizer.queue
    run.snapshots.begin(1)
    assert run.snapshots.wait_committed() == 1
    first = run.digest()
    run.optimizer.step()
    queue.before_copy = partial(run.weight.data.add_, 1.0)
    run.snapshots.begin(2)
    if not compares:
        assert run.snapshots.wait_committed() == 2
        return
    with pytest.warns(UserWarning, match=r"model.0 was changed .* step 2 was copied"):
        assert run.snapshots.wait_committed() is None
    (event,) = events.recent()
    found = event.kind, event.detector, event.detail["path"]
    assert found == ("snapshot_torn", "digest", "model.0")
    assert run.digest() != first
    assert run.snapshots.rollback() == 1
    assert run.digest() == first


def raising(*_: object) -> None:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("late", [True, False])
def test_a_copy_that_fails_costs_its_snapshot_and_not_the_training(
    run: LateRun, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = run.optimizer.queue
    run.optimizer.step()
    run.snapshots.begin(1)
    assert run.snapshots.wait_committed() == 1
    first, right = run.digest(), run.digest_after(2)
    run.optimizer.step()
    monkeypatch.setattr(queue, "before_copy" if late else "run", raising)
    run.snapshots.begin(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.optimizer.step()
        run.snapshots.begin(3)
    assert ["copy of step 2 from a device failed: an illegal" in str(w.message) for w in said] == [
        True
    ]
    assert run.snapshots.suspended
    assert kinds() == ["snapshots_suspended"]
    queue.synchronize()
    assert run.digest() == right
    monkeypatch.undo()
    assert run.snapshots.rollback() == 1
    assert run.digest() == first
    run.snapshots.begin(2)
    assert run.snapshots.wait_committed() == 2


def test_an_smp_lost_after_the_state_has_changed_costs_the_snapshot(run: LateRun) -> None:
    queue = run.on(TRAINER)
    begun(run, 1)
    run.optimizer.step()
    kill(run.snapshots.status()["pid"])
    queue.go()
    assert run.snapshots.wait_committed() is None
    assert kinds() == ["smp_lost"]
    run.snapshots.begin(2)
    queue.synchronize()
    right = run.digest()
    assert run.snapshots.wait_committed() == 2
    run.optimizer.step()
    queue.synchronize()
    assert run.snapshots.rollback() == 2
    assert run.digest() == right


def test_digests_are_known_before_the_copy_and_a_repair_waits_for_it(
    run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "GATHERED_BYTES", 0)  # a copy of its own for each tensor
    weight, copied, opened = run.weight, list[int](), Event()

    def choose(entries: Any) -> list[int]:
        return [n for n, entry in enumerate(entries) if entry.path == "model.0"]

    def stop_after_the_first() -> None:
        copied.append(len(copied))
        assert copied == [0] or opened.wait(PATIENCE_S)

    run.snapshots.watch(choose, lambda: True)
    run.optimizer.queue.before_copy = stop_after_the_first
    run.snapshots.begin(1)
    copy, right = run.snapshots.copied(1), run.digest()
    assert copy is not None
    assert copy.device is not None
    (index,) = copy.watched
    assert copy.digests[index] == tensor_digest(weight)
    until(lambda: len(copied) > 1, "the first tensor was not copied")
    weight.data[0, 0] += 1
    assert run.digest() != right
    assert not copy.device.copied.is_set()
    Timer(0.05, opened.set).start()
    assert mend(copy, index)
    assert run.digest() == right
    assert run.snapshots.wait_committed() == 1


@pytest.mark.parametrize("marks", [True, False])
def test_a_step_without_a_snapshot_is_digested_behind_the_optimizers_step(
    run: LateRun, marks: bool
) -> None:
    run.snapshots.every = 2
    run.snapshots.watch(lambda entries: list(range(4)), lambda: True)
    queue = run.on(COPY, marks=marks)
    run.optimizer.step()
    run.snapshots.begin(1)
    if not marks:
        run.snapshots.finish()
    queue.go()
    copy = run.snapshots.copied(1)
    queue.synchronize()
    assert copy is not None
    held = [tensor_digest(tensor) for tensor in copy.flat.live[:4]]
    assert (list(copy.digests.values()) == held) == marks


@pytest.mark.parametrize("marks", [True, False])
def test_a_share_of_a_state_is_read_behind_the_optimizers_step(marks: bool) -> None:
    tensor = torch.randn(1000)
    flat = flat_of({"x": tensor})

    def share() -> ShardedCopy:
        return ShardedCopy(1, flat, seat=seat_of(2, 1, 0, 0), parities=1, peers=(0, 1))

    copy, queue = share(), DelayedQueue(COPY, marks=marks)
    queue.compute(partial(tensor.data.add_, 1.0))
    copy.device = DeviceCopy(queue, flat.tensors)
    found, right = (torch.zeros(copy.nbytes, dtype=torch.uint8) for _ in range(2))
    with ThreadPoolExecutor(1) as worker:
        written = worker.submit(copy.write, found)
        if not marks:
            written.result(PATIENCE_S)
        queue.go()
        written.result(PATIENCE_S)
    queue.synchronize()
    share().write(right)
    assert torch.equal(found, right) == marks
    queue.close()


SIZES = st.sampled_from([0, 4, 2**16, 2**20, 3 * 2**20, 5 * 2**20, 2**26])


@given(st.lists(st.tuples(SIZES, st.sampled_from("aaaaab")), min_size=1, max_size=60))
def test_small_neighbours_on_one_device_are_copied_together_and_large_tensors_alone(
    layout: list[tuple[int, str]],
) -> None:
    starts = [0, *accumulate(aligned(nbytes) for nbytes, _ in layout)]
    rows = zip(layout, starts, strict=False)
    entries = [Entry("", "uint8", (n,), device, start, n) for (n, device), start in rows]
    queue: Any = SimpleNamespace(serves=lambda tensor: True, mark=lambda tensors: ())
    pieces = list(DeviceCopy(queue, [torch.empty(0)] * len(entries))._cut(entries))
    assert [index for piece in pieces for index in piece] == list(range(len(entries)))
    for first, *others, last in (piece for piece in pieces if len(piece) > 1):
        held = [entries[index] for index in (first, *others, last)]
        assert len({entry.device for entry in held}) == 1
        assert max(entry.nbytes for entry in held) < device_copy.GATHERED_BYTES
        assert held[-1].offset + held[-1].nbytes - held[0].offset <= 36 * 2**20

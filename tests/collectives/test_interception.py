"""What programs may do with a collective that is watched, in one process."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from holdfast.collectives import interception


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the collectives that have been noted, of a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    interception.install()
    names = list[str]()
    monkeypatch.setattr(interception, "watcher", lambda name, *_: lambda: names.append(name))
    try:
        yield names
    finally:
        dist.destroy_process_group()


def test_a_result_may_be_awaited_after_it_was_noted(noted: list[str]) -> None:
    """C++ holds the collective of a functional one, and waits for it once more."""
    issued = torch.ops._c10d_functional.all_reduce(
        torch.ones(3), "sum", dist.group.WORLD.group_name
    )
    for work in list(interception.pending):
        work.wait()
    assert noted == ["all_reduce"]
    assert torch.ops._c10d_functional.wait_tensor(issued).tolist() == [1.0, 1.0, 1.0]
    assert noted == ["all_reduce"]


def test_a_collective_that_is_polled_is_noted_before_its_result_is_changed(
    noted: list[str],
) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    assert noted == ["all_reduce"]
    assert work.wait()
    assert not interception.pending


def test_a_collective_that_fails_is_not_awaited_again(noted: list[str]) -> None:
    class Failed(dist.Work):
        def wait(self, *timeout: object) -> bool:
            raise RuntimeError("connection closed by peer")

    failed = interception.Awaited(Failed(), [lambda: noted.append("never")])
    with pytest.raises(RuntimeError, match="closed by peer"):
        failed.wait()
    assert failed not in interception.pending
    assert noted == []

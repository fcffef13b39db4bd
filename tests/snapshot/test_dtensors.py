"""Models divided among ranks: their snapshots hold each rank's shard, and go back bit for bit."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from dtensor_trainer import Run, every_optimizer, train
from gloo_ranks import Ranks
from snapshot_waits import PATIENCE_S
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from holdfast import events
from holdfast.errors import ConfigError
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout import dtensors, flat_buffer

pytestmark = pytest.mark.processes

STEPS, HANGS_AT = 7, 4


def said_of(said: list[dict[str, Any]], word: str) -> dict[int, Any]:
    return {line["step"]: line[word] for line in said if "step" in line}


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param("fsdp", 3, marks=pytest.mark.representative),
        ("hsdp", 4),
        ("tensor_parallel", 2),
        ("both", 4),
    ],
)
def test_all_ranks_killed_the_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, run_dir: Path, layout: str, ranks: int
) -> None:
    healthy = Ranks(tmp_path / "healthy", ranks, train, tmp_path / "quiet", layout, STEPS)
    undisturbed = healthy.finished()
    first = Ranks(tmp_path / "first", ranks, train, run_dir, layout, STEPS, HANGS_AT)
    first.until(
        lambda: all(HANGS_AT in said_of(said, "loss") for said in first.heard()),
        "no step at which to kill",
    )
    first.kill_trainers()
    resumed = Ranks(tmp_path / "second", ranks, train, run_dir, layout, STEPS).finished()
    starts = {said[0]["start"] for said in resumed}
    assert len(starts) == 1
    start = starts.pop()
    assert start in (HANGS_AT - 1, HANGS_AT)
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after[0]["before"] != after[0]["digest"] == said_of(before, "digest")[start]
        for word in ("digest", "loss"):
            wanted = {s: value for s, value in said_of(before, word).items() if s > start}
            assert said_of(after, word) == wanted
        assert (before[-1]["events"], after[-1]["events"]) == ([], ["restored"])


def test_every_optimizer_of_torch_that_knows_dtensors(tmp_path: Path) -> None:
    names = ["SGD", "Adagrad", "NAdam", "Adamax", "ASGD", "RMSprop", "Adadelta", "RAdam"]
    ranks = Ranks(tmp_path / "ranks", 3, every_optimizer, tmp_path / "runs", names)
    for said in ranks.finished():
        found = {line["name"]: line["equal"] for line in said}
        assert found == {name: [True, True] for name in names}


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


# What changes a shard, by name.
CHANGES: dict[str, Callable[[Run], object]] = {
    "optimizer": lambda run: run.optimizer.step(),
    "parameter": lambda run: run.net.up.weight.mul_(2),
    "local tensor": lambda run: run.net.up.weight.to_local().mul_(2),
    "state": lambda run: run.optimizer.state[run.net.up.bias]["exp_avg"].mul_(2),
    "local state": lambda run: run.optimizer.state[run.net.up.bias]["exp_avg"].to_local().mul_(2),
}


def changed_while_copied(
    run: Run, snapshots: Snapshots, change: Callable[[Run], object], patch: pytest.MonkeyPatch
) -> str:
    """Begin a snapshot that copies nothing before the change is made; the state it is to hold."""
    made, copy_tensors = Event(), flat_buffer.copy_tensors

    def wait_and_copy(*arguments: Any) -> Any:
        assert made.wait(PATIENCE_S)
        return copy_tensors(*arguments)

    before = run.digest()
    with patch.context() as patched:
        patched.setattr(flat_buffer, "copy_tensors", wait_and_copy)
        snapshots.begin((snapshots.step or 0) + 1)
        with torch.no_grad():
            change(run)
        made.set()
        snapshots.finish()
    return before


@pytest.mark.representative
@pytest.mark.parametrize("name", CHANGES)
def test_a_shard_that_changes_while_it_is_copied_is_seen(
    run_dir: Path, alone: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("fsdp")
    run.step()
    run.forward_backward()
    with run.snapshots(run_dir) as snapshots:
        changed_while_copied(run, snapshots, lambda run: None, monkeypatch)
        assert snapshots.wait_committed() == 1
        changed_while_copied(run, snapshots, CHANGES[name], monkeypatch)
        assert snapshots.wait_committed() is None
        assert [event.kind for event in events.recent()] == ["snapshot_torn"]
        # Without the watch, what changed gets into the snapshot.
        monkeypatch.setattr(flat_buffer, "versions", lambda flat: [0] * len(flat.tensors))
        before = changed_while_copied(run, snapshots, CHANGES[name], monkeypatch)
        assert snapshots.wait_committed() == 3
        assert snapshots.restore() == 3
        assert run.digest() != before


@pytest.mark.representative
def test_a_sum_that_is_not_reduced_yet_is_refused(run_dir: Path, alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ConfigError, match=r"'x.y' is a DTensor .*Partial.*redistribute it before"):
        flat_buffer.flatten({"x": {"y": pending}})


@pytest.mark.representative
def test_what_is_laid_out_alike_is_described_once(alone: None) -> None:
    run = Run("fsdp")
    run.step()
    flat = flat_buffer.flatten({"m": run.net.state_dict(), "o": run.optimizer.state_dict()})
    references: list[Any] = list(flat.skeleton["m"].values())  # type: ignore[index]
    shards = [ref for ref in references if isinstance(ref, flat_buffer.ShardRef)]
    found = {id(ref.sharding) for ref in shards}
    assert len(found) < len(shards)
    tied = {flat.skeleton["m"][f"{name}.weight"].index for name in ("embed", "head")}  # type: ignore[index]
    assert len(tied) == 1
    assert dtensors.is_dtensor(run.net.up.weight)
    assert not dtensors.is_dtensor(dtensors.local_of(run.net.up.weight))

"""Models divided among ranks: their snapshots hold each rank's shard, and go back bit for bit."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from dtensor_trainer import Run, every_optimizer, restore, train
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
    first.until(lambda said: HANGS_AT in said_of(said, "loss"), "the step at which to kill")
    first.kill()
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


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "ranks", "entry", "sides"),
    [
        (
            "fsdp",
            "tensor_parallel",
            2,
            "model entry 'embed.weight'",
            [
                r"the part at \[.*\] of \[7, 6\], Shard\(0\) on mesh \(0=2\) of ranks 0, 1",
                r"this run has all of \[7, 6\]",
            ],
        ),
        (
            "hsdp",
            "whole",
            4,
            "model entry 'scale'",
            [
                r"the snapshot has all of \[3\]",
                r"part at .* of \[3\], Shard\(0\) on mesh \(0=4\) of ranks 0 to 3",
            ],
        ),
    ],
)
def test_another_mesh_is_refused_and_both_layouts_are_named(
    tmp_path: Path,
    run_dir: Path,
    held: Any,
    saved_as: str,
    loaded_as: str,
    ranks: int,
    entry: str,
    sides: list[str],
) -> None:
    held(ranks, saved_as, 1)
    for said in Ranks(tmp_path / "other", ranks, restore, run_dir, loaded_as).finished():
        assert said[0]["before"] == said[0]["after"]
        assert said[0]["error"].startswith(entry)
        for pattern in [*sides, "export --format dcp"]:
            assert re.search(pattern, said[0]["error"]), said[0]["error"]


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


def through_the_optimizer(run: Run) -> None:
    run.optimizer.step()


def through_a_parameter(run: Run) -> None:
    with torch.no_grad():
        run.net.up.weight.mul_(2)


def through_its_local_tensor(run: Run) -> None:
    with torch.no_grad():
        run.net.up.weight.to_local().mul_(2)


def through_the_state(run: Run) -> None:
    run.optimizer.state[run.net.up.bias]["exp_avg"].mul_(2)


def through_the_local_state(run: Run) -> None:
    with torch.no_grad():
        run.optimizer.state[run.net.up.bias]["exp_avg"].to_local().mul_(2)


CHANGES = [
    through_the_optimizer,
    through_a_parameter,
    through_its_local_tensor,
    through_the_state,
    through_the_local_state,
]


def changed_while_copied(
    run: Run, snapshots: Snapshots, change: Any, patch: pytest.MonkeyPatch
) -> str:
    """Begin a snapshot that copies nothing before the change is made; the state it is to hold."""
    made, copy_tensors = Event(), flat_buffer.copy_tensors

    def wait_and_copy(*arguments: Any) -> Any:
        assert made.wait(PATIENCE_S)
        return copy_tensors(*arguments)

    patch.setattr(flat_buffer, "copy_tensors", wait_and_copy)
    before = run.digest()
    snapshots.begin(1)
    if change is not None:
        change(run)
    made.set()
    return before


@pytest.mark.representative
@pytest.mark.parametrize("change", [None, *CHANGES])
def test_a_shard_that_changes_while_it_is_copied_is_seen(
    run_dir: Path, alone: None, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("fsdp")
    run.step()
    run.forward_backward()
    with run.snapshots(run_dir) as snapshots:
        changed_while_copied(run, snapshots, change, monkeypatch)
        assert snapshots.wait_committed() == (None if change else 1)
        torn = [event.detail["path"] for event in events.recent() if event.kind == "snapshot_torn"]
        assert len(torn) == (change is not None)


@pytest.mark.representative
@pytest.mark.parametrize("change", CHANGES)
def test_without_the_watch_what_changed_gets_into_the_snapshot(
    run_dir: Path, alone: None, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_buffer, "versions", lambda flat: [0] * len(flat.tensors))
    run = Run("fsdp")
    run.step()
    run.forward_backward()
    with run.snapshots(run_dir) as snapshots:
        before = changed_while_copied(run, snapshots, change, monkeypatch)
        assert snapshots.wait_committed() == 1
        assert snapshots.restore() == 1
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

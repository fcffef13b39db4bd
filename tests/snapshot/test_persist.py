"""Rung 5 with real processes: what is on disk whatever dies, and what is restored from there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_disk import lose_smp, told
from snapshot_memory import flip_a_bit, slot_file
from snapshot_trainer import Tiny, kinds, other_model
from snapshot_waits import together, until

from holdfast import events
from holdfast.errors import SnapshotError, SnapshotLost, SnapshotMismatch
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints

pytestmark = pytest.mark.processes

EVERY = 10


@pytest.fixture
def snapshots(run: Tiny, run_dir: Path, disk: Checkpoints) -> Iterator[Snapshots]:
    with run.snapshots(run_dir, persist_dir=disk.folder, persist_every=EVERY) as snapshots:
        yield snapshots


def flip(path: Path, at: int = -1) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def persisted_twice(run: Tiny, snapshots: Snapshots) -> dict[int, str]:
    """Train to step 4 with checkpoints of steps 2 and 4, and lose the memory; digests by step."""
    digests = run.train(range(1, 3), snapshots)
    snapshots.persist()
    digests |= run.train(range(3, 5), snapshots)
    snapshots.persist()
    lose_smp(snapshots)
    return digests


@pytest.mark.representative
def test_the_steps_of_the_interval_and_the_demanded_one_are_on_disk_and_come_back(
    snapshots: Snapshots, run: Tiny, run_dir: Path, disk: Checkpoints
) -> None:
    digests = run.train(range(1, EVERY + 1), snapshots)
    snapshots.wait_committed()
    until(lambda: disk.steps() == [EVERY], "the interval's step is on disk")
    digests |= run.train(range(EVERY + 1, EVERY + 5), snapshots)
    assert snapshots.persist() == disk.path(EVERY + 4)
    assert snapshots.persist() == disk.path(EVERY + 4)
    ahead = run.train(range(EVERY + 5, EVERY + 8), snapshots)
    snapshots.wait_committed()
    assert snapshots.restore() == EVERY + 7  # memory is preferred
    lose_smp(snapshots)
    other = Tiny(seed=1)
    assert other.digest() != digests[EVERY + 4]
    with other.snapshots(run_dir, persist_dir=disk.folder, persist_every=EVERY) as later:
        assert later.restore() == later.step == later.committed_step == EVERY + 4
        assert other.digest() == digests[EVERY + 4]
        assert other.train(range(EVERY + 5, EVERY + 8)) == ahead
        assert later.rollback() == EVERY + 4
        assert other.digest() == digests[EVERY + 4]
    sources = [event.detail["source"] for event in events.recent() if event.kind == "restored"]
    assert sources == ["memory", "disk", "memory"]
    assert [event.rung for event in events.recent()][1:] == ["reload", "rollback"]


@pytest.mark.representative
def test_damaged_checkpoints_are_passed_over_recorded_and_not_tried_again(
    snapshots: Snapshots, run: Tiny, run_dir: Path, disk: Checkpoints
) -> None:
    digests = persisted_twice(run, snapshots)
    assert disk.steps() == [2, 4]
    flip(disk.path(4) / "rank-0.safetensors")
    other = Tiny(seed=1)
    first = other.snapshots(run_dir, persist_dir=disk.folder)
    assert first.restore() == 2
    assert other.digest() == digests[2]
    assert kinds() == ["snapshot_corrupt", "restored"]
    assert events.recent()[0].detail["source"] == "disk"
    assert (disk.steps(), (disk.folder / "damaged-step-4").is_dir()) == ([2], True)
    lose_smp(first)
    flip(disk.path(2) / "rank-0.manifest")
    with (
        other.snapshots(run_dir, persist_dir=disk.folder) as second,
        pytest.raises(SnapshotLost, match="damaged-step-2, damaged-step-4"),
    ):
        second.restore()
    assert kinds()[2:] == ["snapshot_corrupt"]


@pytest.mark.representative
def test_a_step_that_rotted_in_memory_is_not_persisted_but_the_older_one_is(
    snapshots: Snapshots, run: Tiny, run_dir: Path, disk: Checkpoints
) -> None:
    digests = run.train(range(1, 5), snapshots)
    snapshots.wait_committed()
    flip_a_bit(slot_file(snapshots.status(), 4))
    with pytest.raises(SnapshotError, match="step 4 is damaged in memory"):
        snapshots.persist()
    until(lambda: disk.steps() == [3], "the older step is on disk")
    (event,) = told(run_dir, "snapshot_corrupt")
    assert (event.detail["step"], event.detail["source"]) == (4, "memory")
    flip_a_bit(slot_file(snapshots.status(), 3))
    with pytest.raises(SnapshotLost):
        snapshots.rollback()
    assert snapshots.restore() == 3
    assert run.digest() == digests[3]


def test_a_checkpoint_that_another_rank_puts_aside_meanwhile_is_passed_over(
    snapshots: Snapshots,
    run: Tiny,
    run_dir: Path,
    disk: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = persisted_twice(run, snapshots)
    fetch = Checkpoints.fetch

    def put_aside(self: Checkpoints, step: int) -> None:
        """Fetch a step that is gone before it is read."""
        fetch(self, step)
        if step == 4:
            self.path(step).rename(self.folder / "damaged-step-4")

    monkeypatch.setattr(Checkpoints, "fetch", put_aside)
    other = Tiny(seed=1)
    with other.snapshots(run_dir, persist_dir=disk.folder) as later:
        assert later.restore() == 2
        assert other.digest() == digests[2]
    (event,) = (each for each in events.recent() if each.kind == "snapshot_corrupt")
    assert "is gone: another rank has found it damaged" in event.detail["reason"]


def test_a_run_of_another_size_or_model_is_told_and_changes_nothing(
    snapshots: Snapshots,
    run: Tiny,
    run_dir: Path,
    disk: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run.train(range(1, 3), snapshots)
    snapshots.persist()
    lose_smp(snapshots)
    other = other_model()
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = other.digest()
    with other.snapshots(run_dir, persist_dir=disk.folder) as later:
        with pytest.raises(SnapshotMismatch, match=r"\[17, 8\]"):
            later.restore()
        assert other.digest() == before
    index = disk.path(2) / "checkpoint.json"
    content = persist_format.read_index(disk.path(2))
    index.unlink()
    persist_format.write_index(disk.path(2), 2, 3, content["ranks"])
    with other.snapshots(run_dir, persist_dir=disk.folder) as later:
        with pytest.raises(SnapshotMismatch, match=r"\[17, 8\]"):
            later.restore()
        assert other.digest() == before
    assert disk.steps() == [2]


def test_back_from_memory_behind_a_checkpoint_it_is_void_and_the_way_is_free(
    snapshots: Snapshots, run: Tiny, disk: Checkpoints
) -> None:
    digests = run.train(range(1, 4), snapshots)
    assert snapshots.persist() == disk.path(3)
    flip_a_bit(slot_file(snapshots.status(), 3))
    assert snapshots.restore() == 2
    assert (run.digest(), disk.steps()) == (digests[2], [])
    assert (disk.folder / "rolled-back-step-3").is_dir()
    torch.manual_seed(7)  # another step 3 than before
    assert run.train(range(3, 4), snapshots)[3] != digests[3]
    assert snapshots.persist() == disk.path(3)
    assert disk.steps() == [3]


def test_two_ranks_go_back_to_the_step_that_both_have_intact(pair: Any, disk: Checkpoints) -> None:
    options = {"persist_dir": disk.folder, "persist_keep": 3}
    ranks, digests = pair(**options), {}
    for step in (1, 2, 3):
        for run, snapshots in ranks:
            run.train(range(step, step + 1))
            snapshots.begin(step)
        digests[step] = [run.model_digest() for run, _ in ranks]
        assert together(*(s.persist for _, s in ranks)) == [disk.path(step)] * 2
    ranks[0][1].close(finished=False)
    lose_smp(ranks[1][1])
    flip(disk.path(3) / "rank-1.safetensors")
    flip(disk.path(2) / "rank-0.safetensors")
    ranks = pair(seed=5, **options)
    # A rank says which rank it is when it looks for its own file.
    assert [snapshots._session.rank for _, snapshots in ranks] == [0, 1]
    assert [run.model_digest() for run, _ in ranks] != digests[1]
    assert together(*(snapshots.restore for _, snapshots in ranks)) == [1, 1]
    assert [run.model_digest() for run, _ in ranks] == digests[1]
    assert disk.steps() == [1]

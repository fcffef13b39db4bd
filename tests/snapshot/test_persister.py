"""The persister killed, stopped, and without room, while training goes on."""

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from snapshot_disk import lose_smp, told
from snapshot_waits import until

from holdfast.digest.tensors import state_digest
from holdfast.errors import SnapshotError
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints

pytestmark = pytest.mark.processes

EVERY = 10


class Heavy:
    """A model whose checkpoint takes long enough to be interrupted."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4096, 2048, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters())

    def snapshots(self, run_dir: Path, disk: Checkpoints) -> Snapshots:
        options: dict[str, Any] = {"persist_dir": disk.folder, "persist_every": EVERY}
        return Snapshots(self.model, self.optimizer, run_dir=run_dir, **options)

    def train(self, steps: range, snapshots: Snapshots) -> None:
        for step in steps:
            snapshots.finish()
            with torch.no_grad():
                self.model.weight[0] = step
            snapshots.begin(step)
        snapshots.wait_committed()

    def digest(self) -> str:
        return state_digest(self.model.state_dict())


def drafts(disk: Checkpoints) -> list[Path]:
    return list(disk.folder.glob(".writing-step-*/*.safetensors"))


@pytest.mark.representative
def test_a_persister_killed_while_it_writes_leaves_nothing_and_is_replaced(
    run_dir: Path, disk: Checkpoints
) -> None:
    heavy = Heavy()
    with heavy.snapshots(run_dir, disk) as snapshots:
        heavy.train(range(1, EVERY + 1), snapshots)
        pid = snapshots.status()["persister"]["pid"]
        until(lambda: drafts(disk), "the persister writes")
        psutil.Process(pid).kill()
        assert disk.steps() == []
        until(lambda: not snapshots.status()["leased"], "its step is given back")
        heavy.train(range(EVERY + 1, EVERY + 3), snapshots)
        digest = heavy.digest()
        assert snapshots.persist() == disk.path(EVERY + 2)
        assert snapshots.status()["persister"]["restarts"] == 1
        assert drafts(disk) == []
        assert persist_format.damage_of(disk.path(EVERY + 2)) == ""
        lose_smp(snapshots)
        other = Heavy()
        with other.snapshots(run_dir, disk) as later:
            assert other.digest() != digest
            assert later.restore() == EVERY + 2
            assert other.digest() == digest


def test_a_storage_that_hangs_holds_up_no_snapshot_and_is_reported(
    run_dir: Path, disk: Checkpoints
) -> None:
    heavy = Heavy()
    with heavy.snapshots(run_dir, disk) as snapshots:
        heavy.train(range(1, EVERY + 1), snapshots)
        until(lambda: drafts(disk), "the persister writes")
        persister = psutil.Process(snapshots.status()["persister"]["pid"])
        persister.suspend()
        try:
            before = snapshots.commits
            heavy.train(range(EVERY + 1, 2 * EVERY + 3), snapshots)
            status = snapshots.status()
            assert snapshots.commits == before + EVERY + 2
            assert status["leased"] == [EVERY]
            assert status["slots"][0].count("retired") == 1
            assert disk.steps() == []
        finally:
            persister.resume()
        until(lambda: disk.steps() == [EVERY, 2 * EVERY + 2], "both are on disk")
        assert told(run_dir, "persist_slow")[0].detail["step"] == EVERY
        assert persist_format.damage_of(disk.path(EVERY)) == ""


def test_a_full_disk_is_reported_training_goes_on_and_the_next_one_succeeds(
    run_dir: Path, disk: Checkpoints
) -> None:
    heavy = Heavy()
    with heavy.snapshots(run_dir, disk) as snapshots:
        until(lambda: snapshots.status()["readers"], "the persister is there")
        pid = snapshots.status()["persister"]["pid"]
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**20, unlimited[1]))
        heavy.train(range(1, EVERY + 1), snapshots)
        until(lambda: told(run_dir, "persist_failed"), "the failure is reported")
        with pytest.raises(SnapshotError, match="step 10 was not persisted: cannot write"):
            snapshots.persist()
        assert (disk.steps(), drafts(disk)) == ([], [])
        assert told(run_dir, "persist_failed")[0].detail["step"] == EVERY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        heavy.train(range(EVERY + 1, 2 * EVERY + 1), snapshots)
        until(lambda: disk.steps() == [2 * EVERY], "the next one is on disk")
        until(lambda: snapshots.status()["persist_failed"] is None, "the failure is forgotten")
        assert snapshots.status()["persister"]["pid"] == pid

"""Whose snapshots these are: a restarted run finds its own, another experiment is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from case_loops import for_each
from snapshot_disk import lose_smp, told
from snapshot_trainer import Tiny, kinds
from snapshot_waits import until

from holdfast.errors import SnapshotError, SnapshotLost, SnapshotMismatch
from holdfast.snapshot.client.ownership import RunFiles
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.layout.identity import _JOB_VARIABLES, RunIdentity

processes = pytest.mark.processes

STEPS = 3


def other_rate() -> Tiny:
    """Return another experiment: the same shapes and names, and another learning rate."""
    other = Tiny(seed=1)
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=3e-4)
    other.scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    return other


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    # A launcher that an earlier test called in this process has left its job's name there.
    for name in _JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def killed(run: Tiny, run_dir: Path, **options: Any) -> dict[int, str]:
    """Train, and end as a killed trainer does: its SMP holds the last step."""
    snapshots = run.snapshots(run_dir, **options)
    digests = run.train(range(1, STEPS + 1), snapshots)
    snapshots.wait_committed()
    snapshots.close(finished=False)
    return digests


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process be started as a script with other arguments."""
    # A worker of the test runner has no script, and so no command line that could differ.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    return lambda *words: monkeypatch.setattr(sys, "argv", ["train.py", *words])


@processes
@pytest.mark.representative
def test_the_same_program_continues_and_another_learning_rate_is_refused_with_remedies(
    run: Tiny, run_dir: Path
) -> None:
    digests = killed(run, run_dir)
    other = other_rate()
    before = other.digest()
    with other.snapshots(run_dir) as snapshots:
        with pytest.raises(SnapshotMismatch) as refused:
            snapshots.restore()
        snapshots.close(finished=False)
    assert other.digest() == before
    for part in ("lr=0.01", "lr=0.0003", "run_id='", "HOLDFAST_RUN_ID", "run_dir", "fresh=True"):
        assert part in str(refused.value)
    again = Tiny(seed=1)
    with again.snapshots(run_dir) as snapshots:
        assert snapshots.restore() == STEPS
        assert again.digest() == digests[STEPS]


@processes
def test_other_arguments_are_another_run_until_its_id_is_given(
    run: Tiny, run_dir: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("--seed", "1")
    digests = killed(run, run_dir)
    program("--seed", "2")
    other = Tiny(seed=1)
    first = other.snapshots(run_dir)
    with pytest.raises(SnapshotMismatch, match=r"was '.*--seed 1' and is '.*--seed 2' now") as said:
        first.restore()
    first.close(finished=False)
    run_id = str(said.value).split("run_id='")[1].split("'")[0]
    monkeypatch.setenv("HOLDFAST_RUN_ID", "another")
    second = other.snapshots(run_dir)
    with pytest.raises(SnapshotMismatch, match=f"its run_id is '{run_id}'"):
        second.restore()
    second.close(finished=False)
    monkeypatch.setenv("HOLDFAST_RUN_ID", run_id)
    with other.snapshots(run_dir) as third:
        assert third.restore() == STEPS
        assert (other.digest(), third.run_id) == (digests[STEPS], run_id)


@processes
def test_fresh_gives_up_memory_and_sets_checkpoints_aside(
    run: Tiny, run_dir: Path, disk: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"persist_dir": disk.folder, "fresh": True}
    with run.snapshots(run_dir, persist_dir=disk.folder) as snapshots:
        run.train(range(1, STEPS + 1), snapshots)
        snapshots.persist()
        first = snapshots.run_id
        snapshots.close(finished=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = Tiny(seed=1)
    with restarted.snapshots(run_dir, **options) as snapshots:
        assert snapshots.restore() == STEPS, "a restarted run keeps its own work"
        snapshots.close(finished=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    other = other_rate()
    before = other.digest()
    with other.snapshots(run_dir, **options) as snapshots:
        assert snapshots.restore() is None
        assert (other.digest(), disk.steps()) == (before, [])
        assert [path.name.split("-")[:2] for path in disk.folder.glob("set-aside-*")]
        digests = other.train(range(1, 3), snapshots)
        assert snapshots.wait_committed() == 2
        assert snapshots.run_id != first
        assert snapshots.persist() == disk.path(2)
        other.train(range(3, 4))
        assert snapshots.rollback() == 2
        assert other.digest() == digests[2]
    assert "snapshots_lost" not in kinds()


@processes
@pytest.mark.representative
def test_a_persist_dir_of_another_run_is_neither_read_nor_written(
    run: Tiny, tmp_path: Path, run_dir: Path, disk: Checkpoints
) -> None:
    with run.snapshots(run_dir, persist_dir=disk.folder) as first:
        run.train(range(1, STEPS + 1), first)
        first.persist()
        owner = first.run_id
    held = persist_format.read_index(disk.path(STEPS))
    assert held["run"]["id"] == owner
    other = other_rate()
    before = other.digest()
    elsewhere = tmp_path / "elsewhere"
    with other.snapshots(elsewhere, persist_dir=disk.folder, persist_every=2) as second:
        with pytest.raises(SnapshotMismatch, match=r"another run.*lr=0\.01.*lr=0\.0003"):
            second.restore()
        assert other.digest() == before
        with pytest.warns(RuntimeWarning, match="give this run its own persist_dir"):
            other.train(range(1, STEPS + 5), second)
        second.wait_committed()
        until(lambda: second.status()["persist_failed"], "nothing is written")
        with pytest.raises(SnapshotError, match=r"holds checkpoints of run .*persist_dir"):
            second.persist()
    assert disk.steps() == [STEPS]
    assert persist_format.read_index(disk.path(STEPS)) == held
    assert told(elsewhere, "persist_failed")
    assert kinds().count("persist_failed") == 1


@processes
def test_states_of_releases_without_identities_are_accepted_with_a_warning(
    run: Tiny, run_dir: Path, disk: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr("holdfast.snapshot.layout.identity.KEY", "unknown")
        with run.snapshots(run_dir, persist_dir=disk.folder) as first:
            digests = run.train(range(1, STEPS + 1), first)
            first.persist()
    assert "run" not in persist_format.read_index(disk.path(STEPS))
    other = other_rate()
    with other.snapshots(run_dir, persist_dir=disk.folder) as second:
        with pytest.warns(UserWarning, match="without the identity of its run"):
            assert second.restore() == STEPS
        assert other.digest() == digests[STEPS]


@processes
def test_a_finished_run_leaves_nothing_that_refuses_another(run: Tiny, run_dir: Path) -> None:
    with run.snapshots(run_dir) as first:
        run.train(range(1, 3), first)
    other = other_rate()
    with other.snapshots(run_dir) as second:
        assert second.restore() is None
        assert second.run_id != first.run_id


@processes
def test_local_ranks_share_an_id(pair: Any, run_dir: Path) -> None:
    ids = {snapshots.run_id for _, snapshots in pair()}
    assert len(ids) == 1
    assert ids == {RunFiles(run_dir).id_or_new()}


@processes
@pytest.mark.parametrize(
    "damage",
    [
        *(
            pytest.param(each, marks=pytest.mark.representative)
            for each in ("flipped", "cut short")
        ),
        "unreadable",
        "missing part",
    ],
)
def test_checkpoints_that_cannot_be_loaded_are_no_reason_to_start_at_step_0(
    run: Tiny, run_dir: Path, disk: Checkpoints, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.snapshots(run_dir, persist_dir=disk.folder) as first:
        run.train(range(1, 3), first)
        first.persist()
        lose_smp(first)
    part = disk.path(2) / "rank-0.safetensors"
    if damage == "flipped":
        whole = part.read_bytes()
        part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    if damage == "cut short":
        part.write_bytes(part.read_bytes()[:-8])
    if damage == "missing part":
        part.unlink()
    if damage == "unreadable":

        def failing(folder: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(persist_format, "read_index", failing)
    other = Tiny(seed=1)
    before = other.digest()
    for _ in range(2):  # the second start finds what the first one has set aside as damaged
        with other.snapshots(run_dir, persist_dir=disk.folder) as later:
            with pytest.raises(SnapshotLost, match=r"although there are some .*step-2.*fresh=True"):
                later.restore()
            later.close(finished=False)
    assert other.digest() == before
    monkeypatch.undo()
    with other.snapshots(run_dir, persist_dir=disk.folder, fresh=True) as wanted:
        assert wanted.restore() is None


@processes
def test_an_empty_folder_is_a_first_start(run: Tiny, run_dir: Path, disk: Checkpoints) -> None:
    disk.folder.mkdir()
    (disk.folder / "README").write_text("checkpoints of my run")
    with run.snapshots(run_dir, persist_dir=disk.folder) as snapshots:
        assert snapshots.restore() is None


def identity(run_id: str = "", **values: Any) -> RunIdentity:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), **({"lr": 0.1} | values))
    return RunIdentity.of(run_id, model, optimizer.state_dict())


def scheduled(lr: float, steps: int) -> RunIdentity:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return RunIdentity.of("", model, optimizer.state_dict())


def test_a_learning_rate_that_a_schedule_has_moved_is_the_same_run() -> None:
    moved = scheduled(0.1, steps=3).adopted(scheduled(0.1, steps=0).encode(), "there")
    assert moved == scheduled(0.1, steps=3)
    with pytest.raises(SnapshotMismatch, match=r"lr=0\.2"):
        scheduled(0.1, steps=3).adopted(scheduled(0.2, steps=0).encode(), "there")


@for_each("options", [{"lr": 0.2}, {"momentum": 0.9}, {"weight_decay": 1e-4}, {"nesterov": False}])
def test_only_different_hyper_parameters_differ(options: dict[str, Any]) -> None:
    stored = identity(**options).encode()
    if options == {"nesterov": False}:
        assert identity().adopted(stored, "there") == identity()
    else:
        with pytest.raises(SnapshotMismatch, match=next(iter(options))):
            identity().adopted(stored, "there")


def test_identities_survive_json_and_name_another_writer() -> None:
    ours, theirs = identity("mine"), identity("theirs")
    assert not ours.differs(ours.encode())
    assert not ours.differs(None)
    assert "'theirs'" in ours.differs(theirs.encode())
    grown = RunIdentity.of("mine", torch.nn.Linear(3, 2), {})
    assert "another model" in ours.differs(grown.encode())
    with pytest.raises(SnapshotMismatch, match="cannot be read"):
        ours.adopted({"id": "x", "of a later release": 1}, "there")


def test_notebooks_have_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys, "argv", ["kernel.py", "-f", "kernel-1.json"])
    stored = identity().encode()
    monkeypatch.setattr(sys, "argv", ["kernel.py", "-f", "kernel-2.json"])
    assert identity().adopted(stored, "there").command == ""

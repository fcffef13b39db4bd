"""``Snapshots`` in this process against a real SMP."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from snapshot_disk import lose_smp
from snapshot_memory import flip_a_bit, slot_file, slot_files
from snapshot_trainer import Tiny, kinds, other_model
from snapshot_waits import PATIENCE_S, kill, together

from holdfast import events
from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotLost, SnapshotMismatch
from holdfast.snapshot.client.snapshots import Snapshots

pytestmark = [pytest.mark.processes, pytest.mark.representative]


@pytest.fixture
def snapshots(run: Tiny, run_dir: Path) -> Iterator[Snapshots]:
    with run.snapshots(run_dir) as snapshots:
        yield snapshots


def test_a_fresh_run_restores_nothing(snapshots: Snapshots, run: Tiny) -> None:
    before = run.digest()
    assert snapshots.restore() is None
    assert run.digest() == before
    assert kinds() == []
    with pytest.raises(SnapshotLost, match="holds no snapshot"):
        snapshots.rollback()


@pytest.mark.parametrize("every", [1, 3])
def test_rollback_gives_the_state_of_the_step_bit_for_bit(
    run: Tiny, run_dir: Path, every: int
) -> None:
    with run.snapshots(run_dir, every=every) as snapshots:
        digests = run.train(range(1, 8), snapshots)
        held = 7 // every * every
        assert snapshots.wait_committed() == held
        assert (snapshots.step, snapshots.commits) == (7, 7 // every)
        assert snapshots.copied_bytes > 0
        assert snapshots.stall_s > 0
        ahead = run.train(range(8, 10))
        assert run.digest() != digests[held]
        assert snapshots.rollback() == snapshots.step == held
        assert run.digest() == digests[held]
        again = run.train(range(held + 1, 10))
        assert [again[step] for step in ahead] == list(ahead.values())
    (event,) = events.recent()
    assert (event.kind, event.rung) == ("restored", "rollback")
    assert (event.detail["step"], event.detail["source"]) == (held, "memory")
    assert event.detail["found_s"] + event.detail["load_s"] == pytest.approx(event.duration_s)


def test_what_the_next_forward_changes_is_captured_and_a_copy_in_flight_is_abandoned(
    snapshots: Snapshots, run: Tiny
) -> None:
    digests = run.train(range(1, 3), snapshots)
    run.forward_backward()
    random.random()
    assert run.digest() != digests[2]
    assert snapshots.wait_committed() == 2
    run.train(range(3, 4))
    snapshots.begin(3)
    assert snapshots.rollback() == 2
    assert run.digest() == digests[2]
    run.train(range(3, 4), snapshots)
    assert snapshots.wait_committed() == 3


@pytest.mark.parametrize("epoch", [None, (0, {})], ids=["unknown", "begun anew by its epoch"])
def test_a_loader_whose_position_cannot_be_saved_is_named_at_the_start(
    run: Tiny, run_dir: Path, epoch: Any
) -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    with (
        Snapshots(run.model, run.optimizer, loader=loader, run_dir=run_dir) as snapshots,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        snapshots.training.epoch = epoch
        snapshots.begin(1)
        snapshots.begin(2)
    named = ["a DataLoader without state_dict" in str(each.message) for each in said]
    assert named.count(True) == (epoch is None)
    found = [event.detail["loader"] for event in events.recent() if event.kind == "loader_unsaved"]
    assert found == (["DataLoader"] if epoch is None else [])


def test_a_copy_torn_by_a_forgotten_finish_is_dropped_and_recorded(
    snapshots: Snapshots, run: Tiny
) -> None:
    digests = run.train(range(1, 2), snapshots)
    snapshots.wait_committed()
    run.train(range(2, 3))
    snapshots.begin(2)
    run.forward_backward()
    run.update()
    assert snapshots.wait_committed() is None
    (event,) = events.recent()
    assert (event.kind, event.detail["path"]) == ("snapshot_torn", "model.0.weight")
    assert snapshots.rollback() == 1
    assert run.digest() == digests[1]
    run.train(range(2, 4), snapshots)
    assert snapshots.wait_committed() == snapshots.committed_step == 3


def test_a_flipped_bit_in_memory_falls_back_to_the_older_step(
    snapshots: Snapshots, run: Tiny
) -> None:
    digests = run.train(range(1, 4), snapshots)
    snapshots.wait_committed()
    flip_a_bit(slot_file(snapshots.status(), 3))
    assert snapshots.rollback() == 2
    assert run.digest() == digests[2] != digests[3]
    assert events.recent()[0].detector == "digest"
    assert snapshots.status()["clean"] == [[2]]
    assert snapshots.committed_step == 2
    flip_a_bit(slot_file(snapshots.status(), 2))
    with pytest.raises(SnapshotLost, match="no intact snapshot"):
        snapshots.rollback()
    assert kinds() == ["snapshot_corrupt", "restored", "snapshot_corrupt"]
    assert run.digest() == digests[2]


def test_a_lost_smp_does_not_stop_the_training(snapshots: Snapshots, run: Tiny) -> None:
    run.train(range(1, 3), snapshots)
    snapshots.wait_committed()
    first = snapshots.status()["pid"]
    kill(first)
    with pytest.raises(SmpUnavailable, match="no SMP runs"):
        snapshots.status()
    digests = run.train(range(3, 5), snapshots)
    assert snapshots.wait_committed() == 4
    assert snapshots.status()["pid"] != first
    assert kinds() == ["smp_lost"]
    run.train(range(5, 6))
    assert snapshots.rollback() == 4
    assert run.digest() == digests[4]


def test_snapshots_lost_with_their_smp_are_missed_by_the_next_trainer(
    snapshots: Snapshots, run: Tiny, run_dir: Path
) -> None:
    assert snapshots.restore() is None
    assert "snapshots_lost" not in kinds()
    run.train(range(1, 4), snapshots)
    snapshots.wait_committed()
    lose_smp(snapshots)
    with run.snapshots(run_dir) as later:
        assert later.restore() is None
        assert kinds().count("snapshots_lost") == 1
    with run.snapshots(run_dir) as after_a_proper_end:
        assert after_a_proper_end.restore() is None
    assert kinds().count("snapshots_lost") == 1


def test_an_smp_lost_between_copy_and_finish_costs_no_snapshot(
    snapshots: Snapshots, run: Tiny
) -> None:
    digests = run.train(range(1, 2), snapshots)
    assert snapshots._copier.future is not None
    snapshots._copier.future.result(PATIENCE_S)
    kill(snapshots.status()["pid"])
    assert snapshots.wait_committed() == 1
    assert kinds() == ["smp_lost"]
    run.train(range(2, 3))
    assert snapshots.rollback() == 1
    assert run.digest() == digests[1]


class Huge:
    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"x": torch.empty(0).new_zeros(1).expand(2**50)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise AssertionError("nothing this large was ever stored")


@pytest.mark.parametrize("strict", [False, True])
def test_too_little_memory_costs_snapshots_not_training_and_the_smp_stays_healthy(
    run: Tiny, run_dir: Path, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor, **_: tensor)
    huge = run.snapshots(run_dir, extra=Huge(), strict=strict)
    huge.begin(1)
    reason = r"needs 4503599627\d+ bytes and \d+ are available"
    if strict:
        with pytest.raises(ConfigError, match=reason):
            huge.finish()
    else:
        with pytest.warns(RuntimeWarning, match=reason) as said:
            huge.finish()
        huge.begin(2)
        assert huge.wait_committed() is None
        assert huge.suspended
        assert (len(said), kinds()) == (1, ["snapshots_suspended"])
    monkeypatch.undo()
    huge.close(finished=False)
    with run.snapshots(run_dir) as snapshots:
        run.train(range(1, 3), snapshots)
        assert snapshots.wait_committed() == 2


def test_memory_is_flat_over_many_saves(snapshots: Snapshots, run: Tiny) -> None:
    run.train(range(1, 20), snapshots)
    smp = psutil.Process(snapshots.status()["pid"])
    mine = psutil.Process()

    def used() -> list[int]:
        status = snapshots.status()
        files = len(slot_files(smp.pid)), mine.num_fds()
        return [status["bytes"], *files, smp.memory_info().rss, mine.memory_info().rss]

    before = used()
    for step in range(20, 320):
        snapshots.begin(step)
        snapshots.finish()
    assert snapshots.wait_committed() == 319
    after = used()
    assert after[:3] == before[:3]
    assert all(now - then < 4 * 2**20 for then, now in zip(before[3:], after[3:], strict=True))


def other_optimizer() -> Tiny:
    other = Tiny()
    other.optimizer = torch.optim.SGD(other.model.parameters())
    other.scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    return other


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (other_model, r"model entry '0.weight': the snapshot has float32\[16, 8\].*\[17, 8\]"),
        (other_optimizer, "optimizer group 0: the snapshot has .*betas.*this run has .*momentum"),
    ],
)
def test_a_snapshot_of_another_model_changes_nothing(
    run: Tiny, run_dir: Path, build: Any, message: str
) -> None:
    first = run.snapshots(run_dir)
    run.train(range(1, 2), first)
    first.wait_committed()
    first.close(finished=False)
    other = build()
    before = other.digest()
    with other.snapshots(run_dir) as snapshots:
        with pytest.raises(SnapshotMismatch, match=message):
            snapshots.restore()
        assert other.digest() == before


def test_wrong_settings_say_why(run: Tiny, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="every=0"):
        run.snapshots(run_dir, every=0)
    with pytest.raises(ConfigError, match="scheduler is a int without state_dict"):
        Snapshots(run.model, run.optimizer, scheduler=3, run_dir=run_dir)
    with run.snapshots(run_dir) as snapshots:
        with pytest.raises(ConfigError, match="persist_dir"):
            snapshots.persist()
        with pytest.raises(ConfigError, match="keep=2, this run asks for 5"):
            run.snapshots(run_dir, keep=5)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with pytest.raises(SnapshotMismatch, match="still connected, this run has 4"):
            run.snapshots(run_dir)


@pytest.mark.parametrize("name", ["smp.lock", "smp.log", "run-id"])
def test_a_run_directory_that_cannot_be_written_is_refused(
    run: Tiny, run_dir: Path, name: str
) -> None:
    (run_dir / name).mkdir(parents=True)  # permissions do not stop root, who runs tests in CI
    with pytest.raises(ConfigError, match=r"run.*: Is a directory; choose another"):
        run.snapshots(run_dir)


def test_training_from_scratch_over_snapshots_of_another_run_is_refused(
    run: Tiny, run_dir: Path
) -> None:
    first = run.snapshots(run_dir)
    run.train(range(1, 4), first)
    first.wait_committed()
    first.close(finished=False)
    second = run.snapshots(run_dir)
    second.begin(1)
    with pytest.raises(ConfigError, match="not after step 3"):
        second.finish()
    assert second.rollback() == 3
    second.close(finished=True)


class HalfPrecisionState(torch.optim.Optimizer):
    """Keeps fp32 state beside bf16 parameters, which load_state_dict would cast."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["master"] = state.get("master", parameter.detach().float()) + 1e-5
            state["history"] = [parameter.detach().float() * 1.001]
            parameter.data.copy_(state["master"])


@pytest.mark.parametrize("kind", ["adamw", "fused", "master", "lbfgs"])
def test_optimizer_state_keeps_its_dtype_and_every_bit(run_dir: Path, kind: str) -> None:
    model = torch.nn.Linear(4, 4).bfloat16() if kind == "master" else torch.nn.Linear(4, 4)
    build = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), amsgrad=True),
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "master": lambda: HalfPrecisionState(model.parameters(), {}),
        "lbfgs": lambda: torch.optim.LBFGS(model.parameters(), max_iter=2),
    }[kind]
    optimizer: Any = build()

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(2, 4, dtype=model.weight.dtype)).float().square().sum()
        value.backward()
        return value

    for _ in range(2):
        loss()
        optimizer.step(loss)
    before = state_digest([model.state_dict(), optimizer.state_dict()])
    with Snapshots(model, optimizer, run_dir=run_dir) as snapshots:
        snapshots.begin(1)
        snapshots.wait_committed()
        loss()
        optimizer.step(loss)
        ahead = state_digest([model.state_dict(), optimizer.state_dict()])
        assert ahead != before
        snapshots.optimizer = optimizer = build()
        snapshots.training.optimizer = optimizer
        assert snapshots.rollback() == 1
    assert state_digest([model.state_dict(), optimizer.state_dict()]) == before
    loss()
    optimizer.step(loss)
    assert state_digest([model.state_dict(), optimizer.state_dict()]) == ahead


class Loader:
    def __init__(self) -> None:
        self.position = 0
        self.order = torch.arange(4)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]


def test_loader_and_extra_come_back_and_a_plain_loader_is_left_out(
    run: Tiny, run_dir: Path
) -> None:
    loader, extra = Loader(), Loader()
    with run.snapshots(run_dir, loader=loader, extra=extra) as snapshots:
        assert snapshots.parts == ("model", "optimizer", "scheduler", "loader", "extra")
        loader.position, extra.position = 7, 8
        snapshots.begin(1)
        loader.position = extra.position = 0
        extra.order += 1
        snapshots.wait_committed()
        snapshots.rollback()
        assert (loader.position, extra.position, extra.order.tolist()) == (0, 8, [0, 1, 2, 3])
        snapshots.restore()
        assert loader.position == 7
    with run.snapshots(run_dir / "other", loader=[1, 2]) as snapshots:
        assert "loader" not in snapshots.parts


def test_a_step_that_is_corrupt_on_one_rank_is_dropped_on_both(pair: Any) -> None:
    ranks, digests = pair(), {}
    for step in (1, 2, 3):
        for run, snapshots in ranks:
            run.train(range(step, step + 1))
            snapshots.begin(step)
        digests[step] = [run.model_digest() for run, _ in ranks]
        for _, snapshots in ranks:
            snapshots.finish()
    assert together(*(snapshots.wait_committed for _, snapshots in ranks)) == [3, 3]
    flip_a_bit(slot_file(ranks[0][1].status(), 3, rank=1))
    assert together(*(snapshots.rollback for _, snapshots in ranks)) == [2, 2]
    assert [run.model_digest() for run, _ in ranks] == digests[2] != digests[3]
    assert kinds().count("snapshot_corrupt") == 1


def test_a_rank_that_waits_alone_gives_up_in_time(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, snapshots), _ = pair()
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "0.3")
    with pytest.raises(SmpUnavailable, match="does not do the same"):
        snapshots.restore()


def test_both_ranks_survive_the_loss_of_their_smp(pair: Any) -> None:
    ranks = [snapshots for _, snapshots in pair()]
    kill(ranks[0].status()["pid"])
    for step in (1, 2):
        for snapshots in ranks:
            snapshots.begin(step)
        assert together(*(snapshots.wait_committed for snapshots in ranks)) == [step, step]
    assert kinds() == ["smp_lost", "smp_lost"]


def test_rolling_back_before_a_step_takes_an_older_one_and_forgets_newer_ones_only_then(
    run: Tiny, run_dir: Path
) -> None:
    with run.snapshots(run_dir, keep=2) as snapshots:
        digests = {}
        for step in range(1, 4):
            digests |= run.train([step], snapshots)
            snapshots.wait_committed()
        assert snapshots.rollback() == 3
        with pytest.raises(SnapshotLost, match="before 2 is held with keep=2"):
            snapshots.rollback(before=2)
        assert (run.digest(), snapshots.status()["newest"]) == (digests[3], 3)
        assert snapshots.rollback(before=3) == 2
        assert run.digest() == digests[2]
        assert snapshots.status()["clean"] == [[2]]

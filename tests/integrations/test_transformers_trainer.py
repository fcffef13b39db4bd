"""The adapter to Hugging Face's Trainer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from contract import INF, AdapterContract, Damage, Place, Program, Stop, Striker, kinds, outcome
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers_program import Rows, TrainerProgram

import holdfast.integrations.transformers as adapter
from holdfast import ConfigError, events
from holdfast.integrations.transformers import attach

pytestmark = pytest.mark.processes


class TestTransformers(AdapterContract):
    program = TrainerProgram
    adapter = adapter


def interrupted(
    make: Callable[[], Program],
    run_dir: Path,
    at: Place,
    train: Callable[[Any], None] | None = None,
) -> str:
    """Stop a run at a place, and let another trainer go on; return the digest of its result."""

    def stop(place: Place) -> None:
        if place == at:
            raise Stop

    with pytest.raises(Stop):
        outcome(make(), stop, run_dir=run_dir)
    program = make()
    if train is not None:
        program.train = lambda: train(program)  # type: ignore[method-assign]
    digest = outcome(program, run_dir=run_dir)
    assert program.resumed in (at[0], at[0] - 1)
    return digest


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows in their order; fewer than the steps need, so that it is begun again."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows(30)
        return (rows[number] for number in range(len(rows)))


class Partial(TrainerProgram):
    """The last step of an epoch has two micro-steps, of which one has a single row."""

    rows = 21


class Streamed(TrainerProgram):
    changed: ClassVar[dict[str, Any]] = {"max_steps": 8}

    def data(self) -> Any:
        return Stream()


class Grouped(TrainerProgram):
    """A sampler that draws from torch's own generator, and an evaluation before the first step."""

    changed: ClassVar[dict[str, Any]] = {
        "train_sampling_strategy": "group_by_length",
        "eval_on_start": True,
        "bf16": True,
        "logging_steps": 3,
        "max_grad_norm": 0.0,
    }


class Patient(TrainerProgram):
    """Stops early, because no evaluation is a thousand times better than the one before."""

    steps = 9
    changed: ClassVar[dict[str, Any]] = {
        "num_train_epochs": 4,
        "eval_steps": 3,
        "save_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 1e-5,
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.trainer.add_callback(EarlyStoppingCallback(2, 1000.0))

    def result(self) -> dict[str, Any]:
        self.trainer.state.best_model_checkpoint = None  # a path
        return super().result()


@pytest.mark.parametrize("kind", [Partial, Streamed, Grouped, Patient])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(
    kind: type[TrainerProgram], run_dir: Path, tmp_path: Path
) -> None:
    bare = outcome(kind(tmp_path / "bare"))
    assert interrupted(lambda: kind(tmp_path / "guarded"), run_dir, (6, 1)) == bare


def test_an_older_checkpoint_gives_way_to_the_newest_snapshot(
    run_dir: Path, tmp_path: Path
) -> None:
    bare = outcome(TrainerProgram(tmp_path / "bare"))

    seen = []

    class Observer(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)

    def resume(program: TrainerProgram) -> None:
        program.trainer.add_callback(Observer())
        program.trainer.train(resume_from_checkpoint=True)

    make = lambda: TrainerProgram(tmp_path / "guarded")  # noqa: E731
    assert interrupted(make, run_dir, (7, 0), resume) == bare
    assert seen in ([6], [7])  # what a callback is told is where the run goes on


def test_a_trainer_that_only_evaluates_has_no_guard(run_dir: Path, tmp_path: Path) -> None:
    program = TrainerProgram(tmp_path)
    program.attach(run_dir)
    program.trainer.evaluate()
    assert program.guarded.guard is None
    assert not run_dir.exists()


class Scaled(TrainerProgram):
    """Computes as with ``fp16=True``, which accelerate offers on devices only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
        self.trainer.accelerator.scaler = scaler
        compute_loss = self.trainer.compute_loss

        def in_half(*args: Any, **settings: Any) -> Any:
            with torch.autocast("cpu", torch.float16):
                return compute_loss(*args, **settings)

        self.trainer.compute_loss = in_half

    def result(self) -> dict[str, Any]:
        return super().result() | {"scale": self.trainer.accelerator.scaler.state_dict()}


def test_overflows_are_skipped_as_without_a_guard_and_a_fault_is_repaired(
    run_dir: Path, tmp_path: Path
) -> None:
    bare = Scaled(tmp_path / "bare")
    clean = outcome(bare)
    applied = {int(state["step"]) for state in bare.trainer.optimizer.state.values()}
    assert 2 <= min(applied) < bare.steps  # some steps were skipped
    strike = Striker({(6, 1): INF})
    assert outcome(Scaled(tmp_path / "guarded"), strike, run_dir=run_dir) == clean
    assert ("rerun", 6) in kinds("rerun")
    events.clear()
    assert outcome(Scaled(tmp_path / "struck"), Striker({(6, 1): INF})) != clean


def test_a_roll_back_does_steps_again_with_what_they_had(run_dir: Path, tmp_path: Path) -> None:
    clean = outcome(Partial(tmp_path / "bare"))
    program = Partial(tmp_path / "guarded")
    damage = Damage(program.weight, (4, 0))
    assert outcome(program, damage, run_dir=run_dir, at_rest=0.0) == clean
    assert kinds("rollback") == [("rollback", 4)]


class Plateau(TrainerProgram):
    """An evaluation moves the schedule, after every step, and always down."""

    changed: ClassVar[dict[str, Any]] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1000.0, "threshold_mode": "abs"},
        "metric_for_best_model": "loss",
        "warmup_steps": 0,
        "eval_steps": 1,
        "save_steps": 1,
    }


def test_a_schedule_moved_by_a_metric_is_as_it_was_after_a_roll_back(
    run_dir: Path, tmp_path: Path
) -> None:
    bare = Plateau(tmp_path / "bare")
    clean = outcome(bare)
    assert bare.trainer.optimizer.param_groups[0]["lr"] < 1e-5  # it was moved
    program = Plateau(tmp_path / "guarded")
    damage = Damage(program.weight, (4, 0))
    settings = {"snapshots": {"every": 3}}  # so that steps are done again
    assert outcome(program, damage, run_dir=run_dir, at_rest=0.0, **settings) == clean
    assert kinds("rollback") == [("rollback", 4)]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True begins a run again"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True begins an epoch anew"),
        ({"optim": "lomo"}, "optim='lomo' is applied within the backward pass"),
    ],
)
def test_settings_that_cannot_be_guarded_are_refused(
    changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    class Refused(TrainerProgram):
        pass

    Refused.changed = changed
    with pytest.raises(ConfigError, match=reason):
        attach(Refused(tmp_path).trainer)


def test_other_ways_to_distribute_are_refused(tmp_path: Path) -> None:
    trainer = TrainerProgram(tmp_path).trainer
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"2 devices in one process, by nn\.DataParallel"):
        attach(trainer)
    trainer.args._n_gpu = 0
    for kind in ("DEEPSPEED", "FSDP"):
        trainer.accelerator.state.distributed_type = kind
        try:
            with pytest.raises(ConfigError, match=f"by {kind} was not tried, or its step cannot"):
                attach(trainer)
        finally:
            trainer.accelerator.state.distributed_type = "NO"


def test_another_accumulation_is_refused_at_a_restart(run_dir: Path, tmp_path: Path) -> None:
    class Other(TrainerProgram):
        changed: ClassVar[dict[str, Any]] = {"gradient_accumulation_steps": 2}

    def stop(place: Place) -> None:
        if place == (2, 0):
            raise Stop

    with pytest.raises(Stop):
        outcome(TrainerProgram(tmp_path), stop, run_dir=run_dir)
    with pytest.raises(ConfigError, match="'accumulation': 3}, and this one has"):
        outcome(Other(tmp_path), run_dir=run_dir)

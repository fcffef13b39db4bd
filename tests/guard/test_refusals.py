"""What the guard refuses, in words that say what to do, and what it lets through."""

import math
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from guard_cases import Run, snapshots_of
from torch import nn

from holdfast.errors import ConfigError, SnapshotLost
from holdfast.guard import Guard
from holdfast.snapshot.client.snapshots import Snapshots
from holdfast.snapshot.layout import flat_buffer


def test_what_forward_backward_raises_gets_out_and_the_step_can_be_tried_again() -> None:
    run = Run(dropout=0.0)
    guard = Guard(run.model, run.optimizer, scheduler=run.scheduler)

    fails = Mock(side_effect=RuntimeError("out of memory"))
    for number in range(6):
        batch = number, run.loader.batch(number)
        if number == 3:
            with pytest.raises(RuntimeError, match="out of memory"):
                guard.step(fails, batch)
            assert guard.steps_done == 3
        guard.step(run.forward_backward, batch)
    assert run.digest() == Run(dropout=0.0).bare(6).digest()


def test_a_step_given_up_by_the_caller_is_not_done_with_its_batch_later() -> None:
    run = Run()
    guard = Guard(run.model, run.optimizer)
    with pytest.raises(TypeError, match="returned float"):
        guard.step(lambda batch: 0.5, (99, run.loader.batch(99)))
    guard.step(run.forward_backward, (0, run.loader.batch(0)))
    assert run.computed == [0]


def test_snapshots_that_do_not_fit_the_guard_are_refused(run_dir: Path) -> None:
    run = Run()
    with (
        snapshots_of(run, run_dir) as snapshots,
        pytest.raises(ConfigError, match="use it in a with block"),
    ):
        Guard(run.model, run.optimizer, snapshots=snapshots).step(run.forward_backward, None)
    with (
        Snapshots(run.model, run.optimizer, run_dir=run_dir) as snapshots,
        pytest.raises(ConfigError, match=r"StepLR is not the one .*Snapshots\(scheduler"),
    ):
        Guard(run.model, run.optimizer, scheduler=run.scheduler, snapshots=snapshots)


def test_snapshots_of_another_model_are_refused(run_dir: Path) -> None:
    run, other = Run(), Run()
    with (
        snapshots_of(other, run_dir) as snapshots,
        pytest.raises(ConfigError, match="the snapshots hold another model"),
    ):
        Guard(run.model, run.optimizer, snapshots=snapshots)


def test_clipping_by_the_guard_is_refused_where_the_loop_applies_the_step() -> None:
    run = Run()
    guard = Guard(run.model, run.optimizer, clip_grad_norm=0.5)
    with pytest.raises(ConfigError, match=r"clip_grad_norm=0\.5 is for Guard\.step"):
        guard.micro_step(run.forward_backward, (0, run.loader.batch(0)), last=True)
    assert run.computed == []


def test_a_second_guard_of_one_run_dir_is_refused_before_it_restores_the_firsts_weights(
    run_dir: Path,
) -> None:
    first, second = Run(), Run()
    with Guard(first.model, first.optimizer, snapshots=snapshots_of(first, run_dir)) as guard:
        guard.step(first.forward_backward, next(first.loader))
        before = second.digest()
        other = Guard(second.model, second.optimizer, snapshots=snapshots_of(second, run_dir))
        with pytest.raises(ConfigError, match=r"another Guard of this process uses run_dir"), other:
            pass
        assert second.digest() == before != first.digest()
        guard.step(first.forward_backward, next(first.loader))
        other.snapshots.close(finished=False)
    assert first.digest() == Run().bare(2).digest()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("audit", value) for value in (-0.1, 1.5, math.nan)),
        *(("clip_grad_norm", value) for value in (0.0, -1.0, math.nan)),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    run = Run()
    with pytest.raises(ConfigError, match=re.escape(f"{name} = {value} must be")):
        Guard(run.model, run.optimizer, **{name: value})
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="not the model's"):
        Guard(run.model, run.optimizer)


def test_a_state_that_cannot_be_stored_is_named(run_dir: Path) -> None:
    run = Run()
    run.optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(ConfigError, match=r"'optimizer\.param_groups\.0\.hook' is a <object>"):
        run.guarded(snapshots=snapshots_of(run, run_dir))


def test_snapshots_that_do_not_fit_in_memory_are_refused_at_once(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_buffer, "total_bytes", lambda entries: 2**52)
    run = Run()
    with pytest.raises(ConfigError, match=rf"needs {2**52} bytes and \d+ are available .*lower"):
        run.guarded(snapshots=snapshots_of(run, run_dir, strict=True))
    assert run.computed == []


@pytest.mark.processes
@pytest.mark.representative
def test_nodes_that_restored_different_steps_do_not_train_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    guard = Guard(run.model, run.optimizer, snapshots=snapshots_of(run, run_dir))
    monkeypatch.setattr(guard, "_agree", lambda wish: max(wish, 5))  # another node is at step 5
    with pytest.raises(SnapshotLost, match="restored step 0, others up to 5"):
        guard.__enter__()
    guard.__exit__(SnapshotLost, None, None)

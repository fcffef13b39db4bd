"""What the check at rest takes for an edit while nobody has asked for a share of the state."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from at_rest_cases import Constant, guarded, strike_at, weight
from guard_cases import STEPS, STRUCK, Run, events_of, kinds, snapshots_of

from holdfast.guard import Guard
from holdfast.snapshot.client.at_rest import AtRest

Edit = Callable[[Run], None]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share that follows from the time stays 1, whatever the machine does."""
    monkeypatch.setattr(AtRest, "_adapt", lambda *_: None)


def clamp(run: Run) -> None:
    run.model.up.weight.data[0, 0].clamp_(-0.01, 0.01)


def one_row(run: Run) -> None:
    run.model.up.weight.data[3] *= 0.9


def all_weights(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.mul_(0.99)


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("edit", [clamp, one_row, all_weights])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.filterwarnings("ignore:.* changed in memory between two optimizer steps")
def test_an_edit_through_data_is_kept_and_said(run_dir: Path, edit: Edit, every: int) -> None:
    bare = Run()
    for number, batch in zip(range(STEPS), bare.loader, strict=False):
        bare.optimizer.zero_grad()
        bare.forward_backward(batch)
        bare.optimizer.step()
        bare.scheduler.step()
        if number % every == 0:
            edit(bare)
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for number, batch in enumerate(guard.batches(run.loader, steps=STEPS)):
            guard.step(run.forward_backward, batch)
            snapshots.finish()
            if number % every == 0:
                edit(run)
    assert run.digest() == bare.digest()
    assert set(kinds()) == {"weight_changed_unseen"}


@pytest.mark.usefixtures("whole")
def test_a_flipped_bit_is_a_fault_and_repaired(run_dir: Path) -> None:
    right, run = Constant().bare().digest(), Constant()
    strike_at(run, STRUCK, weight)
    guarded(run, run_dir, at_rest=None)
    assert run.digest() == right
    assert [(event.step, event.rung) for event in events_of("state_fault")] == [(STRUCK, "correct")]


@pytest.mark.usefixtures("whole")
@pytest.mark.filterwarnings("ignore:.* changed in memory between two optimizer steps")
def test_a_buffer_that_is_written_now_and_then_is_kept(run_dir: Path) -> None:
    """Through NumPy, as batch normalisation and collectives do: PyTorch does not count it."""
    run = Constant()
    memory, plain = run.model.table.numpy(), run.forward_backward

    def written(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        loss = plain(batch)
        if batch[0] % 4 == 3:
            memory[0] += 0.3
        return loss

    run.forward_backward = written  # type: ignore[method-assign]
    guarded(run, run_dir, at_rest=None)
    assert float(run.model.table[0]) == pytest.approx(0.5 + 0.3 * (STEPS // 4))
    assert events_of("rollback") == []

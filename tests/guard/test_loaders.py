"""Every batch once, in order, over epochs, restarts and roll-backs."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_cases import (
    STEPS,
    STRUCK,
    WEIGHT_FAULT,
    Batches,
    Run,
    events_of,
    interruption,
    snapshots_of,
)
from torch.utils.data import DataLoader

from holdfast import events
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.snapshot.client.snapshots import Snapshots


class Plain:
    """A loader without a position, of few batches; counts how often it is begun."""

    def __init__(self, length: int) -> None:
        self.length, self.begun = length, 0

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        self.begun += 1
        torch.rand(1)  # as torch's DataLoader does for its workers' seed
        yield from ((number, Batches().batch(number)) for number in range(self.length))


def train_plain(run: Run, loader: Plain, steps: int, snapshots: Snapshots | None = None) -> None:
    """Train without a schedule."""
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=0.0) as guard:
        for batch in guard.batches(loader, steps=steps):
            guard.step(run.forward_backward, batch)


def test_a_short_loader_is_cycled() -> None:
    run, loader = Run(), Plain(3)
    train_plain(run, loader, 8)
    assert run.computed == [0, 1, 2, 0, 1, 2, 0, 1]
    assert loader.begun == 3


@pytest.mark.parametrize("loader", [[], Plain(0), iter(())])
def test_an_empty_loader_is_refused(loader: Any) -> None:
    run = Run()
    with pytest.raises(ConfigError, match=r"yields no batch at step 0 of 5: give"):
        list(Guard(run.model, run.optimizer).batches(loader, steps=5))


def test_a_restart_resumes_an_owned_loader_where_it_stood(run_dir: Path) -> None:
    first, second = Run(), Run()
    first.damage = interruption(lambda number: number == 7)
    with pytest.raises(KeyboardInterrupt):
        first.guarded(snapshots=snapshots_of(first, run_dir))
    second.guarded(snapshots=snapshots_of(second, run_dir))
    assert second.computed[0] in (5, 6, 7)
    assert second.computed == list(range(second.computed[0], STEPS))
    assert second.digest() == Run().bare().digest()
    assert second.loader.position == STEPS


def test_a_roll_back_over_the_start_of_an_epoch_keeps_the_random_numbers(run_dir: Path) -> None:
    whole = Run()
    train_plain(whole, Plain(3), STEPS)
    run = Run().inject(WEIGHT_FAULT)
    snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir)
    with protect(run.model):
        train_plain(run, Plain(3), STEPS, snapshots)
    assert STRUCK % 3 == 0
    assert events_of("rollback")[0].detail["to_step"] < STRUCK
    assert run.digest() == whole.digest()


def train_shuffled(run_dir: Path, *, seed: int = 3, die_at: int | None = None) -> str:
    """Two and a half passes of a shuffling DataLoader, which has no position of its own."""
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    loader, run = DataLoader(data, batch_size=6, shuffle=True), Run()
    torch.manual_seed(seed)
    random.seed(seed)
    snapshots = Snapshots(run.model, run.optimizer, scheduler=run.scheduler, run_dir=run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(loader, steps=10):
            if guard.steps_done == die_at:
                snapshots.wait_committed()
                raise KeyboardInterrupt
            guard.step(lambda inputs: run.forward_backward((0, inputs)), batch)
    return run.digest()


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize("die_at", [1, 4, 6])
def test_a_shuffling_loader_is_resumed_in_the_same_order(tmp_path: Path, die_at: int) -> None:
    undisturbed = train_shuffled(tmp_path / "undisturbed")
    for again in (0, 1):  # once more within the same pass
        with pytest.raises(KeyboardInterrupt):
            train_shuffled(tmp_path / "run", seed=3 + again, die_at=die_at + again)
    assert train_shuffled(tmp_path / "run", seed=99) == undisturbed
    assert train_shuffled(tmp_path / "another", seed=99) != undisturbed
    assert events_of("restored")


def train_in_parts(
    run_dir: Path, *, batches: int, turns: int, seed: int = 3, die_at: int | None = None
) -> str:
    """Steps of several batches of a shuffling loader, or several steps for each batch."""
    data = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    loader, run = DataLoader(data, batch_size=3, shuffle=True), Run()
    torch.manual_seed(seed)
    random.seed(seed)

    def finish_step() -> None:
        run.optimizer.step()
        run.optimizer.zero_grad()

    snapshots = Snapshots(run.model, run.optimizer, run_dir=run_dir)
    with Guard(
        run.model, run.optimizer, snapshots=snapshots, apply_again=finish_step, at_rest=0.0
    ) as guard:
        for number, inputs in enumerate(guard.batches(loader, steps=14), 1):
            for _ in range(turns):
                last = number % batches == 0
                part = (guard.steps_done, inputs)
                guard.micro_step(run.forward_backward, part, last=last)
                if last:
                    finish_step()
                    guard.after_optimizer_step()
            if last and guard.steps_done == die_at:
                snapshots.wait_committed()
                raise KeyboardInterrupt
    return run.digest()


@pytest.mark.processes
@pytest.mark.representative
@pytest.mark.parametrize(("batches", "turns"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("die_at", [2, 6, 10])  # the pass ends at step 6, or at step 24
def test_a_restart_skips_the_batches_that_were_drawn_however_many_a_step_takes(
    tmp_path: Path, batches: int, turns: int, die_at: int
) -> None:
    run = partial(train_in_parts, batches=batches, turns=turns)
    undisturbed = run(tmp_path / "undisturbed")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", die_at=die_at)
    assert run(tmp_path / "run", seed=99) == undisturbed
    assert events_of("restored")
    assert run(tmp_path / "another", seed=99) != undisturbed


class Stateful:
    """A loader with a position, which like torchdata's draws a random number when it is opened.

    With ``lazy`` its first batch opens it, as of a generator function.
    """

    def __init__(self, length: int, *, lazy: bool = False) -> None:
        self.length, self.lazy, self.position, self._resumed = length, lazy, 0, False

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        if not self.lazy:
            self._open()
        return self._lazily() if self.lazy else iter(self._next, None)

    def _open(self) -> None:
        torch.rand(1)
        self.position = self.position if self._resumed else 0
        self._resumed = False

    def _lazily(self) -> Iterator[tuple[int, torch.Tensor]]:
        self._open()
        yield from iter(self._next, None)

    def _next(self) -> Any:
        if self.position == self.length:
            return None
        self.position += 1
        return self.position - 1, Batches().batch(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self._resumed = state["position"], True


class Unusable(Plain):
    """A loader as Accelerate prepares it: it has ``state_dict``, which raises."""

    def state_dict(self) -> dict[str, int]:
        raise AttributeError("dl_state_dict")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AttributeError("dl_state_dict")


def train_to_a_death(run_dir: Path, loader: Any, die_at: int | None = None) -> Run:
    """Train ten steps with dropout, or fewer."""
    run = Run()
    snapshots = snapshots_of(run, run_dir, loader=loader)
    with Guard(run.model, run.optimizer, snapshots=snapshots) as guard:
        for batch in guard.batches(loader, steps=10):
            if guard.steps_done == die_at:
                snapshots.wait_committed()
                raise KeyboardInterrupt
            guard.step(run.forward_backward, batch)
    return run


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("die_at", [2, 4, 5])  # within a pass, at its end, in the next one
def test_opening_a_stateful_loader_again_draws_no_random_number(
    tmp_path: Path, lazy: bool, die_at: int
) -> None:
    whole = train_to_a_death(tmp_path / "whole", Stateful(4, lazy=lazy))
    with pytest.raises(KeyboardInterrupt):
        train_to_a_death(tmp_path / "run", Stateful(4, lazy=lazy), die_at)
    loader = Stateful(4, lazy=lazy)
    resumed = train_to_a_death(tmp_path / "run", loader)
    assert resumed.computed == [number % 4 for number in range(die_at, 10)]
    assert resumed.digest() == whole.digest()


def test_a_loader_whose_state_dict_raises_is_resumed_as_a_plain_one(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    whole = train_to_a_death(tmp_path / "whole", Unusable(4))
    with pytest.raises(KeyboardInterrupt):
        train_to_a_death(tmp_path / "run", Unusable(4), 6)
    events.clear()
    resumed = train_to_a_death(tmp_path / "run", Unusable(4))
    assert resumed.computed == [2, 3, 0, 1]
    assert resumed.digest() == whole.digest()
    (event,) = events_of("loader_unsaved")
    assert "state_dict raises AttributeError (dl_state_dict)" in event.detail["reason"]
    assert "position of the loader, a Unusable whose state_dict" in str(recwarn[0].message)


def test_a_plain_loader_drawn_through_the_guard_gives_no_warning(
    run_dir: Path, recwarn: pytest.WarningsRecorder
) -> None:
    train_to_a_death(run_dir, Plain(4))
    assert [str(each.message) for each in recwarn if "loader" in str(each.message)] == []
    assert not events_of("loader_unsaved")

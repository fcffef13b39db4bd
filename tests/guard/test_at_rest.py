"""Bits that flip in weights, moments and buffers between two steps of the optimizer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from at_rest_cases import Chosen, Constant, flip, guarded, moment, table, weight
from guard_cases import STEPS, STRUCK, Run, events_of, kinds, snapshots_of

from holdfast import events
from holdfast.errors import ConfigError
from holdfast.guard import Guard
from holdfast.snapshot.client.at_rest import AtRest, Rotation, expected_steps
from holdfast.snapshot.client.copier import Copier

# A flip of the lowest bits of a moment may be rounded away by the steps after it.
BITS = (6, 24, 31)


def struck_after_the_copy(run: Run, chosen: Chosen, *bits: int) -> list[int]:
    """Flip one bit in each of several steps, before the pass and after it in turn.

    Returns the steps. A snapshot of the run is copied before the flip.
    """
    plain, left = run.forward_backward, dict(zip(range(STRUCK, STEPS, 2), bits, strict=False))
    steps = list(left)

    def strike(number: int) -> None:
        if number in left:
            run.settle()
            flip(chosen(run).detach(), left.pop(number))

    def struck(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] % 4:
            strike(batch[0])
        loss = plain(batch)
        strike(batch[0])
        return loss

    run.forward_backward = struck  # type: ignore[method-assign]
    return steps


def test_clean_steps_give_no_alarm(run_dir: Path) -> None:
    """Of 20 steps with dropout and batch norm, whose statistics the passes write."""
    run = Constant()
    guarded(run, run_dir, at_rest=1.0)
    assert run.computed == [0, *range(STEPS)]
    assert kinds() == []
    assert run.digest() == Constant().bare().digest()


@pytest.mark.parametrize(("chosen", "back"), [(weight, False), (moment, False), (table, True)])
def test_a_flipped_bit_is_found_and_repaired_bit_for_bit(
    run_dir: Path, chosen: Chosen, back: bool
) -> None:
    right = Constant().bare().digest()
    for bit in BITS:
        bare = Constant()
        struck_after_the_copy(bare, chosen, bit)
        assert bare.bare().digest() != right
    run = Constant()
    struck = struck_after_the_copy(run, chosen, *BITS)
    guarded(run, run_dir, at_rest=1.0)
    assert run.digest() == right
    found = events_of("state_fault")
    assert [(event.step, event.rung) for event in found] == [
        (step, "" if back else "correct") for step in struck
    ]
    # The bytes of element 3 with bits 6, 24 and 31.
    assert [event.detail for event in found] == [
        {"first_byte": first, "bytes": 1} for first in (12, 15, 15)
    ]
    assert len(events_of("rollback")) == (len(BITS) if back else 0)
    if not back:
        repeated = {weight: 2, moment: 1}[chosen]
        assert [run.computed.count(step) for step in struck] == [repeated] * len(BITS)


@pytest.mark.parametrize("chosen", [weight, moment, table])
def test_without_the_check_a_low_bit_gets_through(run_dir: Path, chosen: Chosen) -> None:
    run = Constant()
    struck_after_the_copy(run, chosen, BITS[0])
    guarded(run, run_dir, at_rest=0.0)
    assert kinds() == []
    assert run.digest() != Constant().bare().digest()


@pytest.mark.usefixtures("partly")
@pytest.mark.parametrize("chosen", [weight, moment, table])
def test_a_snapshot_without_the_whole_state_is_rolled_back_to(
    run_dir: Path, chosen: Chosen
) -> None:
    """With parities a rank's memory holds a part of the state. The pass is not repeated first."""
    run = Constant()
    struck = struck_after_the_copy(run, chosen, 24)
    guarded(run, run_dir, at_rest=1.0)
    assert run.digest() == Constant().bare().digest()
    assert [event.step for event in events_of("rollback")] == struck
    assert [event.rung for event in events_of("state_fault")] == [""]
    assert [run.computed.count(step) for step in struck] == [2]


def test_a_flip_before_the_copy_has_read_is_not_found(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window that docs/fault_model.md leaves open."""
    run, start = Constant(), Copier.start

    def struck(copier: Copier, copy: Any) -> None:
        if copy.step == STRUCK:
            flip(run.model.up.weight.detach(), 0)
        start(copier, copy)

    monkeypatch.setattr(Copier, "start", struck)
    guarded(run, run_dir, at_rest=1.0)
    assert kinds() == []
    assert run.digest() != Constant().bare().digest()


def test_a_snapshot_that_is_damaged_too_is_not_copied_back(run_dir: Path) -> None:
    """The check rolls back to an older snapshot then."""
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    done = []

    def damage(number: int) -> None:
        if number == STRUCK and not done:
            done.append(number)
            copy = snapshots.copied(STRUCK)
            assert copy is not None
            assert copy.room is not None
            snapshots.wait_committed()
            index = copy.flat.paths.index("model.up.weight")
            copy.room[copy.entries[index].offset] ^= 1
            flip(run.model.up.weight.detach(), 24)

    run.damage = damage
    run.guarded(snapshots=snapshots, at_rest=1.0)
    assert run.digest() == Run().bare().digest()
    (rollback,) = events_of("rollback")
    assert rollback.detail["to_step"] == STRUCK - 1
    assert [event.rung for event in events_of("state_fault")] == [""]


def test_a_pass_that_edits_a_weight_through_data_keeps_its_edit(run_dir: Path) -> None:
    runs = [Run(dropout=0.0, without=["batch_norm"]) for _ in range(2)]
    for run in runs:

        def edit(batch: Any, run: Run = run, plain: Any = run.forward_backward) -> torch.Tensor:
            run.model.up.weight.data[0, 0] = 0.0
            return plain(batch)

        run.forward_backward = edit  # type: ignore[method-assign]
    runs[0].guarded(snapshots=snapshots_of(runs[0], run_dir), at_rest=1.0)
    assert runs[0].digest() == runs[1].bare().digest()
    assert [event.op for event in events_of("weight_changed_unseen")] == ["model.up.weight"]


def test_weights_that_are_clamped_between_steps_stay_clamped(run_dir: Path) -> None:
    def clamp(run: Run) -> None:
        for parameter in run.model.parameters():
            parameter.data.mul_(0.99)

    run = Run()
    with Guard(
        run.model, run.optimizer, snapshots=snapshots_of(run, run_dir), at_rest=1.0
    ) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            guard.step(run.forward_backward, batch)
            guard.snapshots.finish()  # type: ignore[union-attr]
            clamp(run)
    bare = Run()
    for number in range(STEPS):
        events.set_step(number)
        bare.optimizer.zero_grad()
        bare.forward_backward(next(bare.loader))
        bare.optimizer.step()
        bare.scheduler.step()
        clamp(bare)
    assert run.digest() == bare.digest()
    assert set(kinds()) == {"weight_changed_unseen"}


def test_edits_that_pytorch_counts_are_no_faults(run_dir: Path) -> None:
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=1.0) as guard:
        for batch in guard.batches(run.loader, steps=4):
            guard.step(run.forward_backward, batch)
            snapshots.finish()
            with torch.no_grad():
                run.model.up.weight[0, 0] = 0.0
    assert kinds() == []
    assert float(run.model.up.weight.detach()[0, 0]) == 0.0


@pytest.mark.parametrize("share", [1 / 2, 1 / 5, 1 / 16])
def test_the_expected_latency_is_that_of_a_simulation(share: float) -> None:
    """A tensor that is struck stays damaged; the steps until a check reads it are counted."""
    draw = random.Random(1)
    sizes, rotation = [4096] * 80, Rotation()
    reads = [set(rotation.take(sizes, share)) for _ in range(4000)]
    waits = []
    for _ in range(4000):
        step, struck = draw.randrange(3900), draw.randrange(80)
        waits.append(next(n for n in range(1, 101) if struck in reads[step + n - 1]))
    assert max(waits) <= 1 / share
    # The mean of 4,000 uniform waits has a standard error of (1 / share) / sqrt(12 * 4000).
    assert abs(sum(waits) / 4000 - expected_steps(share)) < 4 / share / (12 * 4000) ** 0.5
    # What the optimizer writes anew in each step is found in its own step or never.
    assert abs(sum(wait == 1 for wait in waits) / 4000 - share) < 4 * (share / 4000) ** 0.5


def test_a_share_of_unequal_tensors_is_kept_over_time() -> None:
    sizes, rotation = [5, 1000, 1, 70, 300], Rotation()
    read = sum(sizes[index] for _ in range(1000) for index in rotation.take(sizes, 0.1))
    assert read == pytest.approx(1000 * 0.1 * sum(sizes), rel=0.02)
    assert Rotation().take(sizes, 1.0) == [0, 1, 2, 3, 4]


def test_the_default_takes_one_hundredth_of_the_time(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock on which a full check takes 0.5 s and the rest of a step 10 s."""
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    clock = [0.0]
    monkeypatch.setattr("holdfast.snapshot.client.at_rest.time.perf_counter", lambda: clock[0])
    changed = AtRest._changed

    def slow(rest: AtRest, copy: Any) -> list[int]:
        whole = sum(entry.nbytes for entry in copy.entries)
        clock[0] += 0.5 * sum(copy.entries[index].nbytes for index in copy.watched) / whole
        return changed(rest, copy)

    monkeypatch.setattr(AtRest, "_changed", slow)
    run.damage = lambda number: clock.__setitem__(0, clock[0] + 10.0)
    guard = Guard(run.model, run.optimizer, snapshots=snapshots)
    assert guard.at_rest.share == 1.0
    with guard:
        for batch in guard.batches(run.loader, steps=6):
            guard.step(run.forward_backward, batch)
    assert guard.at_rest.share == pytest.approx(0.01 * 10 / 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(run_dir: Path, share: float) -> None:
    run = Run()
    with pytest.raises(ConfigError, match=r"at_rest = .* must be a share .* between 0 and 1"):
        Guard(run.model, run.optimizer, at_rest=share)


def test_the_check_needs_snapshots() -> None:
    run = Run()
    with pytest.raises(ConfigError, match=r"at_rest = 0\.5 needs snapshots"):
        Guard(run.model, run.optimizer, at_rest=0.5)

"""Checks at rest beyond the plain case: steps without a snapshot, wide damage, edits, threads."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from at_rest_cases import (
    Chosen,
    Constant,
    flip,
    guarded,
    moment,
    strike_at,
    table,
    weight,
)
from guard_cases import STEPS, STRUCK, WEIGHT_FAULT, Run, events_of, kinds, snapshots_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from holdfast.guard import Guard
from holdfast.protection import protect
from holdfast.replay.shadow import ShadowReplica
from holdfast.snapshot.client import at_rest, memory_changes
from holdfast.snapshot.client.copies import Copy, DigestsOnly
from holdfast.snapshot.client.memory_changes import WIDEST_FAULT_BYTES, Change, is_wide, mend
from holdfast.snapshot.layout import dtensors, flat_buffer
from holdfast.snapshot.layout.flat_buffer import flatten


@pytest.mark.parametrize("chosen", [weight, moment, table])
@pytest.mark.parametrize("step", [STRUCK, STRUCK + 1])
def test_steps_without_a_snapshot_are_digested_without_a_copy(
    run_dir: Path, step: int, chosen: Chosen
) -> None:
    """With a snapshot after every third step, of which ``STRUCK`` is one."""
    run = Constant()
    strike_at(run, step, chosen)
    guarded(run, run_dir, every=3, at_rest=1.0)
    assert run.digest() == Constant().bare().digest()
    (found,) = events_of("state_fault")
    assert found.step == step
    back = chosen is table or step != STRUCK
    assert [event.detail["to_step"] for event in events_of("rollback")] == (
        [STRUCK] if back else []
    )
    bare = Constant()
    strike_at(bare, step, chosen)
    assert bare.bare().digest() != run.digest()


def test_clean_steps_without_a_snapshot_give_no_alarm(run_dir: Path) -> None:
    run = Constant()
    guarded(run, run_dir, every=3, at_rest=1.0)
    assert kinds() == []
    assert run.digest() == Constant().bare().digest()


@pytest.mark.usefixtures("partly")
def test_the_step_after_a_roll_back_is_checked_too(run_dir: Path) -> None:
    run = Constant()
    strike_at(run, STRUCK, moment)
    struck, passes = run.forward_backward, []

    def again(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        passes.append(batch[0])
        if passes.count(STRUCK) == 2 and batch[0] == STRUCK:
            run.settle()
            flip(weight(run).detach(), 0)
        return struck(batch)

    run.forward_backward = again  # type: ignore[method-assign]
    guarded(run, run_dir, at_rest=1.0)
    assert run.digest() == Constant().bare().digest()
    assert [event.op.split(".")[0] for event in events_of("state_fault")] == ["optimizer", "model"]
    assert len(events_of("rollback")) == 2


@pytest.mark.usefixtures("partly")
def test_shadows_do_not_confirm_a_step_whose_state_is_lost(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They confirm its gradient, which the optimizer would apply to the damaged weight."""
    monkeypatch.setattr(ShadowReplica, "force_audit", lambda shadow: True)
    run = Constant()
    strike_at(run, STRUCK, weight)
    guarded(run, run_dir, at_rest=1.0)
    assert len(events_of("rollback")) == 1
    assert run.digest() == Constant().bare().digest()


@pytest.mark.usefixtures("partly")
def test_a_state_that_is_lost_in_a_repeated_pass_is_rolled_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShadowReplica, "force_audit", lambda shadow: True)
    run = Constant()
    plain, passes = run.forward_backward, []

    def struck(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        passes.append(batch[0])
        loss = plain(batch)
        if batch[0] == STRUCK and passes.count(STRUCK) == 2:
            run.settle()
            flip(moment(run), 24)
        return loss

    run.forward_backward = struck  # type: ignore[method-assign]
    guarded(run, run_dir, at_rest=1.0, audit=1.0)
    assert len(events_of("rollback")) == 1
    assert run.digest() == Constant().bare().digest()


@pytest.mark.usefixtures("partly")
def test_a_constant_buffer_is_known_as_such_if_few_tensors_are_read(run_dir: Path) -> None:
    run = Constant()
    plain = run.forward_backward

    def struck(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        run.settle()
        if batch[0] >= STRUCK and not events_of("state_fault"):
            flip(table(run), 0)
        return plain(batch)

    run.forward_backward = struck  # type: ignore[method-assign]
    guarded(run, run_dir, at_rest=0.5)
    assert [event.op for event in events_of("state_fault")] == ["model.table"]


def test_a_copy_is_not_committed_before_its_pass_is_confirmed(run_dir: Path) -> None:
    """It may hold a weight that changed while it was being copied, during the pass."""
    run = Constant().inject(WEIGHT_FAULT)
    with protect(run.model):
        guarded(run, run_dir, at_rest=1e-9)
    assert [event.detail["to_step"] for event in events_of("rollback")] == [STRUCK - 1]


@pytest.fixture
def narrow_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a change of more than 16 bytes for wide."""
    monkeypatch.setattr(memory_changes, "WIDEST_FAULT_BYTES", 16)


@pytest.mark.usefixtures("narrow_limit")
def test_a_wide_change_of_a_moment_is_a_fault(run_dir: Path) -> None:
    run = Constant()
    strike_at(run, STRUCK, moment, element=slice(None))
    guarded(run, run_dir, at_rest=1.0)
    (found,) = events_of("state_fault")
    assert found.detail["bytes"] > 16
    assert run.digest() == Constant().bare().digest()
    assert events_of("weight_changed_unseen") == []


@pytest.mark.usefixtures("narrow_limit")
def test_a_wide_change_of_a_weight_is_kept_and_told_and_the_weight_checked_again(
    run_dir: Path,
) -> None:
    run = Constant()
    strike_at(run, STRUCK, weight, 23, element=slice(None))
    strike_at(run, STRUCK + 1, weight, 24)
    with pytest.warns(UserWarning, match=r"model\.up\.weight changed in memory .* is kept"):
        guarded(run, run_dir, at_rest=1.0)
    assert [(e.op, e.step) for e in events_of("weight_changed_unseen")] == [
        ("model.up.weight", STRUCK)
    ]
    assert [event.step for event in events_of("state_fault")] == [STRUCK + 1]
    bare = Constant()
    strike_at(bare, STRUCK, weight, 23, element=slice(None))
    assert run.digest() == bare.bare().digest()


def test_small_tensors_of_one_page_are_damaged_together() -> None:
    here = [Change(n, span=4, first=0, address=2**20 + 64 * n) for n in range(40)]
    assert not is_wide(here)
    assert is_wide([*here, Change(40, 4, 0, 2**20 + WIDEST_FAULT_BYTES + 1)])
    assert not is_wide([here[0], Change(1, 4, 0, 2**30)])
    assert is_wide([Change(n) for n in range(3)])  # where they lie is not known
    assert is_wide([Change(0, WIDEST_FAULT_BYTES + 1, 0, 2**20)])


@pytest.mark.usefixtures("partly")
def test_a_program_that_edits_all_weights_is_not_rolled_back_for_ever(run_dir: Path) -> None:
    """A check that reads one or two tensors cannot see that all of them were edited."""
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=0.08) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            guard.step(run.forward_backward, batch)
            snapshots.finish()
            for parameter in run.model.parameters():
                parameter.data.mul_(0.99)
    assert len(events_of("rollback")) == at_rest.MOST_IN_SUCCESSION - 1
    assert "weight_changed_unseen" in kinds()


def test_an_edit_of_one_row_between_steps_is_undone_twice_and_then_kept(run_dir: Path) -> None:
    """Also if its tensor is read in every second or third step only."""
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=0.4) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            guard.step(run.forward_backward, batch)
            snapshots.finish()
            run.model.up.weight.data[0] = 0.0
    found = [event.op for event in events_of("state_fault")]
    assert found == ["model.up.weight"] * (at_rest.MOST_IN_SUCCESSION - 1)
    (kept,) = events_of("weight_changed_unseen")
    assert kept.detail["not_checked"] == ["model.up.weight"]
    assert not run.model.up.weight.detach()[0].any()


@pytest.mark.usefixtures("two_threads")
def test_the_threads_of_a_guard_end_with_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_rest, "_BYTES_FOR_THREADS", 0)
    seen, plain = set(), at_rest.AtRest.check

    def noting(rest: at_rest.AtRest, step: int) -> object:
        found = plain(rest, step)
        seen.update(thread.name for thread in threading.enumerate())
        return found

    monkeypatch.setattr(at_rest.AtRest, "check", noting)
    run = Constant()
    strike_at(run, STRUCK, moment)
    guarded(run, run_dir, at_rest=1.0)
    assert run.digest() == Constant().bare().digest()
    assert any(name.startswith("holdfast-at-rest") for name in seen)
    assert not [t for t in threading.enumerate() if t.name.startswith("holdfast-at-rest")]


def test_an_attached_guard_digests_nothing_in_vain(run_dir: Path) -> None:
    run = Run()
    snapshots = snapshots_of(run, run_dir)
    with Guard.attach(run.model, run.optimizer, snapshots=snapshots) as guard:
        assert guard.at_rest.share == 0.0
        assert snapshots._copier.watch is None


@pytest.fixture
def mesh(tmp_path: Path) -> Any:
    """A mesh of this process alone."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


def test_edits_and_repairs_of_dtensors_are_counted(mesh: DeviceMesh) -> None:
    """A DTensor and its local tensor have version counters of their own."""
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    assert isinstance(parameter, DTensor)
    flat = flatten({"model": {"weight": parameter.detach()}})
    dtensors.watch(flat.watched, flat.tensors, [parameter])
    digests = DigestsOnly(0, flat)
    with torch.no_grad():
        parameter.mul_(2)
    assert digests.is_edited(0)
    copy = Copy(0, flatten({"model": {"weight": parameter.detach()}}))
    copy.room = torch.empty(copy.nbytes, dtype=torch.uint8)
    flat_buffer.write(copy.flat, copy.entries, copy.room, lambda: False)
    copy.digests = {0: at_rest.tensor_digest(parameter)}
    flip(parameter.detach(), 24)
    before = parameter._version
    assert mend(copy, 0)
    assert parameter.to_local().tolist() == [2.0] * 4
    assert parameter._version > before  # what was computed of the damaged one is out of date
    assert not copy.is_edited(0)


def test_a_frozen_weight_that_was_made_in_inference_mode_is_repaired(run_dir: Path) -> None:
    run = Constant()
    with torch.inference_mode():
        run.model.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    strike_at(run, STRUCK, lambda run: run.model.frozen)
    guarded(run, run_dir, at_rest=1.0)
    assert [event.rung for event in events_of("state_fault")] == ["correct"]
    assert run.model.frozen.tolist() == [1.0] * 8


class Frozen(Constant):
    """A run with a weight that is used and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model.frozen = torch.nn.Parameter(torch.linspace(0.5, 1.5, 4), requires_grad=False)
        self.model.down.register_forward_hook(lambda module, args, out: out * self.model.frozen)


def frozen(run: Run) -> torch.Tensor:
    """The weight that is not trained."""
    return run.model.frozen


@pytest.mark.parametrize("chosen", [frozen, table])
def test_a_change_that_lasts_is_found_in_the_next_step_whatever_is_read(
    run_dir: Path, chosen: Chosen
) -> None:
    """A copy of the whole state has digests of tensors that are not read a second time."""
    right = Frozen().bare().digest()
    bare = Frozen()
    strike_at(bare, STRUCK, chosen)
    assert bare.bare().digest() != right
    run = Frozen()
    strike_at(run, STRUCK, chosen)
    guarded(run, run_dir, at_rest=1e-9)
    assert [(event.step, event.rung) for event in events_of("state_fault")] == [(STRUCK + 1, "")]
    assert [event.detail["to_step"] for event in events_of("rollback")] == [STRUCK]
    assert run.digest() == right


def test_an_older_snapshot_is_restored_if_the_newest_holds_the_change(run_dir: Path) -> None:
    right = Frozen().bare().digest()
    run = Frozen()
    strike_at(run, STRUCK, frozen)
    snapshots = snapshots_of(run, run_dir)
    run.settle = snapshots.finish
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=1e-9) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            snapshots.wait_committed()  # before the check
            guard.step(run.forward_backward, batch)
    tried = [event.detail["to_step"] for event in events_of("rollback")]
    assert tried == [STRUCK + 1, STRUCK]
    assert "weight_changed_unseen" not in kinds()
    assert run.digest() == right


def test_a_change_that_lasts_is_told_if_no_snapshot_is_without_it(run_dir: Path) -> None:
    run = Frozen()
    strike_at(run, STRUCK, frozen)
    snapshots = snapshots_of(run, run_dir, keep=1)
    run.settle = snapshots.finish
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=1e-9) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            snapshots.wait_committed()
            guard.step(run.forward_backward, batch)
    assert guard.steps_done == STEPS
    assert [event.op for event in events_of("state_fault")] == ["model.frozen"]
    assert [event.op for event in events_of("weight_changed_unseen")] == ["model.frozen"]


@pytest.mark.usefixtures("partly")
def test_a_change_that_lasts_is_found_in_rotation(run_dir: Path) -> None:
    """It is taken for constant by then, as two of its digests were equal."""
    run, share = Frozen(), 0.25
    strike_at(run, STRUCK, frozen)
    guarded(run, run_dir, at_rest=share)
    found = events_of("state_fault")[0]
    assert found.op == "model.frozen"
    assert STRUCK <= found.step <= STRUCK + 1 / share


@pytest.mark.parametrize("every", [1, 4])
def test_a_frozen_weight_that_the_program_edits_keeps_its_edits(run_dir: Path, every: int) -> None:
    """In ``after``, through ``.data``, in every step or in some."""

    def edit(run: Run, step: int) -> None:
        if step % every == 0:
            run.model.frozen.data[0] += 1.0

    run = Frozen()
    snapshots = snapshots_of(run, run_dir)
    with Guard(run.model, run.optimizer, snapshots=snapshots, at_rest=1.0) as guard:
        for batch in guard.batches(run.loader, steps=STEPS):
            guard.step(run.forward_backward, batch, after=lambda: edit(run, guard.steps_done))
    assert float(run.model.frozen.detach()[0]) == 0.5 + STEPS // every
    assert events_of("rollback") == []

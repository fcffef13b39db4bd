"""Wrong steps of an optimizer under a Guard: repaired in place, or all ranks roll back."""

from pathlib import Path
from typing import Any

import optimizer_ranks
import pytest
import torch
from at_rest_cases import flip
from gloo_ranks import Ranks
from guard_cases import STEPS, STRUCK, Run, events_of, kinds, snapshots_of
from split_cases import SPLIT_STEPS, SPLIT_STRUCK, SplitRun
from test_scaler import ScaledRun

from holdfast import events
from holdfast.errors import UncorrectableFault
from holdfast.guard import Guard
from holdfast.replay.agreement import Agreement
from holdfast.replay.updates import Sample
from holdfast.report.coverage_section import coverage_section
from holdfast.report.run import gather_run
from holdfast.step import summary


def strike(run: Run, *applied: int, bit: int = 0) -> Run:
    """Flip a bit of a weight as the optimizer has written it, in its steps of these numbers."""
    counted = iter(range(10_000))

    def struck() -> None:
        if next(counted) in applied:
            flip(run.model.up.weight.detach(), bit)

    run.optimizer._optimizer_step_code = struck  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize("options", [{"audit": 1.0}, {"optimizer_check": 1.0}])
def test_a_struck_step_is_repaired_in_place(options: dict[str, Any]) -> None:
    """Audited steps are checked wholly. Clean steps of such runs give no alarm (``right``)."""
    right = Run()
    right.guarded(clip=0.05, **options)
    assert kinds() == []
    assert right.digest() == Run().bare(clip=0.05).digest()
    run = strike(Run(), STRUCK)
    run.guarded(clip=0.05, **options)
    assert kinds() == ["optimizer_fault"]
    assert events_of("optimizer_fault")[0].step == STRUCK
    assert run.digest() == right.digest()
    without = strike(Run(), STRUCK)
    without.guarded(clip=0.05, **options | {"optimizer_check": 0.0})
    assert without.digest() == strike(Run(), STRUCK).bare(clip=0.05).digest() != right.digest()


@pytest.mark.parametrize(("fused", "clip"), [(False, 0.05), (True, 0.05), (True, None)])
def test_scaled_steps_are_checked_and_skipped_ones_are_not(fused: bool, clip: float | None) -> None:
    """A fused optimizer divides by the scale, and skips, by itself."""

    def scaled() -> ScaledRun:
        run = ScaledRun()
        run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, fused=fused)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
        return run

    right = scaled().bare(clip=clip).digest()
    clean = scaled()
    [told] = clean.guarded(clip=clip, optimizer_check=1.0).optimizer_check.coverage()
    assert told["checked"] >= 11 * 4  # of 14 steps, 3 of which overflow
    assert kinds() == ["rerun"] * 3
    assert clean.digest() == right
    struck = scaled()
    strike(struck, 6)
    struck.guarded(clip=clip, optimizer_check=1.0)
    assert kinds().count("optimizer_fault") == 1
    assert struck.digest() == right


def test_a_step_that_a_loop_applies_is_checked_too() -> None:
    right = SplitRun().split().digest()
    run = SplitRun()
    strike(run, SPLIT_STRUCK)
    run.guarded_split(optimizer_check=1.0)
    assert kinds() == ["optimizer_fault"]
    assert (
        run.digest() == right != strike(SplitRun(), SPLIT_STRUCK).split(None, SPLIT_STEPS).digest()
    )


def never_twice_alike(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let each recomputation of a weight's update in one step give other bits."""
    again, left = Sample.again, list(range(1, 4))

    def errs(sample: Sample) -> dict[str, Any]:
        values = again(sample)
        if events.current_step() == step and sample.parameter.shape == (16, 8) and left:
            values["parameter"][0, 0] += left.pop()
        return values

    monkeypatch.setattr(Sample, "again", errs)


def test_a_step_that_cannot_be_repaired_is_rolled_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Run().bare().digest()
    assert strike(Run(), STRUCK).bare().digest() != right
    never_twice_alike(monkeypatch, STRUCK)
    run = strike(Run(), STRUCK)
    run.guarded(snapshots=snapshots_of(run, run_dir), optimizer_check=1.0)
    assert run.digest() == right
    (event,), (rollback,) = events_of("optimizer_fault"), events_of("rollback")
    assert (event.step, event.rung) == (STRUCK, "")
    assert (rollback.detail["from_step"], rollback.detail["to_step"]) == (STRUCK + 1, STRUCK)
    assert "AdamW.step/up.weight of this rank gave other bits" in rollback.detail["cause"]


@pytest.mark.parametrize("step", [STRUCK, STEPS - 1])
def test_without_a_way_back_such_a_step_ends_the_run(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_twice_alike(monkeypatch, step)
    run = strike(Run(), step)
    with pytest.raises(UncorrectableFault, match=r"AdamW\.step/up\.weight"):
        run.guarded(optimizer_check=1.0)
    assert len(run.computed) == min(step + 2, STEPS)


def test_the_last_step_of_a_run_is_not_committed_if_it_cannot_be_repaired(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_twice_alike(monkeypatch, STEPS - 1)
    run = strike(Run(), STEPS - 1)
    with pytest.raises(UncorrectableFault):
        run.guarded(snapshots=snapshots_of(run, run_dir), optimizer_check=1.0)
    after = Run()
    after.guarded(snapshots=snapshots_of(after, run_dir), optimizer_check=1.0)
    assert after.computed == [STEPS - 1]
    assert after.digest() == Run().bare().digest()


def test_ranks_that_do_not_answer_at_the_end_cost_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(*_: object) -> int:
        raise RuntimeError("timed out, as if")

    run = Run()
    with Guard(run.model, run.optimizer) as guard:
        guard.step(run.forward_backward, next(iter(run.loader)))
        monkeypatch.setattr(Agreement, "__call__", late)
    assert "updates of other ranks in step 0 are not known: timed out, as if" in caplog.text


@pytest.mark.processes
def test_all_ranks_end_in_an_error_if_an_update_of_the_last_step_is_wrong(tmp_path: Path) -> None:
    first, other = Ranks(tmp_path / "run", 2, optimizer_ranks.ended).finished()
    for lines in (first, other):
        assert [line["steps"] for line in lines] == [optimizer_ranks.STEPS] * 2
        assert not lines[0]["error"]
        assert lines[1]["error"].startswith(f"step {optimizer_ranks.STEPS - 1}, the last one: ")
    assert "an update of another rank gave other bits each time" in first[1]["error"]
    assert "SGD.step/" in other[1]["error"]


def test_the_report_tells_which_optimizers_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "EVERY_S", 0.0)
    events.open_ledger(tmp_path)
    Run().guarded(steps=4, optimizer_check=1.0)
    events.close_ledger()
    report = gather_run(tmp_path)
    (told,) = report.guards[0]["optimizers"]
    assert (told["optimizer"], told["share"], told["repeatable"]) == ("AdamW", 1.0, 1.0)
    assert told["checked"] == 4 * len(list(Run().model.parameters()))
    page = str(coverage_section(report))
    assert "Steps of optimizers" in page
    assert "AdamW" in page


def test_a_loop_that_does_not_call_its_guard_is_listed_as_not_checked() -> None:
    run = Run()
    with Guard.attach(run.model, run.optimizer) as guard:
        assert guard.optimizer_check.coverage()[0]["share"] == 0.0


@pytest.mark.processes
def test_each_rank_of_fsdp2_checks_its_shards(tmp_path: Path) -> None:
    """Rank 1 errs in its own shard, and repairs it without the others."""
    said = Ranks(tmp_path / "run", 2, optimizer_ranks.train).finished()
    for rank, [bare, clean, struck, unchecked] in enumerate(said):
        assert clean["state"] == struck["state"] == bare["state"]
        assert clean["events"] == []
        assert clean["checked"] == struck["checked"] + rank > 0
        assert unchecked["state"] != bare["state"]  # of rank 0 too, which is given the shard
        named = [(e["kind"], e["rank"], e["op"], e["rung"]) for e in struck["events"]]
        assert named == [("optimizer_fault", 1, "AdamW.step/up.weight", "recompute")] * rank

"""Three ranks of DDP: the order of their sums is that of the run which a restart continues."""

from pathlib import Path
from typing import Any

import pytest
from ddp_ranks import STEPS, train
from gloo_ranks import Ranks

from holdfast.snapshot.node import launch
from holdfast.step.buckets import Buckets

pytestmark = pytest.mark.processes

RANKS, DIED_AT = 3, 3


def trained(folder: Path, run_dir: Path, job: Any = train) -> list[dict[str, Any]]:
    """Train to the end; return what each rank said."""
    return [lines[-1] for lines in Ranks(folder, RANKS, job, run_dir).finished()]


def unsettled(said: Path, run_dir: Path, die_at: int | None = None) -> None:
    """Train without the pass that settles DDP's buckets."""
    settle, Buckets.settle = Buckets.settle, lambda *_: None  # type: ignore[method-assign]
    try:
        train(said, run_dir, die_at)
    finally:
        Buckets.settle = settle  # type: ignore[method-assign]


def restarted(folder: Path, run_dir: Path, job: Any = train) -> list[dict[str, Any]]:
    """Kill all ranks once a step is committed, and train to the end with others."""
    first = Ranks(folder / "first", RANKS, job, run_dir, DIED_AT)
    for process in first.ranks:
        process.join(60)
    assert [process.exitcode for process in first.ranks] == [-9] * RANKS, first.logs()
    first.kill_trainers()
    try:
        return trained(folder / "second", run_dir, job)
    finally:
        launch.stop_smp(run_dir)


@pytest.mark.representative
def test_a_restart_of_three_ranks_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", tmp_path / "undisturbed")
    resumed = restarted(tmp_path, tmp_path / "run")
    assert [line["first"] for line in resumed] == [DIED_AT] * RANKS
    assert [line["digest"] for line in resumed] == [line["digest"] for line in whole]
    # Each step is audited, and one pass is discarded.
    assert [line["passes"] for line in whole] == [2 * STEPS + 1] * RANKS
    assert all("rerun" not in line["kinds"] for line in [*whole, *resumed])


def test_without_settled_buckets_the_first_step_differs_when_it_is_repeated(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", tmp_path / "undisturbed", unsettled)
    assert any("rerun" in line["kinds"] for line in whole)

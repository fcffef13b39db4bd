"""Execution of all cells of a campaign's plan that are not yet in its journal, on all CPU cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.inject.journal import Journal
from holdfast.inject.worker_pool import WorkerFailed, one_thread, run_jobs
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.journal import counts_in, open_journal
from holdfast_lab.campaign.plan import Cell, Plan
from holdfast_lab.campaign.trials import run_cell

CELLS_A_JOB = 16
PATIENCE_TIMEOUTS = 10  # a job has to end within this many times HOLDFAST_TIMEOUT_S

Job = TypeVar("Job")
Result = TypeVar("Result")
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class CellResult:
    """One cell of a campaign with its counts of faults."""

    cell: Cell
    counts: Counts


def available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def run_campaign(
    plan: Plan, directory: Path, *, workers: int | None = None, watch: Watch = lambda *_: None
) -> list[CellResult]:
    """Run every cell of a plan that the directory's journal does not hold yet.

    Args:
        plan: The plan.
        directory: Folder of the journal, with which a killed campaign continues.
        workers: Number of processes with one torch thread each; by default the number of cores.
        watch: Called with the number of finished cells and that of all cells.

    Returns:
        All results in the order of the plan, including those of earlier runs.

    Guarantees: the counts depend on plan and environment alone, not on ``workers`` or on how often
    the campaign was interrupted.

    Raises:
        ConfigError: The directory belongs to another campaign, or ``workers`` is less than 1.
        WorkerFailed: A worker raised, died or hung; finished cells are kept.
    """
    count = available_cores() if workers is None else workers
    if count < 1:
        raise ConfigError(f"--workers {count} must be at least 1")
    with closing(open_journal(directory, plan)) as journal:
        watch(len(journal.done), len(plan.cells))
        jobs = _jobs([cell for cell in plan.cells if cell.key not in journal.done])
        for results in run_or_fail(partial(_run_cells, plan), jobs, count):
            journal.append({key: counts.as_dict() for key, counts in results.items()})
            watch(len(journal.done), len(plan.cells))
        return _in_order(plan, journal)


def run_or_fail(
    work: Callable[[Job], Result], jobs: Sequence[Job], workers: int
) -> Iterator[Result]:
    """Run jobs with one thread each as ``run_jobs`` does; a worker that dies or hangs raises."""
    timeout_s = PATIENCE_TIMEOUTS * config.timeout_s()

    def lost(job: Job, exit_code: int | None) -> Result:
        late = f"did not end a job within {timeout_s:g} s"
        raise WorkerFailed(
            f"a worker {late if exit_code is None else f'died (exit code {exit_code})'}: run the "
            "same command again to continue, with fewer --workers if memory ran out; "
            f"{config.TIMEOUT_VARIABLE} sets the time of a job"
        )

    with one_thread():
        yield from run_jobs(work, jobs, workers=workers, timeout_s=timeout_s, lost=lost)


def finished(plan: Plan, directory: Path) -> list[CellResult]:
    """Return the results in a directory's journal; raise ConfigError as ``run_campaign`` does."""
    with closing(open_journal(directory, plan)) as journal:
        return _in_order(plan, journal)


def _in_order(plan: Plan, journal: Journal) -> list[CellResult]:
    done = counts_in(journal)
    return [CellResult(cell, done[cell.key]) for cell in plan.cells if cell.key in done]


def _jobs(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells that share their products, so that a worker computes these once."""
    jobs = []
    for _, group in groupby(cells, lambda c: (c.operator, c.dtype, c.shape, c.distribution)):
        sharing = list(group)
        jobs += [sharing[i : i + CELLS_A_JOB] for i in range(0, len(sharing), CELLS_A_JOB)]
    return jobs


def _run_cells(plan: Plan, cells: Sequence[Cell]) -> dict[str, Counts]:
    return {cell.key: run_cell(plan, cell) for cell in cells}

"""Execution of all trials of one cell; the counts depend on the plan and the cell only."""

import time
from itertools import cycle

import torch

from holdfast.inject.models import fault_model
from holdfast_lab.campaign.counts import PATIENCE, Counts, by_effect
from holdfast_lab.campaign.effects import HARMFUL
from holdfast_lab.campaign.end_to_end import clean_run, replay
from holdfast_lab.campaign.plan import ATTENTION, DISTRIBUTIONS, DTYPES, Cell, Plan, injected_dtype
from holdfast_lab.campaign.programs import make_program
from holdfast_lab.campaign.strikes import Strikes, strike
from holdfast_lab.campaign.tiles import run_tiles
from holdfast_lab.campaign.workload import Problem, workload


def run_cell(plan: Plan, cell: Cell) -> Counts:
    """Inject a cell's faults and count; the same on every machine that computes the same.

    Raises:
        ConfigError: Attention is asked for where torch's own kernel computes it.
    """
    if cell.operator == ATTENTION:
        return run_tiles(plan, cell)
    started_s = time.perf_counter()
    products = (cell.operator, cell.dtype, cell.shape, cell.distribution)
    problems = workload(*products, seed=plan.seed_of("products", *products))
    generator = torch.Generator().manual_seed(plan.seed_of("cell", cell.key))
    counts = _clean(cell, generator)
    model = fault_model(cell.fault, injected_dtype(DTYPES[cell.dtype], cell.site))
    tries = 0
    for problem in cycle(problems):
        wanted = plan.trials - counts.trials
        if wanted == 0 or tries >= PATIENCE * plan.trials:
            break
        strikes = strike(problem, cell.site, model, generator, wanted)
        tries += strikes.tries
        replays = plan.end_to_end_of(cell) - counts.replayed
        counts += _counted(strikes) + _replayed(problem, cell, strikes, replays)
    return counts + Counts(seconds=time.perf_counter() - started_s)


def _clean(cell: Cell, generator: torch.Generator) -> Counts:
    """Run a protected program without a fault on newly drawn operands."""
    draw = DISTRIBUTIONS[cell.distribution]
    program = make_program(cell.operator, cell.shape, DTYPES[cell.dtype], draw, generator)
    return clean_run(program.model, program.run)


def _counted(strikes: Strikes) -> Counts:
    return Counts(
        trials=len(strikes.effects),
        detected=int(strikes.detected.sum()),
        **by_effect(strikes.effects[~strikes.detected]),
        would_harm=int((strikes.effects == HARMFUL).sum()),
    )


def _replayed(problem: Problem, cell: Cell, strikes: Strikes, wanted: int) -> Counts:
    counts = Counts()
    for fault in range(min(wanted, len(strikes.effects))):
        outcome = replay(problem, strikes.edit(fault), kept=cell.site == "cached_checksum")
        counts += Counts(
            replayed=1,
            replayed_detected=int(outcome.detected),
            replayed_corrected=int(outcome.corrected and outcome.detected),
            disagreements=int(outcome.detected != bool(strikes.detected[fault])),
        )
    return counts

"""All trials of one cell: a pure function of the plan and the cell."""

import time
from dataclasses import asdict, dataclass, fields
from itertools import cycle
from typing import Any

import torch

from holdfast.inject.campaign.effects import EFFECTS, HARMFUL
from holdfast.inject.campaign.end_to_end import clean_run, replay
from holdfast.inject.campaign.models import fault_model
from holdfast.inject.campaign.plan import DISTRIBUTIONS, DTYPES, Cell, Plan, struck_dtype
from holdfast.inject.campaign.programs import make_program
from holdfast.inject.campaign.strikes import Strikes, strike
from holdfast.inject.campaign.workload import Problem, workload

# A cell ends after this many tries for each fault it wants: the bit that is to flip is then
# (nearly) never 0, or never 1, there.
PATIENCE = 8


@dataclass(frozen=True)
class Counts:
    """What was counted in a cell.

    Args:
        trials: faults injected; fewer than planned where too few elements can have the fault.
        detected: of these, those that the verification pass suspected.
        masked, below_rounding, harmless, harmful: undetected faults by effect.
        would_harm: faults of harmful effect, detected or not.
        replayed: trials that also ran end to end; replayed_detected: reported there;
            replayed_corrected: reported, and the result was a clean run's, bit for bit;
            disagreements: reported end to end and not suspected in one pass, or the reverse.
        clean_rows: rows of clean products verified; clean_suspects: of these, suspected;
            false_alarms: events reported of them.
        seconds: wall time of the cell.
    """

    trials: int = 0
    detected: int = 0
    masked: int = 0
    below_rounding: int = 0
    harmless: int = 0
    harmful: int = 0
    would_harm: int = 0
    replayed: int = 0
    replayed_detected: int = 0
    replayed_corrected: int = 0
    disagreements: int = 0
    clean_rows: int = 0
    clean_suspects: int = 0
    false_alarms: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, Any]:
        """As plain values, in the order of the fields."""
        return asdict(self)


def run_cell(plan: Plan, cell: Cell) -> Counts:
    """Inject a cell's faults and count; the same on every machine that computes the same."""
    started_s = time.perf_counter()
    products = (cell.operator, cell.dtype, cell.shape, cell.distribution)
    problems = workload(*products, seed=plan.seed_of("products", *products))
    generator = torch.Generator().manual_seed(plan.seed_of("cell", cell.key))
    counts = _clean(cell, generator)
    model = fault_model(cell.fault, struck_dtype(DTYPES[cell.dtype], cell.site))
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
    """One protected run on operands of its own, without a fault."""
    draw = DISTRIBUTIONS[cell.distribution]
    program = make_program(cell.operator, cell.shape, DTYPES[cell.dtype], draw, generator)
    run = clean_run(program)
    return Counts(clean_rows=run.rows, clean_suspects=run.suspects, false_alarms=run.alarms)


def _counted(strikes: Strikes) -> Counts:
    effects = strikes.effects.long()
    missed = effects[~strikes.detected].bincount(minlength=len(EFFECTS)).tolist()
    return Counts(
        trials=len(effects),
        detected=int(strikes.detected.sum()),
        **dict(zip(EFFECTS, missed, strict=True)),
        would_harm=int((effects == HARMFUL).sum()),
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

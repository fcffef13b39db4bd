"""Who was wrong, when several units computed the same thing: majorities, and how soon they name.

Pure: what a unit computed is compared as opaque outcomes.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError

MAX_ROUNDS = 3  # passes for others, or again for oneself, after a unit's own

Digests = tuple[str, ...]  # of one rank's pass: the whole of it, then its accumulation groups
Outcome = tuple[Digests, ...]  # of one unit's pass: of each of its ranks


@dataclass(frozen=True)
class Run:
    """One pass: ``by`` computed what ``target`` is there for.

    ``outcome`` is what came out; of the accumulation group ``part`` alone, or of the whole step.
    ``faulty``: a fault was found in it and not repaired, so that it is no witness.
    """

    target: int
    by: int
    outcome: Outcome
    part: int | None = None
    faulty: bool = False


@dataclass(frozen=True)
class Judgement:
    """What the runs say.

    Attributes:
        right: by target, the outcome that a majority of different units came to.
        wrong: the runs that differ from it.
        undecided: targets for which there is no such majority.
    """

    right: dict[int, Outcome]
    wrong: tuple[Run, ...]
    undecided: tuple[int, ...]

    def accused(self) -> dict[int, int]:
        """Units that computed something wrong, and how often."""
        units = [run.by for run in self.wrong]
        return {unit: units.count(unit) for unit in sorted(set(units))}


def judge(runs: Sequence[Run]) -> Judgement:
    """Compare what different units computed for each target.

    An outcome is right if two different units or more came to it, and more of them than to any
    other: a unit that agrees with itself proves nothing.
    """
    targets = sorted({run.target for run in runs})
    right = {target: _majority([run for run in runs if run.target == target]) for target in targets}
    known = {target: outcome for target, outcome in right.items() if outcome is not None}
    wrong = [run for run in runs if run.target in known and _differs(run, known[run.target])]
    return Judgement(known, tuple(wrong), tuple(t for t in targets if right[t] is None))


def _majority(runs: Sequence[Run]) -> Outcome | None:
    units = defaultdict(set)
    for run in runs:
        if run.part is None and not run.faulty:
            units[run.outcome].add(run.by)
    ranked = sorted(units.items(), key=lambda item: -len(item[1]))
    if not ranked or len(ranked[0][1]) < 2:
        return None
    tied = len(ranked) > 1 and len(ranked[1][1]) == len(ranked[0][1])
    return None if tied else ranked[0][0]


def _differs(run: Run, right: Outcome) -> bool:
    if run.part is None:
        return run.outcome != right
    return part_of(right, run.part) != run.outcome


def part_of(outcome: Outcome, part: int) -> Outcome:
    """What an outcome says about one accumulation group."""
    return tuple((digests[1 + part],) for digests in outcome)


def is_sampled(rate: float, seed: int, step: int) -> bool:
    """Whether a step is among the share that is audited; the same on all ranks."""
    return rate > 0 and random.Random(f"{seed}/{step}/shadow").random() < rate


def schedule(units: int, seed: int, step: int) -> list[int]:
    """By how much the rounds of an audit are shifted: unit u computes for (u + shift) mod units.

    Each shift is drawn equally often, so that each unit is in turn the shadow of each other one.
    Different units first; then, where there are no more of them, the target itself again.
    """
    others = list(range(1, units))
    random.Random(f"{seed}/{step}/shift").shuffle(others)
    return ([*others, 0] * MAX_ROUNDS)[:MAX_ROUNDS]


def part_for(groups: int, seed: int, step: int) -> int:
    """Which accumulation group an audit looks at."""
    return random.Random(f"{seed}/{step}/group").randrange(groups)


@dataclass(frozen=True)
class StepsToName:
    """How many steps pass until a rank at fault is named: expected, and a 95 % range."""

    expected: float
    low: float
    high: float


def expected_steps_to_name(
    rate: float, ranks: int, error_rate: float = 1.0, *, confidence: float = 0.95
) -> StepsToName:
    """Steps until one persistently faulty replica is named by its shadows.

    In an audited step each replica makes its own pass and one for another; the faulty one is named
    if either is wrong: ``p = rate · (1 − (1 − error_rate)²)``. The number of steps is geometric:
    1/p are expected, and the quantiles bound them.

    Args:
        rate: share of steps that are audited, in (0, 1].
        ranks: replicas; with two no persistent fault can be told from the other side's.
        error_rate: share of its passes that are wrong, independent of each other, in (0, 1]; 1 is a
            device that errs in every pass.
        confidence: of the range, between 0 and 1.

    Returns:
        Steps, infinitely many with two replicas. Not covered: errors that come in bursts, which
        take longer than their mean rate says; passes of a chosen accumulation group only.

    Raises:
        ConfigError: a rate or confidence is out of range, or there are fewer than 2 replicas.
    """
    if not (0 < rate <= 1 and 0 < error_rate <= 1 and 0 < confidence < 1 and ranks >= 2):
        raise ConfigError(
            f"rate = {rate}, error_rate = {error_rate}, confidence = {confidence}, ranks = {ranks}:"
            " rates in (0, 1], a confidence between 0 and 1 and at least 2 ranks are needed"
        )
    if ranks == 2:
        return StepsToName(math.inf, math.inf, math.inf)
    named = rate * (1 - (1 - error_rate) ** 2)
    tail = (1 - confidence) / 2
    return StepsToName(1 / named, _quantile(named, tail), _quantile(named, 1 - tail))


def _quantile(chance: float, share: float) -> float:
    """The least number of trials by which this share of geometric waits has ended."""
    return 1.0 if chance >= 1 else max(1.0, math.ceil(math.log1p(-share) / math.log1p(-chance)))

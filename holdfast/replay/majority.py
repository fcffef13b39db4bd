"""The majority among units that computed the same step, and how soon it names a faulty one.

These are pure functions: results of passes are digests, which are only compared for equality.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ConfigError

MAX_ROUNDS = 3  # passes of each unit for others, or again for itself, after its own

Digests = tuple[str, ...]  # of one rank's pass: of all of it, then of each accumulation group
Outcome = tuple[Digests, ...]  # the digests of each rank of a unit


@dataclass(frozen=True)
class Run:
    """One pass over the micro-batch of a unit.

    Attributes:
        target: Unit whose micro-batch was computed.
        by: Unit that computed it.
        outcome: Digests of the result.
        part: Accumulation group that was computed; None for the whole step.
        faulty: True if a fault was found in the pass and not repaired, so that it has no vote.
    """

    target: int
    by: int
    outcome: Outcome
    part: int | None = None
    faulty: bool = False


@dataclass(frozen=True)
class Judgement:
    """The result of comparing the runs of a step.

    Attributes:
        right: Outcome that a majority of different units computed, by target.
        wrong: Runs that differ from it.
        undecided: Targets without such a majority.
    """

    right: dict[int, Outcome]
    wrong: tuple[Run, ...]
    undecided: tuple[int, ...]

    def accused(self) -> dict[int, int]:
        """Return the number of wrong runs of each unit that has any."""
        units = [run.by for run in self.wrong]
        return {unit: units.count(unit) for unit in sorted(set(units))}


def judge(runs: Sequence[Run]) -> Judgement:
    """Compare the outcomes of different units for each target.

    An outcome is right if at least two different units computed it, and more of them than any other
    outcome. Several equal outcomes of one unit count as one vote.
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
    """Return the digests of one accumulation group."""
    return tuple((digests[1 + part],) for digests in outcome)


def is_sampled(rate: float, seed: int, step: int) -> bool:
    """Return whether a step is audited, from a seed that is the same on all ranks."""
    return rate > 0 and random.Random(f"{seed}/{step}/shadow").random() < rate


def schedule(units: int, seed: int, step: int) -> list[int]:
    """Return the shift of each round of an audit: unit u computes for (u + shift) mod units.

    Shifts are drawn with equal probability, so that each unit is in turn the shadow of each other
    one. A target is computed by different units first; if there are no more, by itself again.
    """
    others = list(range(1, units))
    random.Random(f"{seed}/{step}/shift").shuffle(others)
    return ([*others, 0] * MAX_ROUNDS)[:MAX_ROUNDS]


def part_for(groups: int, seed: int, step: int) -> int:
    """Return the accumulation group that an audit computes."""
    return random.Random(f"{seed}/{step}/group").randrange(groups)


@dataclass(frozen=True)
class StepsToName:
    """Number of steps until a faulty rank is named: the expectation and a confidence range."""

    expected: float
    low: float
    high: float


def expected_steps_to_name(
    rate: float, ranks: int, error_rate: float = 1.0, *, confidence: float = 0.95
) -> StepsToName:
    """Return the number of steps until shadows name one persistently faulty replica.

    In an audited step each replica computes its own pass and one for another replica. The faulty
    one is named if either is wrong: ``p = rate · (1 − (1 − error_rate)²)``. The number of steps
    has a geometric distribution with mean 1/p.

    Args:
        rate: Share of steps that are audited, in (0, 1].
        ranks: Number of replicas. Of two, none can be named: nothing says which of them is wrong.
        error_rate: Share of the faulty replica's passes that are wrong, independently of each
            other, in (0, 1].
        confidence: Probability that the number of steps lies in the range, between 0 and 1.

    Returns:
        The expectation and the range, infinite with two replicas. Not covered: errors in bursts,
        which take longer than their mean rate says, and audits of one accumulation group.

    Raises:
        ConfigError: A rate or the confidence is out of range, or there are fewer than 2 replicas.

    Example:
        >>> expected_steps_to_name(0.01, 3)  # one step in a hundred, three replicas
        StepsToName(expected=100.0, low=3, high=368)
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
    """Return a quantile of the geometric distribution with success probability ``chance``."""
    return 1.0 if chance >= 1 else max(1.0, math.ceil(math.log1p(-share) / math.log1p(-chance)))

"""The campaign of the zoo: every loop with every fault, for several seeds, and the counts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.inject.statistics import Rate
from holdfast_lab.zoo.cases import EQUAL, REFUSED, Outcome, run_case
from holdfast_lab.zoo.clock import Calm, observe
from holdfast_lab.zoo.loop import FaultKind, Form, Loop


@dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    loop: type[Loop]
    fault: FaultKind
    seed: int


def cases(loops: Sequence[type[Loop]], seeds: Sequence[int]) -> list[Case]:
    """List the runs: each loop calm and with each of its faults; a refused one once."""
    found = []
    for loop in loops:
        refused = loop.form is Form.REFUSED
        faults = (FaultKind.CALM,) if refused else loop.faults
        found += [
            Case(loop, fault, seed)
            for fault in faults
            for seed in (seeds[:1] if refused else seeds)
        ]
    return found


def run(listed: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases, which are in the order of their loops; yield what came of each."""
    calm: dict[type[Loop], Calm] = {}
    for case in listed:
        if case.loop not in calm:
            calm[case.loop] = observe(case.loop)
        yield run_case(case.loop, case.fault, case.seed, calm[case.loop])


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return the table of counts: a row for each loop and each fault, and one for all of them."""
    keys = list(dict.fromkeys((each.loop, each.fault) for each in outcomes))
    found = []
    for loop, fault in keys:
        found.append(
            (loop, fault, *_counts([o for o in outcomes if (o.loop, o.fault) == (loop, fault)]))
        )
    for fault in dict.fromkeys(each.fault for each in outcomes):
        found.append(("all", fault, *_counts([o for o in outcomes if o.fault == fault])))
    return [*found, ("all", "all", *_counts(outcomes))]


COLUMNS = ("loop", "fault", "runs", "equal", "refused", "wrong", "95 % of wrong", "harmful bare")


def _counts(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    results = Counter(each.result for each in outcomes)
    wrong = Rate(sum(not each.good for each in outcomes), len(outcomes))
    low, high = wrong.interval
    tried = [each.harmful for each in outcomes if each.harmful is not None]
    harmful = f"{sum(tried)} of {len(tried)}" if tried else "–"
    numbers = len(outcomes), results[EQUAL], results[REFUSED], wrong.count
    return (*map(str, numbers), f"{low:.1%} to {high:.1%}", harmful)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the counts as plain values: of all runs, and of each loop and fault."""
    return {
        "runs": len(outcomes),
        "results": dict(Counter(each.result for each in outcomes)),
        "wrong": sum(not each.good for each in outcomes),
        "wrong_interval": Rate(sum(not o.good for o in outcomes), len(outcomes)).interval,
        "harmful_bare": sum(bool(each.harmful) for each in outcomes),
        "tried_bare": sum(each.harmful is not None for each in outcomes),
        "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows(outcomes)],
    }


def described(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return every outcome as plain values."""
    return [asdict(each) for each in outcomes]

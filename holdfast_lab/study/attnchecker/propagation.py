"""``attnchecker.propagation``: the effect of one extreme element on later matrices (table 1)."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product as every

import torch

from holdfast.inject.statistics import Rate
from holdfast_lab.study.attnchecker.models import BASE, PAPER_MODELS, SMALL, TINY, subject
from holdfast_lab.study.attnchecker.paper import PROPAGATION, SAME_TYPE, propagation
from holdfast_lab.study.attnchecker.patterns import CLEAN, pattern
from holdfast_lab.study.attnchecker.probe import NAMES, STRUCK, TYPES, Strike, named
from holdfast_lab.study.attnchecker.subjects import Subject
from holdfast_lab.study.attnchecker.vulnerability import enlarge
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study, watched

Patterns = Mapping[str, Counter[str]]
UNIT = ", Q and K of unit variance"
FREQUENT = 0.1  # share of the trials above which notes name a pattern


def spread(case: Subject, strike: Strike, trials: int) -> Patterns:
    """Count the patterns of each of the paper's matrices and of O over many injected faults."""
    later = PROPAGATION[strike.kind][strike.matrix]
    found: dict[str, Counter[str]] = defaultdict(Counter)
    with named(case) as forward:
        clean = forward(None).matrices
        for _ in range(trials):
            faulty = forward(strike)
            assert faulty.struck, f"{strike.matrix} has no element to strike"
            for matrix in later:
                found[matrix][str(pattern(clean[matrix], faulty.matrices[matrix]))] += 1
    return found


def row(model: str, strike: Strike, trials: int, found: Patterns) -> Row:
    """Compute how often each matrix that shows the fault has the paper's pattern."""
    published = propagation(strike.kind, strike.matrix, UNIT if model.endswith(UNIT) else "")
    rates = {}
    alike = seen = 0
    for matrix, counts in found.items():
        shown = trials - counts[CLEAN]
        shape = published[matrix].printed.partition("-")[0]
        if shown:
            met = sum(n for text, n in counts.items() if text.partition("-")[0] == shape)
            rates[matrix] = Rate(met, shown)
        alike, seen = alike + counts[published[matrix].printed], seen + shown
    rates[SAME_TYPE] = Rate(alike, seen)
    rates = {"reaches O, %": Rate(trials - found["O"][CLEAN], trials)} | rates
    case: Case = {"model": model, "struck": strike.matrix, "trials": trials}
    return Row.of_rates(
        f"{NAMES[strike.kind]} in one element: share of the paper's shape, %",
        case,
        rates,
        published,
        note=", ".join(f"{matrix} {_frequent(counts)}" for matrix, counts in found.items()),
    )


def _frequent(counts: Counter[str]) -> str:
    total = counts.total() - counts[CLEAN]
    texts = [t for t, n in counts.most_common() if t != CLEAN and n >= FREQUENT * total]
    return " or ".join(texts) or CLEAN


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    size = settings.choose(TINY, SMALL, replace(BASE, batch=1))
    trials = settings.choose(2, 48, 5000)
    one = replace(size, layers=1)
    cases = {name: subject(name, one, seed=settings.seed) for name in PAPER_MODELS}
    trios = list(every(TYPES, STRUCK, cases.items()))
    large = {f"{name}{UNIT}": subject(name, one, seed=settings.seed) for name in PAPER_MODELS}
    for case in large.values():
        enlarge(case)
    trios += every(("near_inf",), STRUCK, large.items())
    with torch.random.fork_rng(devices=[]):
        for kind, struck, (name, case) in watched(trios, progress):
            generator = settings.generator("propagation", name, kind, struck)
            strike = Strike(struck, kind, generator)
            yield row(name, strike, trials, spread(case, strike, trials))


STUDY = Study(
    name="attnchecker.propagation",
    paper="ATTNChecker, table 1",
    reproduces="an extreme element of Q spoils a row of the scores, one of K a column and then "
    "everything, one of V a column of the context (∞ INF, ∞* of both signs, Θ NaN, N near-INF, M a "
    "mixture, ~ changed, but not extreme)",
    run=_run,
)

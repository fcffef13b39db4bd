"""``attnchecker.detection``: extreme values and flipped exponent bits in attention (section 5.2).

The first attention block of each of the paper's models is protected in three ways: every product by
itself, as three sections, and inside the tiles of the fused kernel. Faults are injected into copies
of what the model computed, which are then verified. Probabilities and tiles are verified and
repaired one by one. A sample of all faults also runs through a training step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from holdfast import native
from holdfast.inject.statistics import Rate
from holdfast_lab.campaign.counts import Counts
from holdfast_lab.campaign.models import DIRECTIONS
from holdfast_lab.study.attnchecker.injected_products import Replays, computed, injected_rows
from holdfast_lab.study.attnchecker.injected_sections import as_sections, injected_probabilities
from holdfast_lab.study.attnchecker.injected_tiles import (
    STAGES,
    heads_of,
    injected_tiles,
    tile_shot,
)
from holdfast_lab.study.attnchecker.models import BASE, FAMILIES, PAPER_MODELS, SMALL, TINY, subject
from holdfast_lab.study.attnchecker.paper import (
    ALL_CORRECTED,
    ALL_DETECTED,
    CORRECTED_BY_COPY,
)
from holdfast_lab.study.attnchecker.probe import NAMES, TYPES, Strike
from holdfast_lab.study.attnchecker.subjects import Size, Subject
from holdfast_lab.study.registry import Case, Progress, Row, Settings, Study

PRODUCTS, SECTIONS, TILES = "each product", "sections", "fused tiles"
COPIES = "sections, a clean copy"
COPIED = "repaired from a clean copy, which cannot fail once a fault is found"
EXTREMES, FLIPS = "one extreme element", "one flipped bit of an exponent"
EXPONENT = range(30, 22, -1)  # of fp32, from the top
REPAIRED = "repaired bit for bit, %"
FOUND, BELOW, HARMLESS, HARMFUL = (
    "found, %",
    "missed, below rounding, %",
    "missed, harmless, %",
    "missed, harmful, %",
)

Struck = Callable[[Strike, int], Counts]
Key = tuple[str, str, str, str]  # protected by, model, matrix, kind
Tallies = Mapping[Key, Counts]


@dataclass(frozen=True)
class Effort:
    """The number of faults of each kind in a matrix.

    Attributes:
        at_once: Number of extreme values if one pass verifies many faults.
        singly: Number of extreme values if each fault needs a pass of its own.
        flips: Both numbers for flips of a bit.
        replays: Number of extreme values, and of flips, that also run through a training step.
    """

    size: Size
    bits: Iterable[int]
    at_once: int
    singly: int
    flips: tuple[int, int]
    replays: tuple[int, int]

    def counts(self, kind: str, *, at_once: bool) -> tuple[int, int]:
        """Return the number of faults to inject and the number of steps to replay."""
        flip = kind not in TYPES
        wanted = self.flips if flip else (self.at_once, self.singly)
        return wanted[not at_once], self.replays[flip]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all kinds of faults."""
        return (*TYPES, *(f"flip-{bit}-{way}" for bit in self.bits for way in ("up", "down")))


def effort_of(settings: Settings) -> Effort:
    """Return the sizes of the study; the paper has about 5,000 faults in each matrix of a block."""
    small = replace(SMALL, layers=1)
    base = replace(BASE, layers=1, vocabulary=SMALL.vocabulary, batch=2)
    return settings.choose(
        Effort(replace(TINY, layers=1), (30,), 8, 4, (8, 2), (1, 0)),
        Effort(small, EXPONENT, 1000, 100, (500, 25), (3, 1)),
        Effort(base, EXPONENT, 5000, 5000, (5000, 500), (3, 1)),
    )


@dataclass(frozen=True)
class Target:
    """A matrix under a protection, with functions that inject faults into it or a whole step.

    If ``copied``, ``strike`` repairs from a clean copy, which cannot fail once a fault is detected.
    """

    method: str
    model: str
    matrix: str
    at_once: bool
    strike: Struck
    replay: Struck
    copied: bool = False


def targets(name: str, effort: Effort, seed: int) -> Iterator[Target]:
    """Yield every matrix of a model's first attention block, under every protection."""
    case = subject(name, effort.size, seed=seed)
    yield from _products(PRODUCTS, case)
    yield from _products(SECTIONS, as_sections(case, effort.size.heads))
    if "sdpa" in FAMILIES[name].attentions and native.core is not None:
        yield from _tiles(case, subject(name, effort.size, attention="sdpa", seed=seed), effort)


def _products(method: str, case: Subject) -> Iterator[Target]:
    found = computed(case, {matrix.forward for matrix in case.matrices.values()})
    replays = Replays(case)
    for name, matrix in case.matrices.items():
        product = found[matrix.forward]
        strike: Struck = partial(injected_rows, product, matrix)
        copied = name == "AP"  # an operand of a product, verified by the sums of its rows
        if copied:
            strike = partial(injected_probabilities, product.a)
        yield Target(method, case.name, name, not copied, strike, replays.strikes, copied)


def _tiles(case: Subject, fused: Subject, effort: Effort) -> Iterator[Target]:
    heads = heads_of(case, effort.size.heads)
    replays = Replays(fused)

    def replay(strike: Strike, count: int) -> Counts:
        shots = (tile_shot(heads[0], strike, calls=len(heads)) for _ in range(count))
        return sum((replays.shot(shot) for shot in shots), Counts())

    for name in STAGES:
        yield Target(TILES, case.name, name, False, partial(injected_tiles, heads), replay)


def tally(target: Target, effort: Effort, settings: Settings) -> dict[Key, Counts]:
    """Count the outcomes of every kind of fault in one matrix."""
    found = {}
    for kind in effort.kinds:
        key = target.method, target.model, target.matrix, kind
        strike = Strike(target.matrix, kind, settings.generator("detection", *key))
        faults, replays = effort.counts(kind, at_once=target.at_once)
        struck, replayed = target.strike(strike, faults), target.replay(strike, replays)
        if target.copied:
            found[COPIES, *key[1:]] = struck
            struck = replace(struck, replayed=0, replayed_detected=0, replayed_corrected=0)
        found[key] = struck + replayed
    return found


def rows_of(found: Tallies) -> Iterator[Row]:
    """Make rows of extreme values by model and matrix, and of flips by matrix and bit."""
    for method in (PRODUCTS, SECTIONS, TILES):
        places = dict.fromkeys(key[1:3] for key in found if key[0] == method)
        for model, matrix in places:
            yield _extremes(found, method, model, matrix)
    for model, matrix in dict.fromkeys(key[1:3] for key in found if key[0] == COPIES):
        yield _copies(found, model, matrix)
    for method in (PRODUCTS, SECTIONS, TILES):
        cells = dict.fromkeys(key[2:] for key in found if key[0] == method and key[3] not in TYPES)
        for matrix, kind in cells:
            models = [key for key in found if (key[0], *key[2:]) == (method, matrix, kind)]
            counts = sum((found[key] for key in models), Counts())
            if counts.trials:
                yield _flips(method, matrix, kind, counts)


def _extremes(found: Tallies, method: str, model: str, matrix: str) -> Row:
    chosen = {kind: found[method, model, matrix, kind] for kind in TYPES}
    rates = {
        f"{NAMES[kind]} found, %": Rate(counts.detected, counts.trials)
        for kind, counts in chosen.items()
    }
    published = {name: ALL_DETECTED for name, rate in rates.items() if rate.trials}
    every = sum(chosen.values(), Counts())
    rates[REPAIRED] = Rate(every.replayed_corrected, every.replayed)
    published |= {REPAIRED: ALL_CORRECTED} if every.replayed else {}
    case: Case = {
        "protected by": method,
        "model": model,
        "struck": matrix,
        "faults": every.trials,
        "repairs tried": every.replayed,
    }
    return Row.of_rates(EXTREMES, case, rates, published)


def _copies(found: Tallies, model: str, matrix: str) -> Row:
    """Count the repairs in which a clean copy stood for the recomputation."""
    counts = sum((found[COPIES, model, matrix, kind] for kind in TYPES), Counts())
    case: Case = {"model": model, "struck": matrix}
    rates = {REPAIRED: Rate(counts.replayed_corrected, counts.replayed)}
    return Row.of_rates(COPIED, case, rates, {REPAIRED: CORRECTED_BY_COPY})


def _flips(method: str, matrix: str, kind: str, counts: Counts) -> Row:
    _, bit, way = kind.split("-")
    below = counts.masked + counts.below_rounding
    rates = {
        FOUND: Rate(counts.detected, counts.trials),
        BELOW: Rate(below, counts.trials),
        HARMLESS: Rate(counts.harmless, counts.trials),
        HARMFUL: Rate(counts.harmful, counts.trials),
        REPAIRED: Rate(counts.replayed_corrected, counts.replayed_detected),
    }
    case: Case = {
        "protected by": method,
        "struck": matrix,
        "bit": int(bit),
        "flipped": DIRECTIONS[way],
        "faults": counts.trials,
    }
    return Row.of_rates(FLIPS, case, rates)


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    effort = effort_of(settings)
    progress.begin(float(len(PAPER_MODELS)))
    found: dict[Key, Counts] = {}
    for name in PAPER_MODELS:
        chosen = list(targets(name, effort, settings.seed))
        for target in chosen:
            found |= tally(target, effort, settings)
            progress.advance(1 / len(chosen))
    yield from rows_of(found)


def verdict(rows: list[Row]) -> str:
    """Check that every extreme value is detected and, where claimed, repaired bit for bit."""
    for row in rows:
        if row.table in (EXTREMES, COPIED) and min(row.measured.values()) < 100:
            return f"an extreme value is missed or remains: {dict(row.case)}"
    return ""


STUDY = Study(
    name="attnchecker.detection",
    paper="ATTNChecker, section 5.2",
    reproduces="100 % of INF, NaN and near-INF in attention are detected and corrected; beside "
    "them flips of every exponent bit, and what becomes of those that are missed",
    run=_run,
    verdict=verdict,
)

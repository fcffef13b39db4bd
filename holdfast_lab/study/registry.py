"""Studies: tables, figures or claims of a paper, measured again beside the paper's values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from holdfast.inject.statistics import Rate
from holdfast_lab.study.published import Bounds, Published, Verdict, percent_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = object  # matplotlib is an optional dependency, which only plots import

Effort = Literal["tiny", "reduced", "full"]
Case = Mapping[str, str | int]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Settings:
    """The amount of work of a study and its seed.

    Args:
        effort: ``"reduced"`` takes at most a minute or two on two cores, ``"full"`` has the paper's
            counts, and ``"tiny"`` only shows that everything runs.
        seed: Seed of the operands, which do not depend on the order in which they are drawn.
    """

    effort: Effort = "reduced"
    seed: int = 0

    def choose(self, tiny: Value, reduced: Value, full: Value) -> Value:
        """Return the one of the given values that belongs to this amount of work."""
        return {"tiny": tiny, "reduced": reduced, "full": full}[self.effort]

    def generator(self, *case: object) -> torch.Generator:
        """Return the generator of one case, which depends on the seed and the case's name only."""
        digest = blake2b(repr((self.seed, *case)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


class Progress(Protocol):
    """Receives the total amount of work, in any unit, and then the amounts that are done."""

    def begin(self, total: float) -> None:
        """Receive the total amount of work, once before it starts."""

    def advance(self, amount: float) -> None:
        """Receive the amount of work that was just done."""


class Unwatched:
    """Discards all progress reports."""

    def begin(self, total: float) -> None:
        """Ignore the amount of work."""

    def advance(self, amount: float) -> None:
        """Ignore the amount of work that was done."""


def watched(items: Sequence[Value], progress: Progress) -> Iterator[Value]:
    """Yield the items of a study's work; each is done when the next one is asked for."""
    progress.begin(float(len(items)))
    for item in items:
        yield item
        progress.advance(1)


@dataclass(frozen=True)
class Row:
    """A row of a result: a case, its measurements, and the paper's values.

    Args:
        table: Heading of the table that the row belongs to.
        case: Parameters of the case, such as distribution and size.
        measured: Measurements by quantity; empty if they cannot be made on this machine.
        published: Values of the paper by quantity.
        note: Remark that is always shown beside the row.
        intervals: 95 % intervals of counted quantities (``Range.meets`` says which ones agree).
        trials: Number of trials of counted quantities.
    """

    table: str
    case: Case
    measured: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""
    intervals: Mapping[str, Bounds] = field(default_factory=dict)
    trials: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_rates(
        cls,
        table: str,
        case: Case,
        rates: Mapping[str, Rate],
        published: Mapping[str, Published] | None = None,
        note: str = "",
    ) -> "Row":
        """Make a row of rates and their intervals in percent, without those that have no trials."""
        known = {name: rate for name, rate in rates.items() if rate.trials}
        measured = {name: 100 * rate.value for name, rate in known.items()}
        intervals = {name: percent_interval(rate) for name, rate in known.items()}
        trials = {name: rate.trials for name, rate in known.items()}
        return cls(table, case, measured, published or {}, note, intervals, trials)

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """Verdict on each of the paper's values; without trials it is that nothing was done."""
        return {name: one.verdict(self._bounds(name)) for name, one in self.published.items()}

    def differing(self) -> list[str]:
        """List the quantities that were measured outside of the paper's range."""
        differs = (Verdict.EXPLAINED, Verdict.UNEXPLAINED)
        return [name for name, verdict in self.verdicts.items() if verdict in differs]

    def _bounds(self, name: str) -> Bounds | None:
        if name not in self.measured:
            return None
        return self.intervals.get(name, (self.measured[name], self.measured[name]))

    def as_dict(self) -> dict[str, object]:
        """Return the row as values that JSON can hold."""
        return {
            "table": self.table,
            **{n: dict(getattr(self, n)) for n in ("case", "measured", "intervals", "trials")},
            "published": {name: self._comparison(name) for name in self.published},
            "note": self.note,
        }

    def _comparison(self, name: str) -> dict[str, object]:
        """Return the paper's value of a quantity, its range, and the verdict."""
        one = self.published[name]
        return {
            "text": one.text,
            "value": one.value,
            "source": one.source,
            "range": one.range.text,
            "range_source": one.range.source,
            "best": one.best,
            "verdict": self.verdicts[name],
            "explanation": one.otherwise if name in self.differing() else "",
        }


Run = Callable[[Settings, Progress], Iterator[Row]]
Plot = Callable[[list[Row], Figure], None]
Export = Callable[[list[Row]], object]


@dataclass(frozen=True)
class Study:
    """A table, figure or claim of a paper that can be measured again.

    Args:
        name: Name on the command line, ``paper.subject``.
        paper: The paper and the section, table or figure.
        reproduces: One sentence about the result that is measured again.
        run: Function that yields rows as they are measured.
        plot: Function that draws the rows; None if there is no plot.
        verdict: Function that says how the rows break a claim of holdfast; empty if they do not.
        export: Function that makes values of the rows that other verbs read; None if none does.
    """

    name: str
    paper: str
    reproduces: str
    run: Run
    plot: Plot | None = None
    verdict: Callable[[list[Row]], str] = lambda rows: ""
    export: Export | None = None

    @property
    def module(self) -> str:
        """The module that computes the rows, which depend on its imports."""
        return self.run.__module__

"""Studies: tables, figures or claims of a paper, measured again beside the paper's values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

from holdfast.inject.statistics import Rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Figure
else:
    Figure = object  # matplotlib is an optional dependency, which only plots import

Effort = Literal["tiny", "reduced", "full"]
Agreement = Literal["", "within", "outside", "paper only"]
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
class Published:
    """A value as the paper prints it, and the range in which a measurement reproduces it.

    Args:
        value: The paper's value; None if it prints a range only.
        low: Lower end of the range in which a measurement agrees.
        high: Upper end of this range.
        source: Table or section of the paper.
        otherwise: Explanation that is shown if a measurement is outside of the range.
        printed: Text of the paper if it prints no number, such as a formula.
    """

    value: float | None
    low: float = -inf
    high: float = inf
    source: str = ""
    otherwise: str = ""
    printed: str = ""

    def meets(self, low: float, high: float) -> bool:
        """Return whether a measurement between these bounds agrees; a NaN never does."""
        return self.low <= high and low <= self.high

    @property
    def text(self) -> str:
        """Text of the paper: the formula, the value, or the range."""
        if self.printed:
            return self.printed
        return shown(self.value) if self.value is not None else self.range

    @property
    def range(self) -> str:
        """Text of the range, ``low–high``, or its only bound."""
        if self.low == -inf:
            return "" if self.high == inf else f"≤ {shown(self.high)}"
        return f"≥ {shown(self.low)}" if self.high == inf else between(self.low, self.high)


def between(low: float, high: float) -> str:
    """Format the range from a lower to an upper bound as text."""
    return shown(low) if low == high else f"{shown(low)}–{shown(high)}"


def shown(value: float) -> str:
    """Format a number with three significant digits; counts are written in full."""
    if isinstance(value, int) or (value == round(value, 0) and abs(value) < 1e6):
        return f"{value:.0f}"
    return f"{value:.3g}"


def percent_interval(rate: Rate) -> tuple[float, float]:
    """Return the 95 % interval of a rate in percent."""
    low, high = rate.interval
    return 100 * low, 100 * high


@dataclass(frozen=True)
class Row:
    """A row of a result: a case, its measurements, and the paper's values.

    Args:
        table: Heading of the table that the row belongs to.
        case: Parameters of the case, such as distribution and size.
        measured: Measurements by quantity; empty if they cannot be made on this machine.
        published: Values of the paper by quantity.
        note: Remark that is always shown beside the row.
        intervals: 95 % intervals of counted quantities. An interval that overlaps the paper's range
            agrees with it.
    """

    table: str
    case: Case
    measured: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

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
        return cls(table, case, measured, published or {}, note, intervals)

    @property
    def agreement(self) -> Agreement:
        """Agreement of the measured values with the paper's; empty if the paper prints none."""
        if not self.published:
            return ""
        compared = [name for name in self.published if name in self.measured]
        if not compared:
            return "paper only"
        return "outside" if self.outside() else "within"

    def outside(self) -> list[str]:
        """List the quantities that were measured outside of the paper's range."""
        return [
            name
            for name, published in self.published.items()
            if name in self.measured and not published.meets(*self._bounds(name))
        ]

    def _bounds(self, name: str) -> tuple[float, float]:
        return self.intervals.get(name, (self.measured[name], self.measured[name]))

    def explanations(self) -> list[str]:
        """Return the explanation of each quantity outside of the paper's range."""
        return [f"{name}: {self.published[name].otherwise}" for name in self.outside()]

    def as_dict(self) -> dict[str, object]:
        """Return the row as values that JSON can hold."""
        published = {
            name: {"text": p.text, "value": p.value, "range": p.range, "source": p.source}
            for name, p in self.published.items()
        }
        return {
            "table": self.table,
            **{name: dict(getattr(self, name)) for name in ("case", "measured", "intervals")},
            "published": published,
            "agreement": self.agreement,
            "explanations": self.explanations(),
            "note": self.note,
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

"""Studies: tables, figures or claims of a paper, measured again beside the paper's values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Effort = Literal["tiny", "reduced", "full"]
Agreement = Literal["", "within", "outside", "paper only"]
Case = Mapping[str, str | int]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Settings:
    """The amount of work of a study and its seed.

    Args:
        effort: ``"reduced"`` takes at most a minute or two on two cores; ``"full"`` has the
            paper's counts; ``"tiny"`` only shows that everything runs.
        seed: the same seed draws the same operands, in whatever order they are asked for.
    """

    effort: Effort = "reduced"
    seed: int = 0

    def choose(self, tiny: Value, reduced: Value, full: Value) -> Value:
        """Return that one of the given values which belongs to this amount of work."""
        return {"tiny": tiny, "reduced": reduced, "full": full}[self.effort]

    def generator(self, *case: object) -> torch.Generator:
        """Return the generator of one case, which depends on the seed and the case's name alone."""
        digest = blake2b(repr((self.seed, *case)).encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)


class Progress(Protocol):
    """Receives the amount of work, in any unit, and then the amounts that are done."""

    def begin(self, total: float) -> None:
        """Receive the total amount of work, once before it starts."""

    def advance(self, amount: float) -> None:
        """Receive the amount of work that was just done."""


class Unwatched:
    """Progress reports that are discarded."""

    def begin(self, total: float) -> None:
        """Nothing."""

    def advance(self, amount: float) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Published:
    """A value as the paper prints it, and what counts as having reproduced it.

    Args:
        value: the paper's value; None where it prints a range only.
        low, high: the paper's range; a measurement within it agrees.
        source: table or section.
        otherwise: why a measurement may well fall outside; shown when one does.
        printed: what the paper prints where that is no number, e.g. a formula.
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
        """``low–high``, or the one side that bounds."""
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


@dataclass(frozen=True)
class Row:
    """A row of a result: a case, its measurements, and the paper's values.

    Args:
        table: the heading that rows belong under.
        case: what was varied, e.g. distribution and size.
        measured: by quantity; empty where this machine cannot measure what the paper did.
        published: by quantity, those that the paper prints.
        note: said beside the row, whatever the values.
        intervals: by quantity, 95 % intervals of those that are counted; one that reaches into the
            paper's range agrees with it.
    """

    table: str
    case: Case
    measured: Mapping[str, float] = field(default_factory=dict)
    published: Mapping[str, Published] = field(default_factory=dict)
    note: str = ""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

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
        """List the quantities that were measured outside the paper's range."""
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
Plot = Callable[[list[Row], "Figure"], None]
Export = Callable[[list[Row]], object]


@dataclass(frozen=True)
class Study:
    """A table, figure or claim of a paper that can be run again.

    Args:
        name: ``paper.subject``, what the command line calls it.
        paper: the paper and the section, table or figure.
        reproduces: one sentence about the result that is measured again.
        run: yields rows as they are measured.
        plot: draws the rows; None where a table says it all.
        verdict: what must hold of our own method; an empty text means that it does.
        export: JSON-able values of the rows for other verbs; None if no verb reads them.
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
        """The module that computes the rows; its imports are the code that they depend on."""
        return self.run.__module__

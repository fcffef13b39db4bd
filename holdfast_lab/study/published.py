"""Values that papers print, the ranges in which a measurement reproduces them, and the verdict.

A range follows from what the paper prints: the spread of its values, the number of its trials, the
last digit of a number, or a bound that it states. Without any of these a value is only compared.
"""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from math import inf
from typing import Literal

from holdfast.inject.statistics import Rate, rule_of_three

Kind = Literal["measured", "input", "certain", "elsewhere"]
Bounds = tuple[float, float]


class Verdict(StrEnum):
    """What a comparison with a paper shows."""

    REPRODUCED = "reproduced"
    UNDECIDED = "undecided"
    EXPLAINED = "differs, explained"
    UNEXPLAINED = "differs, unexplained"
    CALIBRATION = "calibration"
    CERTAIN = "cannot fail"
    COMPARED = "compared"
    NOT_HERE = "not possible on CPU"
    NOT_DONE = "not done yet"


@dataclass(frozen=True)
class Range:
    """A range of values, and what in the paper it follows from."""

    low: float = -inf
    high: float = inf
    source: str = ""

    def meets(self, low: float, high: float) -> bool | None:
        """Return whether a measurement between these bounds agrees; a NaN never does.

        A bound that the paper states is met by the whole of our interval; None if only a part of it
        does. The ends of a range follow from the paper's own uncertainty, so that an overlap of the
        two is agreement.
        """
        overlaps = self.low <= high and low <= self.high
        stated = self.low == -inf or self.high == inf
        if overlaps and stated and not (self.low <= low and high <= self.high):
            return None
        return overlaps

    @property
    def text(self) -> str:
        """Text of the range, ``low–high``, or its only bound."""
        if self.low == -inf:
            return "" if self.high == inf else f"≤ {shown(self.high)}"
        return f"≥ {shown(self.low)}" if self.high == inf else between(self.low, self.high)


UNKNOWN = Range()


def half_unit(printed: str) -> float:
    """Return half a unit of the last digit of a number as printed."""
    exponent = Decimal(printed).as_tuple().exponent
    assert isinstance(exponent, int)
    return float(Decimal(5).scaleb(exponent - 1))


def rounded(printed: str) -> Range:
    """Return the values that round to a number as printed."""
    value, half = float(printed), half_unit(printed)
    return Range(value - half, value + half, f"{printed} as printed, ± half of its last digit")


def at_most(printed: str) -> Range:
    """Return the values that meet a printed upper bound, or round to it."""
    high = float(printed) + half_unit(printed)
    return Range(high=high, source=f"at most {printed}, half of its last digit more")


def at_least(printed: str) -> Range:
    """Return the values that meet a printed lower bound, or round to it."""
    low = float(printed) - half_unit(printed)
    return Range(low=low, source=f"at least {printed}, half of its last digit less")


def counted(rate: Rate, trials: str = "") -> Range:
    """Return the 95 % interval of the paper's rate in percent; ``trials`` says which it counts."""
    low, high = percent_interval(rate)
    count = trials or f"{rate.count} of {rate.trials:,}"
    return Range(low, high, f"{count} → Wilson 95 %")


def none_of(trials: int) -> Range:
    """Return the 95 % upper bound in percent of a rate of which the paper saw no case."""
    high = 100 * rule_of_three(trials)
    return Range(0.0, high, f"0 of {trials:,} → rule of three, 95 %")


def exactly(value: float, source: str) -> Range:
    """Return the range of a value that the paper states exactly."""
    return Range(value, value, source)


@dataclass(frozen=True)
class Published:
    """A value as the paper prints it, and the range in which a measurement reproduces it.

    Args:
        value: The paper's value; None if it prints a range or words only.
        source: Table or section of the paper.
        range: Range that is derived from the paper; ``UNKNOWN`` if nothing in it gives one.
        otherwise: Explanation of a measurement outside of the range; empty if there is none.
        printed: Text of the paper if it prints no number, such as a formula.
        kind: ``"input"`` if the value was also an input of what is measured; ``"certain"`` if a
            measurement agrees by construction; ``"elsewhere"`` if it needs another device.
        best: Whether the paper prints its best case ("up to"), which our best case has to meet.
    """

    value: float | None
    source: str
    range: Range = UNKNOWN
    otherwise: str = ""
    printed: str = ""
    kind: Kind = "measured"
    best: bool = False

    def verdict(self, bounds: Bounds | None) -> Verdict:
        """Judge a measurement between these bounds; None if there is none.

        This is the only place that decides.
        """
        if bounds is None:
            return Verdict.NOT_HERE if self.kind == "elsewhere" else Verdict.NOT_DONE
        if self.range == UNKNOWN:
            return Verdict.COMPARED
        meets = self.range.meets(*bounds)
        if meets is None:
            return Verdict.UNDECIDED
        if not meets:
            return Verdict.EXPLAINED if self.otherwise else Verdict.UNEXPLAINED
        agrees = {"input": Verdict.CALIBRATION, "certain": Verdict.CERTAIN}
        return agrees.get(self.kind, Verdict.REPRODUCED)

    @property
    def text(self) -> str:
        """Text of the paper: the formula, the value, or the range."""
        if self.printed:
            return self.printed
        return shown(self.value, 6) if self.value is not None else self.range.text


def between(low: float, high: float) -> str:
    """Format the range between two bounds, to a tenth of its width, at least to three digits."""
    if low == high:
        return shown(low, 4)
    for digits in range(3, 9):
        texts = shown(low, digits), shown(high, digits)
        if max(abs(float(texts[0]) - low), abs(float(texts[1]) - high)) <= (high - low) / 10:
            break
    return "–".join(texts)


def shown(value: float, digits: int = 3) -> str:
    """Format a number with three significant digits; counts are written in full."""
    if isinstance(value, int) or (value == round(value, 0) and abs(value) < 1e6):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def percent_interval(rate: Rate) -> Bounds:
    """Return the 95 % interval of a rate in percent."""
    low, high = rate.interval
    return 100 * low, 100 * high

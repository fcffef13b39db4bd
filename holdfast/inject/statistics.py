"""Confidence intervals of a rate from counts: Wilson's interval and the rule of three."""

from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rate:
    """A rate observed as ``count`` of ``trials``, with a 95 % interval of the true rate."""

    count: int
    trials: int

    def __post_init__(self) -> None:
        _check(self.count, self.trials)

    @property
    def value(self) -> float:
        """Observed rate; NaN without trials."""
        return self.count / self.trials if self.trials else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval; [0, 1] without trials."""
        return wilson_interval(self.count, self.trials)

    @property
    def upper(self) -> float:
        """95 % upper bound of the rate: the rule of three at zero, else Wilson's."""
        return rule_of_three(self.trials) if self.count == 0 else self.interval[1]


def wilson_interval(count: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a binomial rate, within [0, 1].

    ``(p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)`` with p = count / trials, n = trials

    It is (0, 1) without trials. It covers the true rate with about the stated two-sided confidence,
    also near 0 and 1 where the normal interval fails, if the trials are independent.

    Raises:
        ValueError: Not 0 ≤ count ≤ trials, or the confidence is not between 0 and 1.

    Source: E. B. Wilson, JASA 22 (1927).
    """
    _check(count, trials)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence} must lie between 0 and 1")
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, share = count / trials, z * z / trials
    centre = (rate + share / 2) / (1 + share)
    half = sqrt(rate * (1 - rate) * share + share * share / 4) / (1 + share)
    # For no successes, or no failures, one bound is exactly 0 or 1, which rounding must keep.
    lower = 0.0 if count == 0 else max(0.0, centre - half)
    upper = 1.0 if count == trials else min(1.0, centre + half)
    return lower, upper


def rule_of_three(trials: int) -> float:
    """Return the 95 % upper bound ``min(1, 3/n)`` of a rate with no success in n trials.

    ``(1 − p)ⁿ = 0.05`` gives ``p ≤ −ln 0.05 / n < 3/n``. Without trials the bound is 1.
    """
    _check(0, trials)
    return min(1.0, 3.0 / trials) if trials else 1.0


def _check(count: int, trials: int) -> None:
    if not 0 <= count <= trials:
        raise ValueError(f"count = {count} must lie between 0 and trials = {trials}")

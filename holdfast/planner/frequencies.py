"""How often each protection section of attention must be checked (ATTNChecker, section 4.5).

Errors are Poisson: λ_e n of type e are expected in a GEMM of n flops. Coverage is near 1 where it
matters, so everything here is computed as its complement, the probability of failure, without ever
subtracting from 1: targets of 1e-11 and below keep all their digits.

Errata of the paper, corrected here:

- φ is the probability of *harm*, so an error that no check sees is harmless with 1 − φ:
  ``H = f + (1 − f)(1 − φ)``. The printed H uses φ as if it were the probability of no harm.
- The gain of a section is ``Σ R φ``. The printed numerator of FCE adds R_free, a constant in f, and
  has 1 − φ for φ, consistently with the H above.
- Algorithm 1 takes a section fully while the need is *at least* its gain, and partially where it
  is less; the printed comparison is the other way round. Its FC starts at the coverage without
  checks, not at 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, isfinite, lgamma, log, log1p, sqrt

from holdfast.errors import ConfigError
from holdfast.planner.attention import SECTIONS, AttentionSize, CheckCosts, gemm_flops
from holdfast.planner.vulnerability import ERROR_TYPES, Vulnerability

_SERIES_BELOW = 0.5
_ROUNDED_UP = 2.0**-51


@dataclass(frozen=True)
class ErrorRates:
    """λ_e: errors per flop that leave an INF, a NaN or a near-INF in a result.

    Raises:
        ConfigError: a rate is negative or not finite.
    """

    inf: float
    nan: float
    near_inf: float

    def __post_init__(self) -> None:
        for kind in ERROR_TYPES:
            if not (isfinite(getattr(self, kind)) and getattr(self, kind) >= 0):
                raise ConfigError(f"rate of {kind} = {getattr(self, kind)} must be at least 0")

    @property
    def total(self) -> float:
        """Of all types."""
        return self.inf + self.nan + self.near_inf

    def scaled(self, factor: float) -> "ErrorRates":
        """The same mix, more or less often."""
        return ErrorRates(*(factor * getattr(self, kind) for kind in ERROR_TYPES))


@dataclass(frozen=True)
class Section:
    """A protection section's risk in one execution, and the price of checking it.

    Args:
        name: of the section.
        unavoidable: P(two or more errors): more than a check is trusted to repair.
        exposed: Σ_j Σ_e R^e(j) φ: P(exactly one error, which does harm unless checked).
        cost: of its check, in any unit.
    """

    name: str
    unavoidable: float
    exposed: float
    cost: float

    def failure(self, frequency: float) -> float:
        """1 − FC_S when this share of executions is checked."""
        return min(1.0, self.unavoidable + (1.0 - frequency) * self.exposed)

    @property
    def efficiency(self) -> float:
        """FCE_S: coverage gained for a unit of cost."""
        if self.cost == 0.0:
            return inf if self.exposed else 0.0
        return self.exposed / self.cost


@dataclass(frozen=True)
class FrequencyPlan:
    """Frequencies by section, and what they achieve for one execution of attention.

    Args:
        frequencies: share of executions to check, by section.
        target: the failure probability that was asked for.
        failure: that is reached; at most the target, to 14 digits, if the plan is feasible.
        unchecked_failure, least_failure: with no checks, and with all.
        cost, full_cost: expected, and with all checks, in the unit of the costs.
    """

    frequencies: Mapping[str, float]
    target: float
    failure: float
    unchecked_failure: float
    least_failure: float
    cost: float
    full_cost: float

    @property
    def feasible(self) -> bool:
        """Whether the target can be met."""
        return self.least_failure <= self.target


def error_count(count: int, mean: float) -> float:
    """P_OP^e(k): the probability of exactly ``count`` errors where ``mean`` are expected."""
    if mean == 0.0:
        return float(count == 0)
    return exp(count * log(mean) - mean - lgamma(count + 1))


def several_errors(mean: float) -> float:
    """The probability of two or more errors, to full relative precision however small the mean."""
    if mean >= _SERIES_BELOW:
        return -expm1(-mean) - mean * exp(-mean)
    total, term, count = 0.0, mean * mean / 2, 2
    while total + term > total:
        total, count = total + term, count + 1
        term *= mean / count
    return total * exp(-mean)


def section_of(
    name: str,
    flops: Mapping[str, float],
    rates: ErrorRates,
    vulnerability: Vulnerability,
    cost: float,
) -> Section:
    """The risk of a section whose GEMMs compute these flops.

    ``R^e(j) = λ_e n_j e^{−Λ}`` with Λ the errors expected in the whole section.
    """
    mean = rates.total * sum(flops.values())
    harmful = sum(
        getattr(rates, kind) * count * vulnerability[gemm][kind]
        for gemm, count in flops.items()
        for kind in ERROR_TYPES
    )
    return Section(name, several_errors(mean), harmful * exp(-mean), cost)


def sections_of(
    size: AttentionSize, rates: ErrorRates, vulnerability: Vulnerability, costs: CheckCosts
) -> tuple[Section, ...]:
    """S_AS, S_CL and S_O of one attention."""
    flops = gemm_flops(size)
    return tuple(
        section_of(name, {g: flops[g] for g in gemms}, rates, vulnerability, costs.sections[name])
        for name, gemms in SECTIONS.items()
    )


def attention_failure(sections: Sequence[Section], frequencies: Mapping[str, float]) -> float:
    """1 − FC_att = 1 − Π FC_S."""
    failures = [section.failure(frequencies[section.name]) for section in sections]
    return _any_of(failures)


def _any_of(probabilities: Sequence[float]) -> float:
    """That at least one of several independent things happens."""
    if max(probabilities, default=0.0) >= 1.0:
        return 1.0
    return abs(expm1(sum(log1p(-one) for one in probabilities)))


def plan_frequencies(sections: Sequence[Section], target: float) -> FrequencyPlan:
    """Algorithm 1: the cheapest frequencies whose failure probability is at most the target.

    Sections are taken in the order of their gain per cost, each fully while more is needed than it
    gives, the last one as far as needed. Of sums that is the exact optimum; the failures of
    sections combine as 1 − Π(1 − failure), so it is exact to first order in them.

    Args:
        sections: of one attention, with different names.
        target: failures for each execution, between 0 and 1.

    Returns:
        The plan; if the target cannot be met, that which comes closest (``feasible`` is false).

    Raises:
        ConfigError: the target is not a probability between 0 and 1.
    """
    if not 0.0 < target < 1.0:
        raise ConfigError(f"target = {target} must be more than 0 and less than 1 failure")
    chosen = dict.fromkeys((section.name for section in sections), 0.0)
    unchecked = attention_failure(sections, chosen)
    for section in sorted(sections, key=lambda one: one.efficiency, reverse=True):
        if section.exposed == 0.0 or unchecked <= target:
            break
        others = [one.failure(chosen[one.name]) for one in sections if one is not section]
        chosen[section.name] = _needed(section, _left(target, _any_of(others)))
        if chosen[section.name] < 1.0:
            break
    return FrequencyPlan(
        chosen,
        target,
        attention_failure(sections, chosen),
        unchecked,
        attention_failure(sections, dict.fromkeys(chosen, 1.0)),
        sum(chosen[section.name] * section.cost for section in sections),
        sum(section.cost for section in sections),
    )


def _left(target: float, spent: float) -> float:
    """What one section may fail beside the others: x of ``1 − target = (1 − x)(1 − spent)``."""
    return (target - spent) / (1.0 - spent) if spent < target else 0.0


def _needed(section: Section, allowed: float) -> float:
    """The least frequency at which the section fails no more than allowed; 1 if none does.

    Rounded up: near 1 a float holds a frequency to 1e-16 only, and coverage must not be lost by it.
    """
    excess = section.unavoidable + section.exposed - allowed
    return min(1.0, excess / section.exposed + _ROUNDED_UP) if excess > 0.0 else 0.0


def bearable_factor(
    size: AttentionSize,
    rates: ErrorRates,
    vulnerability: Vulnerability,
    target: float,
    frequency: float,
) -> float:
    """By what factor the rates may grow until the target is just met at this frequency.

    With frequency 0: below it no checks are needed. With 1: above it no checks suffice. Found by
    bisection to 15 digits; inf without errors.
    """
    free = CheckCosts(dict.fromkeys(SECTIONS, 0.0))

    def fails(factor: float) -> bool:
        found = sections_of(size, rates.scaled(factor), vulnerability, free)
        return attention_failure(found, dict.fromkeys(SECTIONS, frequency)) > target

    if rates.total == 0.0:
        return inf
    expected = rates.total * sum(gemm_flops(size).values())
    low, high = target / expected, 800.0 / expected
    while high / low > 1 + 4e-15:
        middle = sqrt(low) * sqrt(high)
        low, high = (low, middle) if fails(middle) else (middle, high)
    return low

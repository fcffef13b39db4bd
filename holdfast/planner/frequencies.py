"""How often each protection section of attention has to be checked (ATTNChecker, section 4.5).

Errors have a Poisson distribution: λ_e n errors of type e are expected in a GEMM of n flops.
Coverage is close to 1, so that its complement, the probability of failure, is computed without
ever subtracting from 1: targets of 1e-11 and below keep all their digits.

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
from math import exp, expm1, inf, log1p

from holdfast.errors import ConfigError
from holdfast.planner.attention import SECTIONS, AttentionSize, CheckCosts, gemm_flops
from holdfast.planner.checks import at_least_0
from holdfast.planner.intervals import geometric_bisection
from holdfast.planner.vulnerability import ERROR_TYPES, Vulnerability

_SERIES_BELOW = 0.5
_ROUNDED_UP = 2.0**-51


@dataclass(frozen=True)
class ErrorRates:
    """The rates λ_e of errors per flop that leave an INF, a NaN or a near-INF in a result.

    Raises:
        ConfigError: A rate is negative or not finite.
    """

    inf: float
    nan: float
    near_inf: float

    def __post_init__(self) -> None:
        for kind in ERROR_TYPES:
            at_least_0(f"rate of {kind}", getattr(self, kind))

    @property
    def total(self) -> float:
        """Rate of errors of all types."""
        return self.inf + self.nan + self.near_inf

    def scaled(self, factor: float) -> "ErrorRates":
        """Return all rates multiplied by a factor."""
        return ErrorRates(*(factor * getattr(self, kind) for kind in ERROR_TYPES))


@dataclass(frozen=True)
class Section:
    """The risk of a protection section in one execution, and the cost of checking it.

    Args:
        name: Name of the section.
        unavoidable: P(two or more errors), which a check is not trusted to repair.
        exposed: Σ_j Σ_e R^e(j) φ = P(exactly one error that does harm unless it is checked).
        cost: Cost of its check, in any unit.
    """

    name: str
    unavoidable: float
    exposed: float
    cost: float

    def failure(self, frequency: float) -> float:
        """Return 1 − FC_S if this share of executions is checked."""
        return min(1.0, self.unavoidable + (1.0 - frequency) * self.exposed)

    @property
    def efficiency(self) -> float:
        """Coverage gained per unit of cost, FCE_S."""
        if self.cost == 0.0:
            return inf if self.exposed else 0.0
        return self.exposed / self.cost


@dataclass(frozen=True)
class FrequencyPlan:
    """The frequencies of all sections and the resulting failure probability of one execution.

    Args:
        frequencies: Share of executions to check, by section.
        target: The requested failure probability.
        failure: The failure probability of the plan; at most the target, to 14 digits, if the plan
            is feasible.
        unchecked_failure: The failure probability without checks.
        least_failure: The failure probability if everything is checked.
        cost: Expected cost of the checks, in the unit of the costs.
        full_cost: Cost of checking everything.
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
        """True if the target can be met."""
        return self.least_failure <= self.target


def several_errors(mean: float) -> float:
    """Return the probability of two or more errors, to full relative precision for any mean."""
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
    """Compute the risk of a section from the flops of its GEMMs.

    ``R^e(j) = λ_e n_j e^{−Λ}``, where Λ is the number of errors expected in the whole section.
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
    """Compute the risks of S_AS, S_CL and S_O of one attention."""
    flops = gemm_flops(size)
    return tuple(
        section_of(name, {g: flops[g] for g in gemms}, rates, vulnerability, costs.sections[name])
        for name, gemms in SECTIONS.items()
    )


def attention_failure(sections: Sequence[Section], frequencies: Mapping[str, float]) -> float:
    """Return the failure probability of one attention, 1 − FC_att = 1 − Π FC_S."""
    failures = [section.failure(frequencies[section.name]) for section in sections]
    return _any_of(failures)


def _any_of(probabilities: Sequence[float]) -> float:
    """Return the probability that at least one of several independent events happens."""
    if max(probabilities, default=0.0) >= 1.0:
        return 1.0
    return abs(expm1(sum(log1p(-one) for one in probabilities)))


def plan_frequencies(sections: Sequence[Section], target: float) -> FrequencyPlan:
    """Compute the cheapest frequencies whose failure probability is at most the target.

    This is Algorithm 1: sections are taken in the order of their gain per cost, each fully while
    more is needed than it gives, the last one as far as needed. For sums that is the exact
    optimum. The failures of sections combine as 1 − Π(1 − failure), so that it is exact to first
    order in them.

    Args:
        sections: The sections of one attention, with different names.
        target: Failure probability of one execution, between 0 and 1.

    Returns:
        The plan; if the target cannot be met, the closest one, whose ``feasible`` is false.

    Raises:
        ConfigError: The target is not a probability between 0 and 1.
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
    """Return the failure probability left for one section: x of 1 − target = (1 − x)(1 − spent)."""
    return (target - spent) / (1.0 - spent) if spent < target else 0.0


def _needed(section: Section, allowed: float) -> float:
    """Return the smallest frequency with at most the allowed failure probability, else 1.

    It is rounded up, because near 1 a float holds a frequency to 1e-16 only, and the target has to
    be met nevertheless.
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
    """Return the factor by which rates may grow until the target is just met at this frequency.

    With frequency 0, no checks are needed below it; with frequency 1, no checks suffice above it.
    It is found by bisection to 15 digits; without errors it is INF.
    """
    free = CheckCosts(dict.fromkeys(SECTIONS, 0.0))

    def fails(factor: float) -> bool:
        found = sections_of(size, rates.scaled(factor), vulnerability, free)
        return attention_failure(found, dict.fromkeys(SECTIONS, frequency)) > target

    if rates.total == 0.0:
        return inf
    expected = rates.total * sum(gemm_flops(size).values())
    return geometric_bisection(fails, target / expected, 800.0 / expected)

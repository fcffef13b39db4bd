"""How long state survives in memory: REFT's section 5 (equations 1 to 3, Figure 8).

Times to failure are Weibull, nodes independent. Nothing is repaired until the time asked about:
the curves say how long one may go on after the last repair, and are pessimistic where lost nodes
are replaced at once. Survival is computed as its logarithm, so that its distance from 1 keeps its
digits.

Errata of the paper: of equation 2, P_re is the probability that a node's SMP *survives*, and
1 − P_s that a node has *failed*; the text says the opposite of both. Figure 8 counts GPUs as nodes
(k = 3,072, n = 6), though the smallest unit that is lost alone is a node of several.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, gamma, inf, isfinite, log, sqrt

from holdfast.errors import ConfigError
from holdfast.planner.intervals import log_bearable

_DIGITS = 4e-15
_OLDEST = 1e300


def weibull_rate(mttf: float, shape: float) -> float:
    """λ of ``P = exp(−λ t^c)`` for nodes with this mean time to failure: ``(Γ(1 + 1/c) / MTTF)^c``.

    Raises:
        ConfigError: the shape is not in [0.01, 100], or the mean not above 0; it may be inf.
    """
    _check_shape(shape)
    if not mttf > 0:
        raise ConfigError(f"mttf = {mttf} must be above 0")
    return _power(gamma(1 + 1 / shape) / mttf, shape)


@dataclass(frozen=True)
class Survival:
    """A fleet of which any node may fail, and how its state survives.

    Args:
        nodes: k, that fail independently.
        group: n, nodes of a sharding group; ``nodes`` is a multiple of it.
        hardware: λ, of a node's memory, per unit of time to the power of the shape.
        software: λ, of a node's trainer; an SMP outlives it.
        shape: c of the Weibull distribution: 1 has no memory, above 1 failures come with age.
        smp: λ, of a node's SMP; the paper takes 0.

    Times are in whatever unit the rates are in.

    Raises:
        ConfigError: a rate is negative, the shape not in [0.01, 100], or groups do not fill the
            fleet.
    """

    nodes: int
    group: int
    hardware: float
    software: float = 0.0
    shape: float = 1.0
    smp: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hardware", "software", "smp"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} = {getattr(self, name)} must be finite and at least 0")
        _check_shape(self.shape)
        if self.group < 1 or self.nodes < 1 or self.nodes % self.group:
            raise ConfigError(
                f"nodes = {self.nodes} must be a multiple of the group's = {self.group}, at least 1"
            )

    def with_checkpoints(self, time: float) -> float:
        """P_ck-survive: no node has failed in any way.

        ``P_ck = P_s^k P_tr^k`` (equation 3).
        """
        return exp(self._log_checkpoints(self._age(time)))

    def with_snapshots(self, time: float, parities: int = 1) -> float:
        """P_re-survive: no group has lost more nodes than its parities rebuild, no SMP has died.

        ``P_re = (P_s^n + n (1 − P_s) P_s^{n−1})^{k/n} P_smp^k`` (equation 2) for one parity; with
        r of them, any r nodes of a group may be gone.
        """
        return exp(self._log_snapshots(self._age(time), parities))

    def time_with_checkpoints(self, probability: float) -> float:
        """When the survival of what is not saved elsewhere has fallen to this; inf if never."""
        wanted = _log_probability(probability)
        rate = self.nodes * (self.hardware + self.software)
        return _power(-wanted / rate, 1 / self.shape) if rate else inf

    def time_with_snapshots(self, probability: float, parities: int = 1) -> float:
        """When the survival of snapshots in memory has fallen to this; inf if never.

        By bisection, to 14 digits.
        """
        wanted = _log_probability(probability)
        log_bearable(0.0, self.group, parities)
        rate = self.hardware + self.smp
        if rate == 0.0 or (parities == self.group and self.smp == 0.0):
            return inf
        scaled = _falls_to(lambda age: self._log_snapshots(age / rate, parities), wanted)
        return _power(scaled / rate, 1 / self.shape)

    def _age(self, time: float) -> float:
        """t^c."""
        if not (isfinite(time) and time >= 0):
            raise ConfigError(f"time = {time} must be finite and at least 0")
        return min(_power(time, self.shape), _OLDEST)

    def _log_checkpoints(self, age: float) -> float:
        return -self.nodes * (self.hardware + self.software) * age

    def _log_snapshots(self, age: float, parities: int) -> float:
        group = log_bearable(self.hardware * age, self.group, parities)
        return self.nodes / self.group * group - self.nodes * self.smp * age


def _check_shape(shape: float) -> None:
    if not 0.01 <= shape <= 100:
        raise ConfigError(f"shape = {shape} must be from 0.01 to 100; 1 is a constant rate")


def _power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return inf


def _log_probability(probability: float) -> float:
    if not 0.0 < probability < 1.0:
        raise ConfigError(f"survival = {probability} must be more than 0 and less than 1")
    return log(probability)


def _falls_to(log_survival: Callable[[float], float], wanted: float) -> float:
    """The age at which a falling function reaches a value."""
    low = high = 1.0
    while log_survival(high) > wanted:
        high *= 2
    while log_survival(low) <= wanted:
        low /= 2
    while high / low > 1 + _DIGITS:
        middle = sqrt(low) * sqrt(high)
        low, high = (middle, high) if log_survival(middle) > wanted else (low, middle)
    return low

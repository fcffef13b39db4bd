"""The survival of state in memory: REFT's section 5 (equations 1 to 3, Figure 8).

Nodes fail independently with Weibull times to failure. Nothing is repaired in the time considered,
so that the curves are pessimistic if lost nodes are replaced at once. Survival is computed as its
logarithm, so that values close to 1 keep their digits.

Errata of the paper: in equation 2, P_re is the probability that a node's SMP *survives*, and
1 − P_s that a node has *failed*; the text says the opposite of both. Figure 8 counts GPUs as nodes
(k = 3,072, n = 6), although the smallest unit that is lost is a node with several GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, gamma, inf, log

from holdfast.errors import ConfigError
from holdfast.planner.checks import at_least_0
from holdfast.planner.intervals import geometric_bisection, log_bearable
from holdfast.planner.parity_groups import group_sizes

_OLDEST = 1e300


def weibull_rate(mttf: float, shape: float) -> float:
    """Return λ of ``P = exp(−λ t^c)`` for a mean time to failure: ``(Γ(1 + 1/c) / MTTF)^c``."""
    _check_shape(shape)
    if not mttf > 0:
        raise ConfigError(f"mttf = {mttf} must be above 0")
    return _power(gamma(1 + 1 / shape) / mttf, shape)


@dataclass(frozen=True)
class Survival:
    """The survival of the state of a fleet whose nodes fail independently.

    All times are in the unit of time of the rates.

    Args:
        nodes: k, the number of nodes.
        group: n, the largest number of nodes of a parity group (``parity_groups.group_sizes``).
        hardware: λ of a node's memory, per unit of time to the power of the shape.
        software: λ of a node's trainer, which its SMP outlives.
        shape: c of the Weibull distribution: 1 for a constant rate, above 1 if the rate grows with
            age.
        smp: λ of a node's SMP; 0 in the paper.

    Raises:
        ConfigError: A rate is negative, the shape is not in [0.01, 100], or there are no nodes.
    """

    nodes: int
    group: int
    hardware: float
    software: float = 0.0
    shape: float = 1.0
    smp: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hardware", "software", "smp"):
            at_least_0(name, getattr(self, name))
        _check_shape(self.shape)
        group_sizes(self.nodes, self.group)

    def with_checkpoints(self, time: float) -> float:
        """Return P_ck-survive, the probability that no node has failed in any way.

        ``P_ck = P_s^k P_tr^k`` (equation 3).
        """
        return exp(self._log_checkpoints(self._age(time)))

    def with_snapshots(self, time: float, parities: int = 1) -> float:
        """Return P_re-survive, the probability that snapshots can be restored or rebuilt.

        No group has lost more nodes than its parities rebuild, and no SMP has died:
        ``P_re = (P_s^n + n (1 − P_s) P_s^{n−1})^{k/n} P_smp^k`` (equation 2) for one parity. With r
        parities, any r nodes of a group may be lost.
        """
        return exp(self._log_snapshots(self._age(time), parities))

    def time_with_checkpoints(self, probability: float) -> float:
        """Return the time at which ``with_checkpoints`` falls to a probability; inf if never."""
        wanted = _log_probability(probability)
        rate = self.nodes * (self.hardware + self.software)
        return _power(-wanted / rate, 1 / self.shape) if rate else inf

    def time_with_snapshots(self, probability: float, parities: int = 1) -> float:
        """Return the time at which ``with_snapshots`` falls to a probability; inf if never.

        It is found by bisection to 14 digits.
        """
        wanted = _log_probability(probability)
        log_bearable(0.0, self.group, parities)
        rate = self.hardware + self.smp
        if rate == 0.0 or (parities == self.group and self.smp == 0.0):
            return inf
        scaled = _falls_to(lambda age: self._log_snapshots(age / rate, parities), wanted)
        return _power(scaled / rate, 1 / self.shape)

    def _age(self, time: float) -> float:
        """Return t^c: the time to the power of the Weibull shape c, at most ``_OLDEST``."""
        return min(_power(at_least_0("time", time), self.shape), _OLDEST)

    def _log_checkpoints(self, age: float) -> float:
        return -self.nodes * (self.hardware + self.software) * age

    def _log_snapshots(self, age: float, parities: int) -> float:
        sizes = group_sizes(self.nodes, self.group, parities)
        hazard = self.hardware * age
        groups = sum(count * log_bearable(hazard, size, parities) for size, count in sizes)
        return groups - self.nodes * self.smp * age


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
    """Return the age at which a decreasing function reaches a value."""
    low = high = 1.0
    while log_survival(high) > wanted:
        high *= 2
    while log_survival(low) <= wanted:
        low /= 2
    return geometric_bisection(lambda age: log_survival(age) <= wanted, low, high)

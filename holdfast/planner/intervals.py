"""The intervals between saves of REFT's appendix A, in seconds and in steps.

Rates are failures per second, costs are seconds. Everything is first order in failures, which are
assumed to be independent and rare while a snapshot is taken.

Errata of the paper, corrected here:

- (6) gives the whole job the failure rate of one node. The job stops when any of its k nodes
  fails, so that the rate is k times as high (``job_rate``).
- (9) divides by the rate of *any* failure, the sentence above it by λ_re, the rate at which memory
  is lost. Equation (9) is right, because every failure returns to the last snapshot. λ_re belongs
  to the persisted checkpoints of (11), which are needed when memory is lost.
- (7) uses λ, a rate, as a probability, so that λ_re depends on the unit of time: per day and per
  second it differs 86,400-fold. The time that matters is that for which a group lacks its lost
  node; ``memory_loss_rate`` takes it as an argument. It counts all failures within that time of
  each other, twice as many pairs as equation (7), which counts those within fixed intervals.
- (11) charges a checkpoint with the snapshot's stall, although it is written beside training. Here
  its stall is an argument, 0 if it is written from memory.
"""

from collections.abc import Callable
from math import comb, exp, expm1, floor, inf, isfinite, log, log1p, sqrt

from holdfast.errors import ConfigError
from holdfast.planner.checks import above_0, at_least, at_least_0

MAX_PARITIES = 32
_NEVER_S = 1e100
_DIGITS = 4e-15


def stall_s(saving_s: float, compute_s: float) -> float:
    """Return O_save, the time that a save adds to the step during which it runs.

    ``O_save = ½ (|T_ft − T_comp| + T_ft − T_comp) = max(0, T_ft − T_comp)`` (equation 8), where
    T_ft is the duration of the save and T_comp that of the forward and backward pass beside which
    it runs.
    """
    return max(0.0, at_least_0("saving_s", saving_s) - at_least_0("compute_s", compute_s))


def overhead(interval_s: float, save_s: float, restart_s: float, failures_per_s: float) -> float:
    """Return the seconds lost for each second of training, to first order in the failures.

    ``O_total / T_total = O_save / T_save + λ (T_save / 2 + T_sch + T_load)`` (equation 4, with
    O_restart as the text below it has it).

    Args:
        interval_s: T_save, the time between two saves; above 0.
        save_s: O_save, the stall of training by a save.
        restart_s: T_sch + T_load, the time until training runs again.
        failures_per_s: λ_fail, the rate of the failures after which this save is restored.
    """
    above_0("interval_s", interval_s)
    saving = at_least_0("save_s", save_s) / interval_s
    rate = at_least_0("failures_per_s", failures_per_s)
    return saving + rate * (interval_s / 2 + at_least_0("restart_s", restart_s))


def interval_s(save_s: float, failures_per_s: float) -> float:
    """Return T_save, the time in seconds between saves with the smallest overhead.

    ``T_save = √(2 O_save / λ_fail)`` (equation 5; equation 9 for snapshots, 10 for checkpoints). It
    is 0 if a save costs nothing, and never more than the mean time to a failure, 1 / λ. The
    first-order formula exceeds that if a save costs more than half of it, which the true optimum
    never does.
    """
    above_0("failures_per_s", failures_per_s)
    best = sqrt(2 * at_least_0("save_s", save_s)) / sqrt(failures_per_s)
    return min(best, 1 / failures_per_s)


def every(save_s: float, step_s: float, mttf_s: float, floor_s: float = 0.0) -> int:
    """Return the number of steps from one save to the next, from three measured times.

    It is the whole number with the smallest overhead (equation 4): √(2 O_save · MTTF) / step,
    rounded up or down. A trainer can measure the times: the median stall of a snapshot, the median
    step, and the mean time to a failure of the *job*, that is, of any of its nodes. Give the result
    to ``Snapshots(every=…)``. All ranks have to use the same number, so that one rank decides for
    all.

    Args:
        save_s: O_save, by how much a step with a save is longer than one without; a negative
            measurement counts as 0.
        step_s: Time of a step without a save.
        mttf_s: Mean time between failures of the job.
        floor_s: Shortest time between saves, e.g. that of writing one to disk.

    Returns:
        At least 1: if a save costs nothing, every step is saved.

    Raises:
        ConfigError: A time is not finite, or step_s or mttf_s is not above 0.

    Example:
        >>> every(save_s=0.01, step_s=1.0, mttf_s=86400.0)  # one failure a day
        42
    """
    above_0("step_s", step_s)
    above_0("mttf_s", mttf_s)
    at_least_0("floor_s", floor_s)
    if not isfinite(save_s):
        raise ConfigError(f"save_s = {save_s} must be finite seconds: measure it again")
    best = interval_s(max(0.0, save_s), 1 / mttf_s) / step_s
    steps = floor(best)
    if steps * (steps + 1) < best * best:
        steps += 1
    return max(1, steps, _whole_steps(floor_s, step_s))


def every_at_rate(save_s: float, step_s: float, failures_per_s: float, floor_s: float = 0.0) -> int:
    """Return ``every`` for a rate of failures that may be 0."""
    mttf_s = 1 / failures_per_s if failures_per_s > 1 / _NEVER_S else _NEVER_S
    return every(save_s, step_s, mttf_s, floor_s)


def _whole_steps(time_s: float, step_s: float) -> int:
    """Return the number of steps that last at least so long, up to a rounding error."""
    return -floor(-time_s / step_s * (1 - 1e-12))


def job_rate(node_rate: float, nodes: int) -> float:
    """Return the failure rate ``k λ_nd`` of a job that fails with any of its k nodes."""
    return at_least("nodes", nodes, 1) * at_least_0("node_rate", node_rate)


def several_failures(probability: float, nodes: int, parities: int = 1) -> float:
    """Return the probability that more nodes of a group fail than its parities can rebuild.

    With λ, the probability that one of the n nodes fails in the time considered, this is
    ``λ_re = 1 − (1−λ)^n − n λ (1−λ)^{n−1}`` for one parity (equation 7), and in general
    ``1 − Σ_{i ≤ r} C(n, i) λ^i (1−λ)^{n−i}``. Where the sum is close to 1, the terms beyond r are
    summed instead, which gives 12 digits for every result that is a normal double.
    """
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(f"probability = {probability} must be from 0 to 1")
    _check_group(nodes, parities)
    if probability == 1.0:
        return float(parities < nodes)
    return _bearable_and_lost(-log1p(-probability), nodes, parities)[1]


def log_bearable(hazard: float, nodes: int, parities: int = 1) -> float:
    """Return the logarithm of ``1 − λ_re`` (``several_failures``) to full relative precision.

    The probability λ that a node fails is given as the hazard −ln(1 − λ) ≥ 0, which is precise for
    λ near 0 and near 1.
    """
    if not hazard >= 0.0:
        raise ConfigError(f"hazard = {hazard} must be at least 0")
    _check_group(nodes, parities)
    bearable, lost = _bearable_and_lost(hazard, nodes, parities)
    if lost < 0.5:
        return log1p(-lost)
    return log(bearable) if bearable > 0.0 else -inf


def _bearable_and_lost(hazard: float, nodes: int, parities: int) -> tuple[float, float]:
    """Return P(Binomial(nodes, λ) ≤ parities) and its complement, both without cancellation."""
    if parities == nodes or hazard == 0.0:
        return 1.0, 0.0
    bearable = sum(_exactly(count, hazard, nodes) for count in range(parities + 1))
    if bearable < 0.5:
        return bearable, 1.0 - bearable
    return bearable, _tail(parities + 1, hazard, nodes)


def _exactly(count: int, hazard: float, nodes: int) -> float:
    """Return P(Binomial(nodes, λ) = count)."""
    return comb(nodes, count) * (-expm1(-hazard)) ** count * exp(-hazard * (nodes - count))


def _tail(first: int, hazard: float, nodes: int) -> float:
    """Return P(Binomial(nodes, λ) ≥ first) where it is at most a half, so that terms decrease."""
    term, total, odds = _exactly(first, hazard, nodes), 0.0, expm1(hazard)
    for count in range(first, nodes + 1):
        if total + term == total:
            break
        total += term
        term *= (nodes - count) / (count + 1) * odds
    return total


def _check_group(nodes: int, parities: int) -> None:
    if not 0 <= parities <= min(at_least("nodes", nodes, 1), MAX_PARITIES):
        raise ConfigError(
            f"parities = {parities} must be from 0 to the nodes = {nodes} of a group, "
            f"and at most {MAX_PARITIES}"
        )


def memory_loss_rate(node_rate: float, group: int, parities: int, window_s: float) -> float:
    """Return λ_re, the rate at which one sharding group loses more nodes than it can rebuild.

    A first node fails at the rate n λ, and for ``window_s`` the group lacks it, until it is
    replaced and its shard rebuilt. Snapshots are lost if at least r of the n − 1 others fail in
    that time: ``n λ · P(Binomial(n − 1, 1 − e^{−λ w}) ≥ r)``, to first order
    ``(r + 1) C(n, r + 1) λ^{r+1} w^r``. Without parity it is n λ.
    """
    first = job_rate(node_rate, group)
    if not 0 <= parities < min(group, MAX_PARITIES):
        raise ConfigError(
            f"parities = {parities} must be from 0 to {min(group, MAX_PARITIES) - 1} in a group of "
            f"{group} nodes: at least one has to be left"
        )
    if parities == 0:
        return first
    meanwhile = -expm1(-node_rate * at_least_0("window_s", window_s))
    return first * several_failures(meanwhile, group - 1, parities - 1)


def geometric_bisection(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest value between two positive bounds that is not above a limit."""
    while high / low > 1 + _DIGITS:
        middle = sqrt(low) * sqrt(high)
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return low

"""How often to save: the intervals of REFT's appendix A, in seconds and in steps.

Rates are failures per second, costs seconds. All of it is first order in failures: they are rare
while a snapshot is taken, and independent.

Errata of the paper, corrected here:

- (6) gives the whole job the failure rate of one node. Any of k nodes stops it, so the rate is that
  of k nodes (``job_rate``).
- (9) divides by the rate at which *any* failure strikes, the sentence above it by λ_re, the rate at
  which memory is lost. Equation (9) is right: every failure returns to the last snapshot. λ_re
  belongs to what memory cannot answer, the persisted checkpoints of (11).
- (7) takes λ, a rate, for a probability, so that λ_re depends on the unit of time: by the day and
  by the second it differs 86,400-fold. The time that matters is that for which a group lacks its
  lost node; ``memory_loss_rate`` takes it as an argument. It counts failures that close wherever
  they fall, twice as many pairs as equation (7) finds within the ticks of a clock.
- (11) charges a checkpoint with the snapshot's stall, though it is written beside training. Here
  its stall is an argument, and 0 where it is written from memory.
"""

from math import comb, exp, expm1, floor, inf, isfinite, isnan, log, log1p, sqrt

from holdfast.errors import ConfigError

MAX_PARITIES = 32


def stall_s(saving_s: float, compute_s: float) -> float:
    """O_save: what saving adds to a step that computes beside it.

    ``O_save = ½ (|T_ft − T_comp| + T_ft − T_comp) = max(0, T_ft − T_comp)`` (equation 8).

    Args:
        saving_s: T_ft, from the start of a snapshot or checkpoint to its end.
        compute_s: T_comp, the forward and backward pass beside which it runs.

    Raises:
        ConfigError: a time is negative or not finite.
    """
    return max(0.0, _at_least_0("saving_s", saving_s) - _at_least_0("compute_s", compute_s))


def overhead(interval_s: float, save_s: float, restart_s: float, failures_per_s: float) -> float:
    """Seconds lost for each second of training, to first order in the failures.

    ``O_total / T_total = O_save / T_save + λ (T_save / 2 + T_sch + T_load)`` (equation 4, with
    O_restart as the text below it has it).

    Args:
        interval_s: T_save, between two saves; above 0.
        save_s: O_save, that a save stalls training.
        restart_s: T_sch + T_load, until training runs again.
        failures_per_s: λ_fail, of what this save is there for.

    Raises:
        ConfigError: the interval is not above 0, or another value is negative or not finite.
    """
    _above_0("interval_s", interval_s)
    saving = _at_least_0("save_s", save_s) / interval_s
    rate = _at_least_0("failures_per_s", failures_per_s)
    return saving + rate * (interval_s / 2 + _at_least_0("restart_s", restart_s))


def interval_s(save_s: float, failures_per_s: float) -> float:
    """T_save: the time between saves at which the overhead is least.

    ``T_save = √(2 O_save / λ_fail)`` (equation 5; of a snapshot it is 9, of a checkpoint 10). Never
    more than the mean time to a failure, 1 / λ: the first-order formula exceeds it where a save
    costs more than half of it, the true optimum never does.

    Returns:
        0 where a save costs nothing: as often as can be. See ``every`` for the floor of a step.

    Raises:
        ConfigError: the cost is negative or not finite, or the rate is not above 0.
    """
    _above_0("failures_per_s", failures_per_s)
    best = sqrt(2 * _at_least_0("save_s", save_s)) / sqrt(failures_per_s)
    return min(best, 1 / failures_per_s)


def every(save_s: float, step_s: float, mttf_s: float, floor_s: float = 0.0) -> int:
    """Steps from one save to the next, from three measured times.

    The whole number whose overhead (equation 4) is least: √(2 O_save · MTTF) / step, up or down.
    It needs what a trainer can measure: the median stall of a snapshot, the median step, and the
    mean time to a failure of the *job* (of all its nodes: ``job_rate``). Give the result to
    ``Snapshots(every=…)``; all ranks must use the same, so one decides for all.

    Args:
        save_s: O_save, by how much a step with a save is longer than one without; noise below
            0 counts as 0.
        step_s: a step without a save.
        mttf_s: from one failure of the job to the next, on average.
        floor_s: the least time between saves, e.g. what writing one to disk takes.

    Returns:
        At least 1. **The floor is every step**: where a save costs nothing, each step is saved.

    Raises:
        ConfigError: a time is not finite, or step_s or mttf_s is not above 0.
    """
    _above_0("step_s", step_s)
    _above_0("mttf_s", mttf_s)
    _at_least_0("floor_s", floor_s)
    if not isfinite(save_s):
        raise ConfigError(f"save_s = {save_s} must be finite seconds: measure it again")
    best = interval_s(max(0.0, save_s), 1 / mttf_s) / step_s
    steps = floor(best)
    if steps * (steps + 1) < best * best:
        steps += 1
    return max(1, steps, _whole_steps(floor_s, step_s))


def _whole_steps(time_s: float, step_s: float) -> int:
    """How many steps last so long, a rounding error less not counting as one more."""
    return -floor(-time_s / step_s * (1 - 1e-12))


def job_rate(node_rate: float, nodes: int) -> float:
    """λ of a job that any of its nodes stops: ``k λ_nd`` (equation 6 forgets k)."""
    return _count("nodes", nodes, 1) * _at_least_0("node_rate", node_rate)


def several_failures(probability: float, nodes: int, parities: int = 1) -> float:
    """The probability that more of a group's nodes fail than its parities rebuild.

    ``λ_re = 1 − (1−λ)^n − n λ (1−λ)^{n−1}`` for one parity (equation 7), and in general
    ``1 − Σ_{i ≤ r} C(n, i) λ^i (1−λ)^{n−i}``. Where that would cancel, the terms beyond r are
    summed instead: 12 digits however small the probability, while the result is a normal double.

    Args:
        probability: λ, that one node fails in the time looked at.
        nodes: n, of the sharding group.
        parities: r: 0 (no parity: any failure), 1 (RAIM5), 2 (any two nodes may be lost), …

    Raises:
        ConfigError: no probability, or the parities do not fit into the group.
    """
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(f"probability = {probability} must be from 0 to 1")
    _check_group(nodes, parities)
    if probability == 1.0:
        return float(parities < nodes)
    return _bearable_and_lost(-log1p(-probability), nodes, parities)[1]


def log_bearable(hazard: float, nodes: int, parities: int = 1) -> float:
    """The logarithm of ``1 − λ_re``, without loss where it is near 0 and where it is far below.

    Args:
        hazard: −ln(1 − λ) ≥ 0, which holds a λ near 0 and near 1 alike.
        nodes, parities: as of ``several_failures``.

    Raises:
        ConfigError: a negative hazard, or the parities do not fit into the group.
    """
    if not hazard >= 0.0:
        raise ConfigError(f"hazard = {hazard} must be at least 0")
    _check_group(nodes, parities)
    bearable, lost = _bearable_and_lost(hazard, nodes, parities)
    if lost < 0.5:
        return log1p(-lost)
    return log(bearable) if bearable > 0.0 else -inf


def _bearable_and_lost(hazard: float, nodes: int, parities: int) -> tuple[float, float]:
    """P(Binomial(nodes, λ) ≤ parities) and its complement, both without cancellation."""
    if parities == nodes or hazard == 0.0:
        return 1.0, 0.0
    bearable = sum(_exactly(count, hazard, nodes) for count in range(parities + 1))
    if bearable < 0.5:
        return bearable, 1.0 - bearable
    return bearable, _tail(parities + 1, hazard, nodes)


def _exactly(count: int, hazard: float, nodes: int) -> float:
    """P(Binomial(nodes, λ) = count)."""
    return comb(nodes, count) * (-expm1(-hazard)) ** count * exp(-hazard * (nodes - count))


def _tail(first: int, hazard: float, nodes: int) -> float:
    """P(Binomial(nodes, λ) ≥ first) where it is no more than a half: terms fall, all positive."""
    term, total, odds = _exactly(first, hazard, nodes), 0.0, expm1(hazard)
    for count in range(first, nodes + 1):
        if total + term == total:
            break
        total += term
        term *= (nodes - count) / (count + 1) * odds
    return total


def _check_group(nodes: int, parities: int) -> None:
    if not 0 <= parities <= min(_count("nodes", nodes, 1), MAX_PARITIES):
        raise ConfigError(
            f"parities = {parities} must be from 0 to the nodes = {nodes} of a group, "
            f"and at most {MAX_PARITIES}"
        )


def memory_loss_rate(node_rate: float, group: int, parities: int, window_s: float) -> float:
    """λ_re of one sharding group: how often more nodes are lost than parities rebuild.

    A first node fails at the rate n λ; for ``window_s`` the group lacks it. Snapshots are lost if
    at least r of the n − 1 others fail meanwhile: ``n λ · P(Binomial(n − 1, 1 − e^{−λ w}) ≥ r)``,
    to first order ``(r + 1) C(n, r + 1) λ^{r+1} w^r``. Without parity it is n λ.

    Args:
        node_rate: λ_nd, at which a node loses its memory.
        group: n, nodes that share the parities.
        parities: r, fewer than the nodes.
        window_s: until a lost node is replaced and its shard rebuilt.

    Raises:
        ConfigError: a value is negative or not finite, or parities do not fit into the group.
    """
    first = job_rate(node_rate, group)
    if not 0 <= parities < min(group, MAX_PARITIES):
        raise ConfigError(
            f"parities = {parities} must be from 0 to {min(group, MAX_PARITIES) - 1} in a group of "
            f"{group} nodes: one at least has to be left"
        )
    if parities == 0:
        return first
    meanwhile = -expm1(-node_rate * _at_least_0("window_s", window_s))
    return first * several_failures(meanwhile, group - 1, parities - 1)


def _count(name: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{name} = {value} must be at least {least}")
    return value


def _at_least_0(name: str, value: float) -> float:
    if isnan(value) or not 0.0 <= value < inf:
        raise ConfigError(f"{name} = {value} must be finite and at least 0")
    return value


def _above_0(name: str, value: float) -> float:
    if isnan(value) or not 0.0 < value < inf:
        raise ConfigError(f"{name} = {value} must be finite and above 0")
    return value

"""A plan of the whole ladder and the time that is then expected to be lost in a month.

``detection`` plans the detectors and ``intervals`` the saves: a snapshot every √(2 O_save / λ),
where λ is the rate of all failures of the job, a checkpoint likewise with the rate at which memory
is lost, and the number of parities with the smallest loss. The loss is that of Poisson failures
over wall-clock time. Each line is the share of a second that remains after it:

    e^{−Σ λ_i R_i}                     not restarting; a failure during a restart begins it again
    − Σ repairs                        not repairing ops and repeating steps
    λT / (e^{λT} − 1) · …              in steps that are kept: failures return to the last save
    step / (step + checks + saves)     training

``simulate`` simulates the same assumptions event by event.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, expm1

from holdfast.planner import intervals
from holdfast.planner.detection import (
    MONTH_S,
    Looks,
    SilentFaults,
    least_looks,
    silent_faults,
    undone_by_eviction,
)
from holdfast.planner.fleet import LadderQuestion

HOURS = MONTH_S / 3600
RARE = 0.1


@dataclass(frozen=True)
class Configuration:
    """The settings that a plan chooses and that ``holdfast.config`` reads.

    ``parities`` and ``snapshot_steps`` are None for checkpoints alone; otherwise ``persist_steps``
    is a multiple of ``snapshot_steps``.
    """

    looks: Looks
    parities: int | None
    snapshot_steps: int | None
    persist_steps: int

    @property
    def save_steps(self) -> int:
        """Steps between saves of any kind."""
        return self.snapshot_steps or self.persist_steps


@dataclass(frozen=True)
class Timing:
    """The times of a configuration in seconds, as the analysis and the simulation use them.

    ``unit_s`` is a step with its checks and ``work_s`` one without. A delay is the time from the
    beginning of a save until it can be restored. ``restore_s``, ``rebuild_s`` and ``reload_s`` last
    from a failure until training runs again: from the node's own memory, with a node replaced, or
    from disk.
    """

    unit_s: float
    work_s: float
    save_stall_s: float
    persist_stall_s: float
    save_delay_s: float
    persist_delay_s: float
    restore_s: float
    rebuild_s: float
    reload_s: float


def timing(question: LadderQuestion, configuration: Configuration) -> Timing:
    """Return the times of a configuration in this fleet."""
    costs, parities = question.costs, configuration.parities
    reload_s = costs.restart_s + costs.reload_s
    unit_s = question.model.step_s + configuration.looks.cost_s(question)
    if parities is None:
        stall, delay = costs.checkpoint_stall_s, costs.persist_s
        return Timing(
            unit_s, question.model.step_s, stall, 0.0, delay, delay, reload_s, reload_s, reload_s
        )
    return Timing(
        unit_s=unit_s,
        work_s=question.model.step_s,
        save_stall_s=stall_of(question, parities),
        persist_stall_s=costs.persist_stall_s,
        save_delay_s=costs.snapshot_s,
        persist_delay_s=costs.snapshot_s + costs.persist_s,
        restore_s=costs.restart_s + costs.restore_s,
        rebuild_s=costs.restart_s + costs.rebuild_s,
        reload_s=reload_s,
    )


def stall_of(question: LadderQuestion, parities: int) -> float:
    """Return O_save of a snapshot with this number of parities."""
    return question.costs.snapshot_stall_s + parities * question.costs.parity_stall_s


@dataclass(frozen=True)
class Month:
    """The use of the 730 hours of a month, and the numbers of faults in it.

    ``detecting_h`` are hours of checks, audits and shadows of steps that are kept; hours of steps
    that are computed again after a failure are all in ``recomputing_h``. ``repairing_h`` are hours
    of ops recomputed and steps repeated after silent faults. ``failures`` counts crashes, node
    losses and evictions, and ``memory_losses`` those of them after which a checkpoint is needed.
    """

    training_h: float
    detecting_h: float
    saving_h: float
    recomputing_h: float
    restarting_h: float
    repairing_h: float
    undetected_faults: float
    failures: float
    memory_losses: float

    @property
    def lost_h(self) -> float:
        """Hours in which no step that is kept is computed."""
        computing = self.detecting_h + self.saving_h + self.recomputing_h
        return computing + self.restarting_h + self.repairing_h

    @property
    def overhead(self) -> float:
        """Time that checks and saves add to a step without faults, as a share of the step."""
        return (self.detecting_h + self.saving_h) / self.training_h if self.training_h else 0.0


@dataclass(frozen=True)
class LadderPlan:
    """A configuration with its expected month.

    It is ``feasible`` if undetected faults meet the target. ``attention`` is the share of
    executions to check by section, if the question has an attention table, and ``doubts`` are
    reasons why the expectation is unreliable.
    """

    configuration: Configuration
    month: Month
    feasible: bool
    attention: Mapping[str, float] | None
    doubts: tuple[str, ...]


def plan_ladder(question: LadderQuestion, looks: Looks | None = None) -> LadderPlan:
    """Plan the configuration of a fleet with the least loss of time.

    The detectors run in the given shares of steps, by default the cheapest that meet the target.
    """
    looks = least_looks(question) if looks is None else looks
    choices = [one for count in question.parities for one in _with_parities(question, looks, count)]
    best = min(choices, key=lambda one: expected(question, one).lost_h)
    return _judged(question, best)


def plan_checkpoints(question: LadderQuestion) -> LadderPlan:
    """Plan checkpoints alone at their own best interval, without detectors."""
    none, costs = Looks(0, 0, 0), question.costs
    rate, floor_s = _failures_per_s(question, none), costs.persist_s / costs.disk_share
    every = _every(question, costs.checkpoint_stall_s, question.model.step_s, rate, floor_s)
    return _judged(question, Configuration(none, None, None, every))


def _with_parities(question: LadderQuestion, looks: Looks, parities: int) -> list[Configuration]:
    """Return configurations with the best interval of snapshots or one that divides evenly.

    Rounding the interval of checkpoints up to a multiple of the snapshots' can nearly double it.
    It can be better to change the interval of snapshots a little instead.
    """
    costs = question.costs
    unit_s = question.model.step_s + looks.cost_s(question)
    failures = _failures_per_s(question, looks)
    snapshot = _every(question, stall_of(question, parities), unit_s, failures)
    losses = _memory_losses_per_s(question, parities)
    floor_s = costs.persist_s / costs.disk_share
    persist = _every(question, costs.persist_stall_s, unit_s, losses, floor_s)
    times = {max(1, persist // snapshot), -(-persist // snapshot)}
    pairs = [(snapshot, -(-persist // snapshot)), *((-(-persist // n), n) for n in sorted(times))]
    return [Configuration(looks, parities, steps, steps * count) for steps, count in pairs]


def _every(
    question: LadderQuestion, save_s: float, unit_s: float, per_s: float, floor_s: float = 0.0
) -> int:
    longest_s = max(question.target.persist_at_least_every_h * 3600, floor_s)
    steps = intervals.every_at_rate(save_s, unit_s, per_s, floor_s)
    return max(1, min(steps, int(longest_s / unit_s)))


def _failures_per_s(question: LadderQuestion, looks: Looks) -> float:
    step_s = question.model.step_s + looks.cost_s(question)
    evictions = silent_faults(question, looks, step_s).evictions / MONTH_S
    return question.per_s("crash") + question.per_s("node_loss") + evictions


def _memory_losses_per_s(question: LadderQuestion, parities: int) -> float:
    node_losses, costs = question.per_s("node_loss"), question.costs
    if node_losses == 0.0:
        return 0.0
    window_s = costs.restart_s + costs.rebuild_s
    return min(node_losses, question.nodes.memory_losses_per_s(parities, window_s))


def expected(question: LadderQuestion, configuration: Configuration) -> Month:
    """Compute the expected month of a configuration.

    Guarantees: the hours add up to 730. The result is exact for Poisson failures that return to
    one kind of save with one restart time, otherwise to first order in the differences; see
    ``LadderPlan.doubts``.
    """
    time = timing(question, configuration)

    def at_share(healthy: float) -> tuple[SilentFaults, float, float]:
        """Return the silent faults of this healthy share, what runs and what is healthy then."""
        silent = silent_faults(question, configuration.looks, time.unit_s, MONTH_S * healthy)
        running, repair_s = _running(question, configuration, time, silent)
        return silent, running, max(0.0, running - repair_s / MONTH_S)

    # Silent faults occur only while steps are computed, and cost a part of that time: the share
    # that is left must be the share that they were computed with.
    silent, running, healthy = at_share(_fixed_point(lambda share: at_share(share)[2]))
    failures, gone = _failures(question, configuration, silent)
    # Devices are evicted while steps are computed, and only then: more often than in the month.
    computing = failures + silent.evictions / MONTH_S * (1 / healthy - 1) if healthy else failures
    kept = healthy * _kept(configuration, time, computing, gone)
    cycle_s, saves_s = _cycle(configuration, time)
    undone = silent.evictions * undone_by_eviction(
        question, configuration.looks, time.unit_s, cycle_s, time.save_delay_s
    )
    each = HOURS * kept * configuration.save_steps / cycle_s
    return Month(
        training_h=each * time.work_s,
        detecting_h=each * (time.unit_s - time.work_s),
        saving_h=HOURS * kept * saves_s / cycle_s,
        recomputing_h=HOURS * (healthy - kept),
        restarting_h=HOURS * (1 - running),
        repairing_h=HOURS * (running - healthy),
        undetected_faults=max(0.0, silent.undetected - undone)
        * (kept / healthy if healthy else 0.0),
        failures=failures * MONTH_S,
        memory_losses=gone * MONTH_S,
    )


def _fixed_point(falling: Callable[[float], float]) -> float:
    """Return the x in [0, 1] with ``falling(x) = x``, by secants that keep both sides of it."""
    low, high = 0.0, 1.0
    above, below = falling(low) - low, falling(high) - high
    middle = value = 1.0
    while abs(value) > 1e-12 and high - low > 1e-12:
        middle = low + (high - low) * above / (above - below)
        value = falling(middle) - middle
        # The side that stays counts half, so that both sides move (the Illinois rule).
        if value >= 0:
            low, above, below = middle, value, below / 2
        else:
            high, above, below = middle, above / 2, value
    return middle


def _failures(
    question: LadderQuestion, configuration: Configuration, silent: SilentFaults
) -> tuple[float, float]:
    """Return the rates per second of all failures and of those that need a checkpoint."""
    failures = question.per_s("crash") + question.per_s("node_loss") + silent.evictions / MONTH_S
    if configuration.parities is None:
        return failures, failures
    return failures, _memory_losses_per_s(question, configuration.parities)


def _running(
    question: LadderQuestion, configuration: Configuration, time: Timing, silent: SilentFaults
) -> tuple[float, float]:
    """Return the share of the month without restarts, and the seconds of repairs."""
    failures, gone = _failures(question, configuration, silent)
    crashes, costs = question.per_s("crash"), question.costs
    restarting = crashes * time.restore_s + (failures - crashes) * time.rebuild_s
    restarting += gone * (time.reload_s - time.rebuild_s)
    return exp(-restarting), silent.repaired * costs.op_recompute_s + silent.rerun * costs.rerun_s


def _cycle(configuration: Configuration, time: Timing) -> tuple[float, float]:
    """Return the seconds from one save to the next, and the stall within them."""
    saves_s = time.save_stall_s
    if configuration.snapshot_steps:
        saves_s += time.persist_stall_s * configuration.snapshot_steps / configuration.persist_steps
    return configuration.save_steps * time.unit_s + saves_s, saves_s


def _kept(configuration: Configuration, time: Timing, failures: float, gone: float) -> float:
    """Return the share of healthy time in steps that no failure undoes.

    A failure undoes the steps since the last save that was clean; a loss of memory undoes those
    since the last checkpoint.
    """
    cycle_s, _ = _cycle(configuration, time)
    kept = _since_save(failures, cycle_s) * exp(-failures * time.save_delay_s)
    if configuration.snapshot_steps is None:
        return kept
    persist_s = cycle_s * configuration.persist_steps / configuration.snapshot_steps
    further = _since_save(gone, persist_s) / _since_save(gone, cycle_s)
    return kept * further * exp(-gone * (time.persist_delay_s - time.save_delay_s))


def _since_save(per_s: float, cycle_s: float) -> float:
    """Return λT / (e^{λT} − 1), the share of the time between failures before the last save."""
    mean = per_s * cycle_s
    return mean / expm1(mean) if 1e-12 < mean < 700 else float(mean <= 1)


def _judged(question: LadderQuestion, configuration: Configuration) -> LadderPlan:
    month = expected(question, configuration)
    feasible = month.undetected_faults <= question.undetected_target * (1 + 1e-9)
    attention = question.attention.plan().frequencies if question.attention else None
    doubts = tuple(_doubts(question, configuration, month))
    return LadderPlan(configuration, month, feasible, attention, doubts)


def _doubts(question: LadderQuestion, configuration: Configuration, month: Month) -> list[str]:
    """List the assumptions of the expectation that do not hold for this configuration."""
    time, found = timing(question, configuration), []
    per_s = month.failures / MONTH_S
    cycle_s, _ = _cycle(configuration, time)
    slowest_s = time.reload_s if configuration.parities is None else time.rebuild_s
    for what, length_s in (("restarting", slowest_s), ("from save to save", cycle_s)):
        if per_s * length_s > RARE:
            found.append(
                f"failures are not rare: {per_s * length_s:.2g} are expected in the "
                f"{length_s:.3g} s of {what}; the expectation is first order in them"
            )
    again = question.per_s("node_loss") * time.rebuild_s
    if configuration.parities is not None and time.reload_s > 0 and again > RARE:
        found.append(
            f"{again:.2g} nodes are lost while one is rebuilt: which groups lose their memory is "
            "only simulated"
        )
    found += [
        f"faults.{kind}: only {faults.units(question.fleet)} with shape {faults.shape:g} are far "
        "from Poisson"
        for kind, faults in question.faults.items()
        if faults.shape != 1 and faults.units(question.fleet) < 10
    ]
    return found

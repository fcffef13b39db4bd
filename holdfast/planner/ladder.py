"""One plan of the whole ladder: how often each rung must look, and what is then lost a month.

Detectors are planned by ``detection``, intervals by ``intervals``: a snapshot each √(2 O_save / λ)
with λ of every failure of the job, a checkpoint likewise with the rate at which memory is lost, and
as many parities as lose least. What is then lost is counted by the wall clock, failure by failure,
Poisson: of a second, the parts that are left by each line are

    e^{−Σ λ_i R_i}                     not restarting; a failure while restarting begins it anew
    − Σ repairs                        not repairing ops and repeating steps
    λT / (e^{λT} − 1) · …              in steps that are kept: failures return to the last save
    step / (step + checks + saves)     training

``simulate`` plays the same assumptions event by event.
"""

from collections.abc import Mapping
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
_NEVER_S = 1e100


@dataclass(frozen=True)
class Configuration:
    """What the plan sets, and ``holdfast.config`` reads.

    Args:
        looks: shares of steps checked, audited and shadowed.
        parities: of the snapshots; None if there are none: checkpoints alone.
        snapshot_steps: from one snapshot to the next; None if there are none.
        persist_steps: from one checkpoint to the next, a multiple of ``snapshot_steps``.
    """

    looks: Looks
    parities: int | None
    snapshot_steps: int | None
    persist_steps: int

    @property
    def save_steps(self) -> int:
        """From one save of any kind to the next."""
        return self.snapshot_steps or self.persist_steps


@dataclass(frozen=True)
class Timing:
    """The times of a configuration that analysis and simulation share, in seconds.

    Args:
        unit_s: a step with its checks; work_s: without them.
        save_stall_s: of each save; persist_stall_s: of each checkpoint beside a snapshot.
        save_delay_s, persist_delay_s: until a save, or a checkpoint, can be restored.
        restore_s, rebuild_s, reload_s: until training runs again from memory, from memory with a
            node replaced, and from disk; all with the restart.
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
    """Of a configuration in this fleet."""
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
    """O_save of a snapshot with so many parities."""
    return question.costs.snapshot_stall_s + parities * question.costs.parity_stall_s


@dataclass(frozen=True)
class Month:
    """Where the 730 hours go, and what happens in them; the hours add up.

    Args:
        training_h: in steps that are kept; detecting_h: checks, audits, shadows of these;
            saving_h: stalls.
        recomputing_h: steps done again; restarting_h: until training runs after a failure;
            repairing_h: ops recomputed and steps repeated after a silent fault.
        undetected_faults: silent, in steps that are kept.
        failures: crashes, node losses and evictions; memory_losses: that need a checkpoint.
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
        """All but training."""
        return (
            self.detecting_h
            + self.saving_h
            + self.recomputing_h
            + self.restarting_h
            + self.repairing_h
        )

    @property
    def overhead(self) -> float:
        """What checks and saves add to a step that nothing befalls, as a share of it."""
        return (self.detecting_h + self.saving_h) / self.training_h if self.training_h else 0.0


@dataclass(frozen=True)
class LadderPlan:
    """A configuration, what it is expected to bring, and where that may be off.

    Args:
        month: expected.
        feasible: whether undetected faults meet the target.
        attention: shares by section, if there is a table for it; and their cost in a step.
        doubts: why the expectation is not to be relied on; empty where it holds.
    """

    configuration: Configuration
    month: Month
    feasible: bool
    attention: Mapping[str, float] | None
    doubts: tuple[str, ...]


def plan_ladder(question: LadderQuestion, looks: Looks | None = None) -> LadderPlan:
    """The whole configuration for a fleet.

    Args:
        looks: of the detectors; by default the cheapest that meet the target.
    """
    looks = least_looks(question) if looks is None else looks
    choices = [one for count in question.parities for one in _with_parities(question, looks, count)]
    best = min(choices, key=lambda one: expected(question, one).lost_h)
    return _judged(question, best)


def plan_checkpoints(question: LadderQuestion) -> LadderPlan:
    """Checkpoints alone, at their own best interval: nothing looks for silent faults."""
    unit_s, rate = question.model.step_s, _failures_per_s(question, Looks(0, 0, 0))
    costs = question.costs
    floor_s = costs.persist_s / costs.disk_share
    every = _every(question, costs.checkpoint_stall_s, unit_s, rate, floor_s)
    return _judged(question, Configuration(Looks(0, 0, 0), None, None, every))


def _with_parities(question: LadderQuestion, looks: Looks, parities: int) -> list[Configuration]:
    """Snapshots at their best, checkpoints at a multiple of it; and snapshots that divide evenly.

    Rounding checkpoints up to a multiple can nearly double their interval; to move the snapshots a
    little instead can be better.
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
    mttf_s = 1 / per_s if per_s > 1 / _NEVER_S else _NEVER_S
    steps = intervals.every(save_s, unit_s, mttf_s, floor_s)
    return max(1, min(steps, int(longest_s / unit_s)))


def _failures_per_s(question: LadderQuestion, looks: Looks) -> float:
    step_s = question.model.step_s + looks.cost_s(question)
    evictions = silent_faults(question, looks, step_s).evictions / MONTH_S
    return question.per_s("crash") + question.per_s("node_loss") + evictions


def _memory_losses_per_s(question: LadderQuestion, parities: int) -> float:
    window_s = question.costs.restart_s + question.costs.rebuild_s
    nodes = question.nodes
    if question.per_s("node_loss") == 0.0:
        return 0.0
    return min(question.per_s("node_loss"), nodes.memory_losses_per_s(parities, window_s))


def expected(question: LadderQuestion, configuration: Configuration) -> Month:
    """A month with this configuration, as the module says.

    Guarantees: hours add up to 730. Exact for Poisson failures that all return to one kind of save
    and are restarted from alike; else to first order in what differs, see ``LadderPlan.doubts``.
    """
    time = timing(question, configuration)
    first = silent_faults(question, configuration.looks, time.unit_s)
    running, repair_s = _running(question, configuration, time, first)
    healthy_s = MONTH_S * running / (1 + repair_s / MONTH_S)
    # Silent faults strike while steps are computed, which is less than all of the month.
    silent = silent_faults(question, configuration.looks, time.unit_s, healthy_s)
    running, repair_s = _running(question, configuration, time, silent)
    healthy = max(0.0, running - repair_s / MONTH_S)
    failures, gone = _failures(question, configuration, silent)
    kept = healthy * _kept(configuration, time, failures, gone)
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


def _failures(
    question: LadderQuestion, configuration: Configuration, silent: SilentFaults
) -> tuple[float, float]:
    """All failures of the job each second, and those that need a checkpoint."""
    failures = question.per_s("crash") + question.per_s("node_loss") + silent.evictions / MONTH_S
    if configuration.parities is None:
        return failures, failures
    return failures, _memory_losses_per_s(question, configuration.parities)


def _running(
    question: LadderQuestion, configuration: Configuration, time: Timing, silent: SilentFaults
) -> tuple[float, float]:
    """The share of the month in which nothing restarts, and the seconds that repairs take."""
    failures, gone = _failures(question, configuration, silent)
    crashes, costs = question.per_s("crash"), question.costs
    restarting = crashes * time.restore_s + (failures - crashes) * time.rebuild_s
    restarting += gone * (time.reload_s - time.rebuild_s)
    return exp(-restarting), silent.repaired * costs.op_recompute_s + silent.rerun * costs.rerun_s


def _cycle(configuration: Configuration, time: Timing) -> tuple[float, float]:
    """From one save to the next: all of it, and what it stalls."""
    saves_s = time.save_stall_s
    if configuration.snapshot_steps:
        saves_s += time.persist_stall_s * configuration.snapshot_steps / configuration.persist_steps
    return configuration.save_steps * time.unit_s + saves_s, saves_s


def _kept(configuration: Configuration, time: Timing, failures: float, gone: float) -> float:
    """The share of healthy time in steps that no failure takes back.

    A failure takes back what was done since the last save, and while that was not clean yet; a loss
    of memory what was done since the last checkpoint.
    """
    cycle_s, _ = _cycle(configuration, time)
    kept = _since_save(failures, cycle_s) * exp(-failures * time.save_delay_s)
    if configuration.snapshot_steps is None:
        return kept
    persist_s = cycle_s * configuration.persist_steps / configuration.snapshot_steps
    further = _since_save(gone, persist_s) / _since_save(gone, cycle_s)
    return kept * further * exp(-gone * (time.persist_delay_s - time.save_delay_s))


def _since_save(per_s: float, cycle_s: float) -> float:
    """λT / (e^{λT} − 1): of the time between failures, what lies before the last save."""
    mean = per_s * cycle_s
    return mean / expm1(mean) if 1e-12 < mean < 700 else float(mean <= 1)


def _judged(question: LadderQuestion, configuration: Configuration) -> LadderPlan:
    month = expected(question, configuration)
    feasible = month.undetected_faults <= question.undetected_target * (1 + 1e-9)
    attention = question.attention.plan().frequencies if question.attention else None
    doubts = tuple(_doubts(question, configuration, month))
    return LadderPlan(configuration, month, feasible, attention, doubts)


def _doubts(question: LadderQuestion, configuration: Configuration, month: Month) -> list[str]:
    """Where the expectation's assumptions are strained."""
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
    if configuration.parities is not None and time.reload_s > 0:
        again = question.per_s("node_loss") * time.rebuild_s
        if again > RARE:
            found.append(
                f"{again:.2g} nodes are lost while one is rebuilt: which groups lose their memory "
                "is only simulated"
            )
    found += [
        f"faults.{kind}: only {faults.units(question.fleet)} with shape {faults.shape:g} are far "
        "from Poisson"
        for kind, faults in question.faults.items()
        if faults.shape != 1 and faults.units(question.fleet) < 10
    ]
    return found

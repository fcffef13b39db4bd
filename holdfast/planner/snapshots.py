"""When to snapshot and when to persist, together, and what faults then cost a month.

Equations 4 to 11 of REFT's appendix A (``holdfast.planner.intervals``), put together: every failure
of the job returns to the last snapshot in memory; where memory is lost, to the last persisted
checkpoint. Without snapshots every failure returns to the checkpoint.

A failure that leaves memory alone needs no rebuilding; its reload is priced as one all the same.
"""

from dataclasses import dataclass
from math import inf, isfinite

from holdfast.errors import ConfigError
from holdfast.planner import intervals
from holdfast.planner.survival import Survival, weibull_rate

HOURS_PER_MONTH = 730.0
SECONDS_PER_DAY = 86_400.0
_NEVER_S = 1e100


@dataclass(frozen=True)
class Fleet:
    """Nodes that train one model, and how often each fails.

    Args:
        nodes: k, of the job.
        group: n, of a sharding group: nodes that hold the same part of the model, and its parity.
        mttf_s: of a node, until its memory is lost.
        software_mttf_s: of a node, until its trainer dies and its memory stays; inf for never.

    Raises:
        ConfigError: a time is not above 0, or groups do not fill the fleet.
    """

    nodes: int
    group: int
    mttf_s: float
    software_mttf_s: float = inf

    def __post_init__(self) -> None:
        if not (isfinite(self.mttf_s) and self.mttf_s > 0):
            raise ConfigError(f"mttf = {self.mttf_s} s must be finite and above 0")
        if not self.software_mttf_s > 0:
            raise ConfigError(f"software mttf = {self.software_mttf_s} s must be above 0")
        if self.group < 1 or self.nodes < 1 or self.nodes % self.group:
            raise ConfigError(
                f"{self.nodes} nodes are not made of groups of {self.group}: "
                "give a multiple of the group, at least 1"
            )

    @property
    def failures_per_s(self) -> float:
        """Of the job, of any kind."""
        return intervals.job_rate(1 / self.mttf_s + 1 / self.software_mttf_s, self.nodes)

    def memory_losses_per_s(self, parities: int | None, window_s: float) -> float:
        """How often snapshots cannot be restored; None for none: at every failure."""
        if parities is None:
            return self.failures_per_s
        groups = self.nodes // self.group
        rate = 1 / self.mttf_s
        return groups * intervals.memory_loss_rate(rate, self.group, parities, window_s)

    def survival(self, shape: float) -> Survival:
        """In days, with failures of this Weibull shape and these mean times."""
        return Survival(
            self.nodes,
            self.group,
            weibull_rate(self.mttf_s / SECONDS_PER_DAY, shape),
            weibull_rate(self.software_mttf_s / SECONDS_PER_DAY, shape),
            shape,
        )


@dataclass(frozen=True)
class Costs:
    """What saving and restoring take, in seconds.

    Args:
        snapshot_stall_s: O_save of a snapshot.
        persist_stall_s: that training waits for a checkpoint being written; 0 beside it.
        persist_s: least time from one checkpoint to the next: a disk's time to write it, or more.
        restart_s: T_sch, until all nodes run again.
        rebuild_s: T_load from memory, with the lost shard rebuilt by parity.
        reload_s: T_load of a persisted checkpoint.

    Raises:
        ConfigError: one is negative or not finite.
    """

    snapshot_stall_s: float
    persist_stall_s: float
    persist_s: float
    restart_s: float
    rebuild_s: float
    reload_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} = {value} must be finite and at least 0")

    @property
    def unprotected_s(self) -> float:
        """For how long a group lacks a node that it lost."""
        return self.restart_s + self.rebuild_s


@dataclass(frozen=True)
class Speeds:
    """Bytes a second of one node: into memory, to its disk, from its peers."""

    copy_bytes_s: float
    disk_bytes_s: float
    network_bytes_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ConfigError(f"{name} = {value} must be finite and above 0")


def snapshot_costs(
    state_bytes: float,
    fleet: Fleet,
    speeds: Speeds,
    compute_s: float,
    restart_s: float,
    parities: int | None,
    *,
    disk_share: float = 1.0,
    blocking: bool = False,
) -> Costs:
    """Costs from sizes and speeds, where none were measured. Nothing else enters.

    A snapshot copies ``(1 + r) W / n`` on each of the group's n nodes: its share, and what its r
    parities are made of. A checkpoint writes W / n on each; a snapshot to write from is one of
    memory, so that only its copy can stall. To restore, every node needs all of W.

    Args:
        state_bytes: W, parameters and optimizer state of one sharding group.
        compute_s: T_comp, beside which a save is free (equation 8).
        restart_s: until all nodes run again.
        parities: r; None for checkpoints alone.
        disk_share: of the time in which checkpoints may be written.
        blocking: the checkpoint is part of the save: ``T_ckpt`` of equation 10 is copy and write.

    Raises:
        ConfigError: a value is negative or not finite, or the share is not above 0 and at most 1.
    """
    if not 0.0 < disk_share <= 1.0:
        raise ConfigError(f"disk share = {disk_share} must be above 0 and at most 1")
    if not (isfinite(state_bytes) and state_bytes > 0):
        raise ConfigError(f"state = {state_bytes} bytes must be finite and above 0")
    share = state_bytes / fleet.group
    copy_s = (1 + (parities or 0)) * share / speeds.copy_bytes_s
    write_s = share / speeds.disk_bytes_s
    stall = intervals.stall_s(copy_s, compute_s)
    persist = intervals.stall_s(copy_s + write_s, compute_s) if blocking else stall
    return Costs(
        snapshot_stall_s=stall,
        persist_stall_s=persist if parities is None else 0.0,
        persist_s=0.0 if blocking else write_s / disk_share,
        restart_s=restart_s,
        rebuild_s=state_bytes / speeds.network_bytes_s,
        reload_s=state_bytes / speeds.disk_bytes_s,
    )


@dataclass(frozen=True)
class Lost:
    """Seconds lost for each second of training, by what they are lost to."""

    saving: float
    recomputing: float
    restarting: float

    @property
    def total(self) -> float:
        """Of all three."""
        return self.saving + self.recomputing + self.restarting

    @property
    def hours_per_month(self) -> float:
        """Of 730 hours, in which ``total / (1 + total)`` is lost."""
        return HOURS_PER_MONTH * self.total / (1 + self.total)


@dataclass(frozen=True)
class SnapshotPlan:
    """Steps between saves, and what is lost by it.

    Args:
        parities: of the snapshots; None if there are none.
        snapshot_steps: from one snapshot to the next; None if there are none.
        persist_steps: from one checkpoint to the next, a multiple of ``snapshot_steps``.
        failures_per_s: of the job.
        memory_losses_per_s: those among them after which a checkpoint is needed.
        lost: for each second of training.
    """

    parities: int | None
    snapshot_steps: int | None
    persist_steps: int
    failures_per_s: float
    memory_losses_per_s: float
    lost: Lost


def plan_snapshots(
    fleet: Fleet, costs: Costs, step_s: float, parities: int | None = 1
) -> SnapshotPlan:
    """The intervals at which least is lost: of snapshots (9) and of checkpoints (11).

    Each interval is the best whole number of steps and at least 1; of checkpoints also no shorter
    than ``costs.persist_s`` and a multiple of the snapshots'.

    Args:
        parities: r of each sharding group, fewer than its nodes; None for checkpoints alone (10).

    Raises:
        ConfigError: the step does not take time, or the parities do not fit into a group.
    """
    failures = fleet.failures_per_s
    losses = min(failures, fleet.memory_losses_per_s(parities, costs.unprotected_s))
    persist = _steps(costs.persist_stall_s, step_s, losses, costs.persist_s)
    if parities is None:
        saving = costs.persist_stall_s / (persist * step_s)
        lost = Lost(saving, *_after_failures(costs, 0.0, losses, 0.0, persist * step_s))
        return SnapshotPlan(None, None, persist, failures, losses, lost)
    snapshot = _steps(costs.snapshot_stall_s, step_s, failures)
    persist = -(-persist // snapshot) * snapshot
    snapshot_s, persist_s = snapshot * step_s, persist * step_s
    saving = costs.snapshot_stall_s / snapshot_s + costs.persist_stall_s / persist_s
    after = _after_failures(costs, failures - losses, losses, snapshot_s, persist_s)
    return SnapshotPlan(parities, snapshot, persist, failures, losses, Lost(saving, *after))


def _steps(save_s: float, step_s: float, failures_per_s: float, floor_s: float = 0.0) -> int:
    mttf_s = 1 / failures_per_s if failures_per_s > 1 / _NEVER_S else _NEVER_S
    return intervals.every(save_s, step_s, mttf_s, floor_s)


def _after_failures(
    costs: Costs, rebuilt_per_s: float, reloaded_per_s: float, snapshot_s: float, persist_s: float
) -> tuple[float, float]:
    """The second term of equation 4, for both kinds of save: recomputing, and restarting."""
    recomputing = rebuilt_per_s * snapshot_s / 2 + reloaded_per_s * persist_s / 2
    restarting = rebuilt_per_s * (costs.restart_s + costs.rebuild_s)
    return recomputing, restarting + reloaded_per_s * (costs.restart_s + costs.reload_s)

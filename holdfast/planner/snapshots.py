"""Plans of the intervals of snapshots and checkpoints, and the time that failures then cost.

Equations 4 to 11 of REFT's appendix A (``holdfast.planner.intervals``) are combined: after a
failure the job returns to the last snapshot in memory or, if memory is lost, to the last persisted
checkpoint. Without snapshots it returns to the last checkpoint after every failure.

After a failure that leaves memory intact nothing has to be rebuilt; its load is nevertheless
assumed to take as long as a rebuild.
"""

from dataclasses import dataclass
from math import inf, isfinite

from holdfast.errors import ConfigError
from holdfast.planner import intervals
from holdfast.planner.checks import above_0, at_least_0
from holdfast.planner.parity_groups import group_sizes
from holdfast.planner.survival import Survival, weibull_rate

HOURS_PER_MONTH = 730.0
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True)
class Fleet:
    """The nodes that train one model, and their mean times to failure.

    Args:
        nodes: k, the number of nodes of the job.
        group: n, the largest number of nodes of a parity group (``parity_groups.group_sizes``),
            which hold the same part of the model and its parity.
        mttf_s: Mean time until a node's memory is lost.
        software_mttf_s: Mean time until a node's trainer dies and its memory stays; inf for never.

    Raises:
        ConfigError: A time is not above 0, or there are no nodes.
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
        group_sizes(self.nodes, self.group)

    @property
    def failures_per_s(self) -> float:
        """Rate of all failures of the job, per second."""
        return intervals.job_rate(1 / self.mttf_s + 1 / self.software_mttf_s, self.nodes)

    def memory_losses_per_s(self, parities: int | None, window_s: float) -> float:
        """Return the rate of failures after which no snapshot can be restored.

        If ``parities`` is None there are no snapshots, and these are all failures. ``window_s`` is
        the time until a lost node is replaced and its shard rebuilt.
        """
        if parities is None:
            return self.failures_per_s
        rate = 1 / self.mttf_s
        return sum(
            count * intervals.memory_loss_rate(rate, size, parities, window_s)
            for size, count in group_sizes(self.nodes, self.group, parities)
        )

    def survival(self, shape: float) -> Survival:
        """Return the survival over days with failures of this Weibull shape."""
        return Survival(
            self.nodes,
            self.group,
            weibull_rate(self.mttf_s / SECONDS_PER_DAY, shape),
            weibull_rate(self.software_mttf_s / SECONDS_PER_DAY, shape),
            shape,
        )


@dataclass(frozen=True)
class Costs:
    """The times of saving and restoring, in seconds.

    Args:
        snapshot_stall_s: O_save of a snapshot.
        persist_stall_s: Stall of training by a checkpoint; 0 if it is written beside training.
        persist_s: Shortest time between checkpoints, at least the disk's time to write one.
        restart_s: T_sch, from a failure until all nodes run again.
        rebuild_s: T_load from memory, with the lost shard rebuilt by parity.
        reload_s: T_load of a persisted checkpoint.

    Raises:
        ConfigError: A time is negative or not finite.
    """

    snapshot_stall_s: float
    persist_stall_s: float
    persist_s: float
    restart_s: float
    rebuild_s: float
    reload_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            at_least_0(name, getattr(self, name))

    @property
    def unprotected_s(self) -> float:
        """Time for which a group lacks a lost node."""
        return self.restart_s + self.rebuild_s


@dataclass(frozen=True)
class Speeds:
    """Speeds of one node in bytes per second: into memory, to its disk, from its peers."""

    copy_bytes_s: float
    disk_bytes_s: float
    network_bytes_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            above_0(name, getattr(self, name))


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
    """Estimate costs that were not measured, from sizes and speeds alone.

    A snapshot copies ``(1 + r) W / n`` on each of the group's n nodes: the node's share and the
    input of its r parities. A checkpoint writes W / n on each node, from a snapshot in memory, so
    that only the copy can stall training. To restore, every node needs all of W.

    Args:
        state_bytes: W, the size of the parameters and the optimizer state of one sharding group.
        fleet: The nodes and groups.
        speeds: The speeds of one node.
        compute_s: T_comp, beside which a save is free (equation 8).
        restart_s: Time from a failure until all nodes run again.
        parities: r; None for checkpoints alone.
        disk_share: Share of the time in which checkpoints may be written.
        blocking: True if training waits until the checkpoint is written, so that ``T_ckpt`` of
            equation 10 is copy and write.

    Raises:
        ConfigError: A value is negative or not finite, or the share is not above 0 and at most 1.
    """
    if not 0.0 < disk_share <= 1.0:
        raise ConfigError(f"disk share = {disk_share} must be above 0 and at most 1")
    if not (isfinite(state_bytes) and state_bytes > 0):
        raise ConfigError(f"state = {state_bytes} bytes must be finite and above 0")
    share = state_bytes / group_sizes(fleet.nodes, fleet.group)[-1][0]
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
    """The seconds lost for each second of training, by cause."""

    saving: float
    recomputing: float
    restarting: float

    @property
    def total(self) -> float:
        """Seconds lost by all three causes."""
        return self.saving + self.recomputing + self.restarting

    @property
    def hours_per_month(self) -> float:
        """Hours lost in a month of 730 hours, ``total / (1 + total)`` of them."""
        return HOURS_PER_MONTH * self.total / (1 + self.total)


@dataclass(frozen=True)
class SnapshotPlan:
    """The steps between saves, and the time that is lost.

    Args:
        parities: Number of parities of the snapshots; None without snapshots.
        snapshot_steps: Steps between snapshots; None without snapshots.
        persist_steps: Steps between checkpoints, a multiple of ``snapshot_steps``.
        failures_per_s: Rate of failures of the job.
        memory_losses_per_s: Rate of failures after which a checkpoint is needed.
        lost: Seconds lost for each second of training.
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
    """Compute the intervals of snapshots (equation 9) and checkpoints (11) with the least loss.

    Each interval is the best whole number of steps, at least 1. That of checkpoints is no shorter
    than ``costs.persist_s`` and a multiple of the snapshots'.

    Args:
        fleet: The nodes and their mean times to failure.
        costs: The times of saving and restoring.
        step_s: Time of a step without a save.
        parities: r of each sharding group, fewer than its nodes; None for checkpoints alone (10).

    Raises:
        ConfigError: The step does not take time, or the parities do not fit into a group.
    """
    failures = fleet.failures_per_s
    losses = min(failures, fleet.memory_losses_per_s(parities, costs.unprotected_s))
    persist = intervals.every_at_rate(costs.persist_stall_s, step_s, losses, costs.persist_s)
    # Without snapshots, no failure is repaired from memory: losses are all failures.
    snapshot, saving, recomputing, rebuilt_per_s = None, 0.0, 0.0, failures - losses
    if parities is not None:
        snapshot = intervals.every_at_rate(costs.snapshot_stall_s, step_s, failures)
        persist = -(-persist // snapshot) * snapshot
        saving = costs.snapshot_stall_s / (snapshot * step_s)
        recomputing = rebuilt_per_s * (snapshot * step_s) / 2
    persist_s = persist * step_s
    lost = Lost(
        saving + costs.persist_stall_s / persist_s,
        recomputing + losses * persist_s / 2,
        rebuilt_per_s * costs.unprotected_s + losses * (costs.restart_s + costs.reload_s),
    )
    return SnapshotPlan(parities, snapshot, persist, failures, losses, lost)

"""What a plan of the whole ladder is made from: fleet, faults, model and measured costs.

Each class is a table of the fleet file (``holdfast.planner.fleet_file``). Defaults are assumptions,
with their source where there is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Self

from holdfast.errors import ConfigError
from holdfast.planner.attention import MODELS, AttentionSize, CheckCosts
from holdfast.planner.frequencies import ErrorRates, FrequencyPlan, plan_frequencies, sections_of
from holdfast.planner.snapshots import SECONDS_PER_DAY, Costs, Fleet, Speeds, snapshot_costs
from holdfast.planner.vulnerability import published

# Llama 3 (Dubey et al. 2024, 3.3.4): 54 days of 16,384 GPUs had 419 unexpected interruptions, six
# of them put down to silent corruption. Half of them are taken to spare the node's memory.
_DEVICE_DAYS = 54 * 16_384
INTERRUPTED_DAYS, CORRUPTED_DAYS = _DEVICE_DAYS / 419, _DEVICE_DAYS / 6
MOST_PARITIES = 2
_FLOPS_OF_RATES = 1e25


def _divisor(whole: int, most: int = 8) -> int:
    """The largest number up to ``most`` that divides."""
    return max(part for part in range(1, most + 1) if whole % part == 0)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value} must be at least {least}")


def _times(table: str, values: object, names: Any) -> None:
    for name in names:
        value = getattr(values, name)
        if not (isfinite(value) and value >= 0):
            raise ConfigError(f"{table}.{name} = {value} must be finite and at least 0")


def _shares(table: str, values: object, names: tuple[str, ...]) -> None:
    for name in names:
        if not 0 <= getattr(values, name) <= 1:
            raise ConfigError(f"{table}.{name} = {getattr(values, name)} must be from 0 to 1")


@dataclass(frozen=True)
class Devices:
    """``[fleet]``: devices that train one model.

    Args:
        devices: of the job; devices_per_node: that are lost together, 0 for at most 8.
        group_nodes: nodes of a sharding group, which share a parity; 0 for at most 8 that divide
            the nodes.
    """

    devices: int
    devices_per_node: int = 0
    group_nodes: int = 0

    def __post_init__(self) -> None:
        _at_least("fleet.devices", self.devices, 1)
        for name in ("devices_per_node", "group_nodes"):
            _at_least(f"fleet.{name}", getattr(self, name), 0)
        if not self.devices_per_node:
            object.__setattr__(self, "devices_per_node", _divisor(self.devices))
        if self.devices % self.devices_per_node:
            raise ConfigError(
                f"fleet.devices = {self.devices} are not whole nodes of "
                f"fleet.devices_per_node = {self.devices_per_node}: change one"
            )
        if not self.group_nodes:
            object.__setattr__(self, "group_nodes", _divisor(self.nodes))
        if self.nodes % self.group_nodes:
            raise ConfigError(
                f"{self.nodes} nodes are not whole groups of fleet.group_nodes = "
                f"{self.group_nodes}: change one"
            )

    @property
    def nodes(self) -> int:
        """Of the job."""
        return self.devices // self.devices_per_node


@dataclass(frozen=True)
class Faults:
    """``[faults.KIND]``: how often one kind of fault strikes one device or node.

    Args:
        mttf_days: mean time from one to the next; inf for never.
        per: ``"device"`` or ``"node"``, of which it is the mean time.
        shape: c of the Weibull distribution of these times; 1 is exponential.
    """

    mttf_days: float
    per: str = "device"
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not self.mttf_days > 0:
            raise ConfigError(f"mttf_days = {self.mttf_days} must be above 0; inf for never")
        if self.per not in ("device", "node"):
            raise ConfigError(f'per = {self.per!r} must be "device" or "node"')
        if not 0.1 <= self.shape <= 100:
            raise ConfigError(f"shape = {self.shape} must be from 0.1 to 100; 1 is exponential")

    @property
    def mttf_s(self) -> float:
        """Of one device or node."""
        return self.mttf_days * SECONDS_PER_DAY

    def units(self, devices: Devices) -> int:
        """How many there are of what it strikes."""
        return devices.devices if self.per == "device" else devices.nodes

    def per_s(self, devices: Devices) -> float:
        """How often it strikes the job, in the long run."""
        return self.units(devices) / self.mttf_s


KINDS: Mapping[str, Faults] = {
    "matmul": Faults(CORRUPTED_DAYS),
    "outside": Faults(CORRUPTED_DAYS),
    "faulty_device": Faults(CORRUPTED_DAYS),
    "crash": Faults(2 * INTERRUPTED_DAYS),
    "node_loss": Faults(2 * INTERRUPTED_DAYS / 8, per="node"),
}


@dataclass(frozen=True)
class FaultyDevice:
    """``[faulty_device]``: how a device errs once it has turned faulty.

    Args:
        faults_per_step: silent faults in a step, on average.
        matmul_share: of them that strike inside matmuls.
        repeats_share: of them that strike a repetition on the same device alike.
        evict_after: faults found on it until it is replaced.
    """

    faults_per_step: float = 0.1
    matmul_share: float = 0.5
    repeats_share: float = 0.1
    evict_after: int = 3

    def __post_init__(self) -> None:
        _times("faulty_device", self, ("faults_per_step",))
        _shares("faulty_device", self, ("matmul_share", "repeats_share"))
        _at_least("faulty_device.evict_after", self.evict_after, 1)


@dataclass(frozen=True)
class Model:
    """``[model]``: what is trained.

    Args:
        step_s: a training step, without checks and saves.
        state_bytes: parameters and optimizer state of one sharding group.
        compute_s: forward and backward, beside which a save is free; 0 for all of the step.
    """

    step_s: float
    state_bytes: float
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        _times("model", self, ("step_s", "state_bytes", "compute_s"))
        for name in ("step_s", "state_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model.{name} = {getattr(self, name)} must be above 0")


@dataclass(frozen=True)
class LadderCosts:
    """``[costs]``: seconds that each rung takes; what is negative was not measured.

    Args:
        check_s_per_step: verifying all products of a step (assumed: 5 % of it).
        op_recompute_s: repairing what a check found (assumed: a thousandth of a step).
        audit_s_per_step: computing a step a second time (assumed: a step).
        shadow_s_per_step: having a step computed by another device, too (assumed: a step).
        rerun_s: repeating a step that an audit or a shadow doubts (assumed: a step).
        snapshot_stall_s: O_save of a snapshot without parity (modelled).
        parity_stall_s: what each parity adds to it (assumed: as much again).
        snapshot_s: from the end of a step until its snapshot is clean (assumed: a step).
        restore_s: loading from the node's own memory (modelled, as from its peers').
        rebuild_s: loading with a lost shard rebuilt by parity (modelled).
        persist_stall_s: that training waits for a checkpoint written from a snapshot.
        persist_s: until such a checkpoint is on disk (modelled).
        reload_s: loading a persisted checkpoint (modelled).
        restart_s: from a failure until all nodes run again, and can load.
        checkpoint_stall_s: O_save without snapshots: the copy that is then written in the
            background (modelled).
        disk_share: of the time in which checkpoints may be written.
    """

    check_s_per_step: float = -1.0
    op_recompute_s: float = -1.0
    audit_s_per_step: float = -1.0
    shadow_s_per_step: float = -1.0
    rerun_s: float = -1.0
    snapshot_stall_s: float = -1.0
    parity_stall_s: float = -1.0
    snapshot_s: float = -1.0
    restore_s: float = -1.0
    rebuild_s: float = -1.0
    persist_stall_s: float = 0.0
    persist_s: float = -1.0
    reload_s: float = -1.0
    restart_s: float = 60.0
    checkpoint_stall_s: float = -1.0
    disk_share: float = 0.1

    def completed(self, model: Model, modelled: Costs) -> Self:
        """With every cost that was not measured as its own text says."""
        stall = modelled.snapshot_stall_s if self.snapshot_stall_s < 0 else self.snapshot_stall_s
        assumed = {
            "check_s_per_step": 0.05 * model.step_s,
            "op_recompute_s": 0.001 * model.step_s,
            "snapshot_stall_s": stall,
            "parity_stall_s": stall,
            "restore_s": modelled.rebuild_s,
            "rebuild_s": modelled.rebuild_s,
            "persist_s": modelled.persist_s,
            "reload_s": modelled.reload_s,
            "checkpoint_stall_s": stall,
        }
        unmeasured = (item.name for item in fields(self) if getattr(self, item.name) < 0)
        return replace(self, **{name: assumed.get(name, model.step_s) for name in unmeasured})


@dataclass(frozen=True)
class LadderSpeeds:
    """``[speeds]``: of one node, for the costs that were not measured, in bytes a second."""

    copy_bytes_per_s: float = 5e9
    disk_bytes_per_s: float = 250e6
    network_bytes_per_s: float = 1e9


@dataclass(frozen=True)
class Detection:
    """``[detection]``: what each detector sees.

    Args:
        check_coverage: share of the faults inside matmuls that exceed the checks' thresholds.
        shadowed_share: of the devices whose work a shadowed step computes a second time: 1 if
            partners recompute each other, 1/ranks for one spare replica.
    """

    check_coverage: float = 0.98
    shadowed_share: float = 1.0

    def __post_init__(self) -> None:
        _shares("detection", self, ("check_coverage", "shadowed_share"))


@dataclass(frozen=True)
class Target:
    """``[target]``: what the plan has to reach.

    Args:
        undetected_faults_per_1000_device_months: at most, of silent faults in steps that are kept.
        persist_at_least_every_h: however rarely memory is thought to be lost.
    """

    undetected_faults_per_1000_device_months: float = 1.0
    persist_at_least_every_h: float = 24.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise ConfigError(
                    f"target.{item.name} = {getattr(self, item.name)} must be above 0"
                )


@dataclass(frozen=True)
class AttentionTable:
    """``[attention]``: sections of ``holdfast.nn.Attention``, planned by Algorithm 1; optional.

    Args:
        s_as_s, s_cl_s, s_o_s: measured seconds of the full check of each section, an execution.
        executions_per_step: layers, times micro-batches.
        batch, length: of an execution.
        model: whose sizes and vulnerability (``planner.published``).
        failures_per_execution: the target.
        inf_per_1e25_flops, nan_per_1e25_flops, near_inf_per_1e25_flops: error rates.
    """

    s_as_s: float
    s_cl_s: float
    s_o_s: float
    executions_per_step: int
    batch: int
    length: int
    model: str = "gpt2"
    failures_per_execution: float = 1e-11
    inf_per_1e25_flops: float = 20.0
    nan_per_1e25_flops: float = 20.0
    near_inf_per_1e25_flops: float = 20.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"attention.model = {self.model!r}: choose of {', '.join(MODELS)}")
        _at_least("attention.executions_per_step", self.executions_per_step, 1)

    def plan(self) -> FrequencyPlan:
        """Algorithm 1's frequencies, with costs in seconds."""
        per_1e25 = (self.inf_per_1e25_flops, self.nan_per_1e25_flops, self.near_inf_per_1e25_flops)
        size = AttentionSize.of_model(self.model, self.batch, self.length)
        rates = ErrorRates(*(rate / _FLOPS_OF_RATES for rate in per_1e25))
        costs = CheckCosts({"S_AS": self.s_as_s, "S_CL": self.s_cl_s, "S_O": self.s_o_s})
        sections = sections_of(size, rates, published(self.model), costs)
        return plan_frequencies(sections, self.failures_per_execution)


@dataclass(frozen=True)
class LadderQuestion:
    """Everything that a plan of the ladder is made from; costs are complete.

    Raises:
        ConfigError: a value is out of range; names it.
    """

    fleet: Devices
    model: Model
    faults: Mapping[str, Faults] = field(default_factory=lambda: dict(KINDS))
    faulty_device: FaultyDevice = FaultyDevice()
    costs: LadderCosts = LadderCosts()
    speeds: LadderSpeeds = LadderSpeeds()
    detection: Detection = Detection()
    target: Target = Target()
    attention: AttentionTable | None = None
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        speeds = Speeds(
            self.speeds.copy_bytes_per_s,
            self.speeds.disk_bytes_per_s,
            self.speeds.network_bytes_per_s,
        )
        compute_s = self.model.compute_s or self.model.step_s
        modelled = snapshot_costs(
            self.model.state_bytes, self.nodes, speeds, compute_s, self.costs.restart_s, 0
        )
        costs = self.costs.completed(self.model, modelled)
        _times("costs", costs, [item.name for item in fields(costs)])
        if not 0 < costs.disk_share <= 1:
            raise ConfigError(f"costs.disk_share = {costs.disk_share} must be above 0, at most 1")
        object.__setattr__(self, "costs", costs)

    @property
    def nodes(self) -> Fleet:
        """The nodes in their groups, and how often one is lost."""
        mttf_s = self.fleet.nodes / max(self.per_s("node_loss"), 1e-100)
        return Fleet(self.fleet.nodes, self.fleet.group_nodes, mttf_s)

    @property
    def parities(self) -> range:
        """That a group can have."""
        return range(min(MOST_PARITIES + 1, self.fleet.group_nodes))

    def per_s(self, kind: str) -> float:
        """How often one of ``KINDS`` strikes the job."""
        return self.faults[kind].per_s(self.fleet)

    @property
    def undetected_target(self) -> float:
        """Silent faults that may get through in a month."""
        return self.target.undetected_faults_per_1000_device_months * self.fleet.devices / 1000

    def resized(self, devices: int) -> Self:
        """The same for another number of devices, in nodes and groups of at most the same size."""
        per_node = _divisor(devices, self.fleet.devices_per_node)
        group = _divisor(devices // per_node, self.fleet.group_nodes)
        return replace(self, fleet=Devices(devices, per_node, group))

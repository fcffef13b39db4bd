"""The inputs of a plan of the whole ladder: fleet, faults, model and measured costs.

Each class is a table of the fleet file (``holdfast.planner.fleet_file``), and docs/planning.md
describes every field. Defaults are assumptions; sources are given where there are any.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Self

from holdfast.errors import ConfigError
from holdfast.planner.attention import MODELS, AttentionSize, CheckCosts
from holdfast.planner.checks import above_0, at_least, at_least_0, share
from holdfast.planner.frequencies import ErrorRates, FrequencyPlan, plan_frequencies, sections_of
from holdfast.planner.parity_groups import GROUP_NODES
from holdfast.planner.snapshots import SECONDS_PER_DAY, Costs, Fleet, Speeds, snapshot_costs
from holdfast.planner.vulnerability import published

# Llama 3 (Dubey et al. 2024, 3.3.4): in 54 days of 16,384 GPUs there were 419 unexpected
# interruptions, six of them attributed to silent data corruption. It is assumed that half of the
# interruptions leave the node's memory intact.
_DEVICE_DAYS = 54 * 16_384
INTERRUPTED_DAYS, CORRUPTED_DAYS = _DEVICE_DAYS / 419, _DEVICE_DAYS / 6
MOST_PARITIES = 2
_FLOPS_OF_RATES = 1e25


def _divisor(whole: int, most: int = 8) -> int:
    """Return the largest divisor up to ``most``."""
    return max(part for part in range(1, most + 1) if whole % part == 0)


@dataclass(frozen=True)
class Devices:
    """``[fleet]``: the devices that train one model, their nodes and sharding groups."""

    devices: int
    devices_per_node: int = 0
    group_nodes: int = 0

    def __post_init__(self) -> None:
        at_least("fleet.devices", self.devices, 1)
        for name in ("devices_per_node", "group_nodes"):
            at_least(f"fleet.{name}", getattr(self, name), 0)
        if not self.devices_per_node:
            object.__setattr__(self, "devices_per_node", _divisor(self.devices))
        if self.devices % self.devices_per_node:
            raise ConfigError(
                f"fleet.devices = {self.devices} are not whole nodes of "
                f"fleet.devices_per_node = {self.devices_per_node}: change one"
            )
        object.__setattr__(self, "group_nodes", min(self.group_nodes or GROUP_NODES, self.nodes))

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return self.devices // self.devices_per_node


@dataclass(frozen=True)
class Faults:
    """``[faults.KIND]``: the mean time between two faults of a device or a node."""

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
        """Mean time between two faults of one device or node, in seconds."""
        return self.mttf_days * SECONDS_PER_DAY

    def units(self, devices: Devices) -> int:
        """Return the number of devices or nodes that it can affect."""
        return devices.devices if self.per == "device" else devices.nodes

    def per_s(self, devices: Devices) -> float:
        """Return the long-run rate of these faults in the job, per second."""
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
    """``[faulty_device]``: the faults of a device that has turned faulty, until it is replaced."""

    faults_per_step: float = 0.1
    matmul_share: float = 0.5
    repeats_share: float = 0.1
    evict_after: int = 3

    def __post_init__(self) -> None:
        at_least_0("faulty_device.faults_per_step", self.faults_per_step)
        share("faulty_device.matmul_share", self.matmul_share)
        share("faulty_device.repeats_share", self.repeats_share)
        at_least("faulty_device.evict_after", self.evict_after, 1)


@dataclass(frozen=True)
class Model:
    """``[model]``: the time of a step without checks and saves, and the size of the state."""

    step_s: float
    state_bytes: float
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        above_0("model.step_s", self.step_s)
        above_0("model.state_bytes", self.state_bytes)
        at_least_0("model.compute_s", self.compute_s)


@dataclass(frozen=True)
class LadderCosts:
    """``[costs]``: the time in seconds of each rung. Negative values were not measured."""

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
        """Return the costs with assumed and modelled values for those that were not measured."""
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
        unmeasured = (name for name, cost_s in vars(self).items() if cost_s < 0)
        return replace(self, **{name: assumed.get(name, model.step_s) for name in unmeasured})


@dataclass(frozen=True)
class LadderSpeeds:
    """``[speeds]``: speeds of one node, from which costs that were not measured are estimated."""

    copy_bytes_per_s: float = 5e9
    disk_bytes_per_s: float = 250e6
    network_bytes_per_s: float = 1e9


@dataclass(frozen=True)
class Detection:
    """``[detection]``: the share of faults, or of devices, that each detector covers."""

    check_coverage: float = 0.98
    shadowed_share: float = 1.0

    def __post_init__(self) -> None:
        share("detection.check_coverage", self.check_coverage)
        share("detection.shadowed_share", self.shadowed_share)


@dataclass(frozen=True)
class Target:
    """``[target]``: the requirements on the plan."""

    undetected_faults_per_1000_device_months: float = 1.0
    persist_at_least_every_h: float = 24.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"target.{name} = {value} must be above 0")


@dataclass(frozen=True)
class AttentionTable:
    """``[attention]``: sections of ``holdfast.nn.Attention``, planned by Algorithm 1; optional."""

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
        at_least("attention.executions_per_step", self.executions_per_step, 1)

    def plan(self) -> FrequencyPlan:
        """Compute Algorithm 1's frequencies, with costs in seconds."""
        per_1e25 = (self.inf_per_1e25_flops, self.nan_per_1e25_flops, self.near_inf_per_1e25_flops)
        size = AttentionSize.of_model(self.model, self.batch, self.length)
        rates = ErrorRates(*(rate / _FLOPS_OF_RATES for rate in per_1e25))
        costs = CheckCosts({"S_AS": self.s_as_s, "S_CL": self.s_cl_s, "S_O": self.s_o_s})
        sections = sections_of(size, rates, published(self.model), costs)
        return plan_frequencies(sections, self.failures_per_execution)


@dataclass(frozen=True)
class LadderQuestion:
    """All inputs of a plan of the ladder; costs that were not measured are filled in."""

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
        speeds, compute_s = Speeds(*astuple(self.speeds)), self.model.compute_s or self.model.step_s
        modelled = snapshot_costs(
            self.model.state_bytes, self.nodes, speeds, compute_s, self.costs.restart_s, 0
        )
        costs = self.costs.completed(self.model, modelled)
        for name, value in vars(costs).items():
            at_least_0(f"costs.{name}", value)
        if not 0 < costs.disk_share <= 1:
            raise ConfigError(f"costs.disk_share = {costs.disk_share} must be above 0, at most 1")
        object.__setattr__(self, "costs", costs)

    @property
    def nodes(self) -> Fleet:
        """Nodes, their groups and the mean time until one is lost."""
        mttf_s = self.fleet.nodes / max(self.per_s("node_loss"), 1e-100)
        return Fleet(self.fleet.nodes, self.fleet.group_nodes, mttf_s)

    @property
    def parities(self) -> range:
        """Numbers of parities that a group can have."""
        return range(min(MOST_PARITIES + 1, self.fleet.group_nodes))

    def per_s(self, kind: str) -> float:
        """Return the rate of one of ``KINDS`` in the job, per second."""
        return self.faults[kind].per_s(self.fleet)

    @property
    def undetected_target(self) -> float:
        """Largest number of undetected silent faults in a month."""
        return self.target.undetected_faults_per_1000_device_months * self.fleet.devices / 1000

    def resized(self, devices: int) -> Self:
        """Return the question for another number of devices, in nodes and groups no larger."""
        per_node = _divisor(devices, self.fleet.devices_per_node)
        return replace(self, fleet=Devices(devices, per_node, self.fleet.group_nodes))

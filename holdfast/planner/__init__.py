"""How often each rung must look: pure functions, without torch, of rates, sizes and costs.

``plan_frequencies`` says how often the sections of attention are to be checked for a target
(ATTNChecker's Algorithm 1); ``holdfast plan attention`` prints it. ``every`` says after how many
steps to snapshot (REFT's appendix A), ``plan_snapshots`` when to persist as well, and ``Survival``
how long state lasts in memory; ``holdfast plan snapshots`` prints these.
"""

from holdfast.planner.attention import (
    AttentionSize,
    CheckCosts,
    check_reads,
    gemm_flops,
    modelled_costs,
)
from holdfast.planner.frequencies import (
    ErrorRates,
    FrequencyPlan,
    Section,
    attention_failure,
    plan_frequencies,
    sections_of,
)
from holdfast.planner.intervals import every
from holdfast.planner.scale import ScaledOverhead, scaled_overhead
from holdfast.planner.snapshots import (
    Costs,
    Fleet,
    SnapshotPlan,
    Speeds,
    plan_snapshots,
    snapshot_costs,
)
from holdfast.planner.survival import Survival
from holdfast.planner.vulnerability import published

__all__ = [
    "AttentionSize",
    "CheckCosts",
    "Costs",
    "ErrorRates",
    "Fleet",
    "FrequencyPlan",
    "ScaledOverhead",
    "Section",
    "SnapshotPlan",
    "Speeds",
    "Survival",
    "attention_failure",
    "check_reads",
    "every",
    "gemm_flops",
    "modelled_costs",
    "plan_frequencies",
    "plan_snapshots",
    "published",
    "scaled_overhead",
    "sections_of",
    "snapshot_costs",
]

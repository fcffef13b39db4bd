"""Plans of how often to check, audit, snapshot and persist: pure functions without torch.

``plan_frequencies`` computes how often the sections of attention have to be checked to meet a
target (ATTNChecker's Algorithm 1); ``holdfast plan attention`` prints it. ``every`` computes the
number of steps between snapshots (REFT's appendix A), ``plan_snapshots`` that between checkpoints
as well, and ``Survival`` how long state lasts in memory; ``holdfast plan snapshots`` prints these.
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
    "sections_of",
    "snapshot_costs",
]

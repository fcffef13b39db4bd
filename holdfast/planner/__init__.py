"""How often each rung must look: pure functions, without torch, of rates, sizes and costs.

``plan_frequencies`` says how often the sections of attention are to be checked for a target
(ATTNChecker's Algorithm 1); ``holdfast plan attention`` prints it.
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
from holdfast.planner.scale import ScaledOverhead, scaled_overhead
from holdfast.planner.vulnerability import published

__all__ = [
    "AttentionSize",
    "CheckCosts",
    "ErrorRates",
    "FrequencyPlan",
    "ScaledOverhead",
    "Section",
    "attention_failure",
    "check_reads",
    "gemm_flops",
    "modelled_costs",
    "plan_frequencies",
    "published",
    "scaled_overhead",
    "sections_of",
]

"""Recomputation: what checksums cannot see is found by doing the step again."""

from holdfast.replay.determinism import Determinism, check_determinism
from holdfast.replay.instruments import (
    Lockstep,
    Mismatches,
    Updates,
    drift,
    lockstep,
    parameter_sync,
)
from holdfast.replay.rerun import Attempt, MicroStep, Verdict, rerun
from holdfast.replay.spikes import SpikeDetector

__all__ = [
    "Attempt",
    "Determinism",
    "Lockstep",
    "MicroStep",
    "Mismatches",
    "SpikeDetector",
    "Updates",
    "Verdict",
    "check_determinism",
    "drift",
    "lockstep",
    "parameter_sync",
    "rerun",
]

"""Recomputation: faults that checksums cannot see are found by computing the step again."""

from holdfast.replay.determinism import Determinism, check_determinism
from holdfast.replay.lockstep import Lockstep, Mismatches, Updates, drift, lockstep, parameter_sync
from holdfast.replay.majority import StepsToName, expected_steps_to_name
from holdfast.replay.rerun import Attempt, MicroStep, Verdict, rerun
from holdfast.replay.shadow import Shadow, ShadowReplica
from holdfast.replay.spikes import SpikeDetector

__all__ = [
    "Attempt",
    "Determinism",
    "Lockstep",
    "MicroStep",
    "Mismatches",
    "Shadow",
    "ShadowReplica",
    "SpikeDetector",
    "StepsToName",
    "Updates",
    "Verdict",
    "check_determinism",
    "drift",
    "expected_steps_to_name",
    "lockstep",
    "parameter_sync",
    "rerun",
]

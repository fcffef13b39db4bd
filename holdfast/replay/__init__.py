"""Recomputation: what checksums cannot see is found by doing the step again."""

from holdfast.replay.rerun import Attempt, MicroStep, Verdict, rerun
from holdfast.replay.spikes import SpikeDetector

__all__ = ["Attempt", "MicroStep", "SpikeDetector", "Verdict", "rerun"]

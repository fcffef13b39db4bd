"""Screening before a job: load every core and GPU of a machine and compare their results."""

from holdfast.screen.runner import Request, screen
from holdfast.screen.units import Unit, machine_units
from holdfast.screen.verdict import Verdict

__all__ = ["Request", "Unit", "Verdict", "machine_units", "screen"]

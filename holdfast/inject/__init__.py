"""Fault injection: schedules of faults, their effects on tensors, and the injector."""

from holdfast.inject.injector import Injector
from holdfast.inject.results import Results
from holdfast.inject.schedule import (
    KINDS,
    SITES,
    Fault,
    check_schedule,
    dump_schedule,
    load_schedule,
    parse_schedule,
)
from holdfast.inject.targets import Faults
from holdfast.inject.trials import campaign
from holdfast.sites import Gemm, arm, disarm

__all__ = [
    "KINDS",
    "SITES",
    "Fault",
    "Faults",
    "Gemm",
    "Injector",
    "Results",
    "arm",
    "campaign",
    "check_schedule",
    "disarm",
    "dump_schedule",
    "load_schedule",
    "parse_schedule",
]

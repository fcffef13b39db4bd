"""Fault injection: schedules of faults, their effects on tensors, and the injector."""

from holdfast.inject.injector import Injector
from holdfast.inject.schedule import (
    KINDS,
    SITES,
    Fault,
    check_schedule,
    dump_schedule,
    load_schedule,
    parse_schedule,
)
from holdfast.sites import Gemm, arm, disarm

__all__ = [
    "KINDS",
    "SITES",
    "Fault",
    "Gemm",
    "Injector",
    "arm",
    "check_schedule",
    "disarm",
    "dump_schedule",
    "load_schedule",
    "parse_schedule",
]

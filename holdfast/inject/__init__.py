"""Fault injection: schedules of faults, their effects on tensors, and the injector."""

from typing import TYPE_CHECKING

from holdfast.inject.schedule import (
    KINDS,
    SITES,
    Fault,
    check_schedule,
    dump_schedule,
    load_schedule,
    parse_schedule,
)
from holdfast.lazy import on_first_use

if TYPE_CHECKING:
    from holdfast.inject.injector import Injector
    from holdfast.inject.results import Results
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

# They need torch, which schedules and reports do not.
__getattr__ = on_first_use(
    __name__,
    {
        "Injector": "holdfast.inject.injector",
        "Results": "holdfast.inject.results",
        "Faults": "holdfast.inject.targets",
        "campaign": "holdfast.inject.trials",
    }
    | dict.fromkeys(("Gemm", "arm", "disarm"), "holdfast.sites"),
)

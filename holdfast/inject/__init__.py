"""Fault injection: what a fault does, when and where it strikes, and the record of it."""

from holdfast.inject.device import UnhealthyDevice
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
from holdfast.inject.storms import random_storm

__all__ = [
    "KINDS",
    "SITES",
    "Fault",
    "Injector",
    "UnhealthyDevice",
    "check_schedule",
    "dump_schedule",
    "load_schedule",
    "parse_schedule",
    "random_storm",
]

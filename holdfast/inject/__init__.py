"""Fault injection: what a fault does, when and where it strikes, and the record of it."""

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

__all__ = [
    "KINDS",
    "SITES",
    "Fault",
    "Injector",
    "check_schedule",
    "dump_schedule",
    "load_schedule",
    "parse_schedule",
]

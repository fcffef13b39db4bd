"""Fault events: what kinds there are, how they are recorded, and the ledger that keeps them.

Every decision about a fault is one :class:`Event` of an :class:`EventKind`. A process keeps its
recent events in memory; once :func:`open_ledger` was called they also go to the run's ledger.
Each event is given to subscribers and logged by ``holdfast.events``. A healthy step records none.
"""

from holdfast.events.kinds import EventKind, Role
from holdfast.events.ledger import LEDGER_NAME, RUNGS, Event, Ledger, locked, read_ledger
from holdfast.events.recorder import (
    claim_ledger,
    clear,
    close_ledger,
    current_step,
    dropped,
    ensure_ledger,
    flush,
    open_ledger,
    recent,
    record,
    record_config,
    retire_ledger,
    set_step,
    subscribe,
)

__all__ = [
    "LEDGER_NAME",
    "RUNGS",
    "Event",
    "EventKind",
    "Ledger",
    "Role",
    "claim_ledger",
    "clear",
    "close_ledger",
    "current_step",
    "dropped",
    "ensure_ledger",
    "flush",
    "locked",
    "open_ledger",
    "read_ledger",
    "recent",
    "record",
    "record_config",
    "retire_ledger",
    "set_step",
    "subscribe",
]

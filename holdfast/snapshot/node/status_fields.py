"""The fields that the status of a snapshot management process (SMP) has, and their types."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

_NUMBER = (int, float)
_FIELDS: Mapping[str, Any] = {
    **dict.fromkeys(("pid", "commits", "aborts", "bytes", "refused"), int),
    **dict.fromkeys(("steps", "clean", "connected", "leased"), list),
    **dict.fromkeys(("uptime_s", "stall_s"), _NUMBER),
    **dict.fromkeys(("age_s", "copy_bytes_s"), (*_NUMBER, NoneType)),
    **dict.fromkeys(("cluster", "persister", "persist_failed"), (dict, NoneType)),
    "newest": (int, NoneType),
    "peers": dict,
    "state": str,
}


def unlike_a_status(status: Mapping[str, Any]) -> str:
    """Say which field of an answer no SMP would send; return an empty text for a status."""
    for name, kind in _FIELDS.items():
        if name not in status:
            return f"its answer has no {name}"
        if not isinstance(status[name], kind):
            return f"its answer has {name} = {status[name]!r:.60}"
    return ""

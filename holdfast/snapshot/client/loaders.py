"""Data loaders whose position cannot be saved."""

import warnings

from holdfast import events
from holdfast.events import EventKind

_REMEDY = (
    "draw its batches through Guard.batches, which begins its pass again after a restart and skips "
    "the batches that were trained on, or give it state_dict and load_state_dict"
)


def has_state(loader: object) -> bool:
    """Return whether a loader has the methods by which its position is saved."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def unsaved(loader: object) -> str:
    """Return why the position of a loader cannot be saved; empty if it can, or there is none."""
    if loader is None:
        return ""
    name = type(loader).__name__
    if not has_state(loader):
        return f"a {name} without state_dict and load_state_dict"
    try:
        loader.state_dict()  # type: ignore[attr-defined]
    except Exception as error:
        return f"a {name} whose state_dict raises {type(error).__name__} ({error})"
    return ""


def say_unsaved(loader: object, reason: str) -> None:
    """Say that a loader's position is not in the snapshots."""
    detail = {"loader": type(loader).__name__, "reason": reason, "remedy": _REMEDY}
    events.record(EventKind.LOADER_UNSAVED, detail=detail)
    where = f"the position of the loader, {reason}, is not in the snapshots"
    warnings.warn(f"{where}: {_REMEDY}", stacklevel=4)

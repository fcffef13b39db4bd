"""Data loaders whose position cannot be saved."""

import warnings

from holdfast import events
from holdfast.events import EventKind
from holdfast.snapshot.layout.training_state import Training

_REMEDY = (
    "draw its batches through Guard.batches, which begins its pass again after a restart and skips "
    "the batches that were trained on, or give it state_dict and load_state_dict"
)


class LoaderCheck:
    """Finds out once whether the position of a loader can be saved, and says once if it cannot."""

    def __init__(self, training: Training) -> None:
        self._training, self._loader = training, training.loader
        self._reason: str | None = None

    def check(self) -> None:
        """Leave the loader out if its ``state_dict`` raises.

        Call it not before the first snapshot, because ``state_dict`` may open the loader, which
        draws random numbers.
        """
        if self._reason is None:
            self._reason = "" if self._loader is None else _unsaved(self._loader)
            if self._reason:
                self._training.loader = None

    def say(self, *, repeatable: bool) -> None:
        """Say that the position is not saved, unless its pass can be repeated in another way."""
        if self._reason and (_has_state(self._loader) or not repeatable):
            name = type(self._loader).__name__
            detail = {"loader": name, "reason": self._reason, "remedy": _REMEDY}
            events.record(EventKind.LOADER_UNSAVED, detail=detail)
            where = f"the position of the loader, {self._reason}, is not in the snapshots"
            warnings.warn(f"{where}: {_REMEDY}", stacklevel=4)
            self._reason = ""


def _has_state(loader: object) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _unsaved(loader: object) -> str:
    """Return why the position of a loader cannot be saved; empty if it can."""
    name = type(loader).__name__
    if not _has_state(loader):
        return f"a {name} without state_dict and load_state_dict"
    try:
        loader.state_dict()  # type: ignore[attr-defined]
    except Exception as error:
        return f"a {name} whose state_dict raises {type(error).__name__} ({error})"
    return ""

"""The copy in flight: what it takes from the model, and whether the model held still."""

from dataclasses import dataclass, field
from threading import Event

from holdfast import events
from holdfast.snapshot import layout
from holdfast.snapshot.manifest import Entry


@dataclass
class Copy:
    """One snapshot on its way from the model's tensors to the SMP's memory."""

    step: int
    flat: layout.Flat
    entries: list[Entry]
    versions: list[int]
    cancelled: Event = field(default_factory=Event)

    @property
    def nbytes(self) -> int:
        """The size of the buffer that the copy fills, in bytes."""
        return layout.total_bytes(self.entries)

    def changed(self) -> str:
        """The path of a tensor that was changed in place since ``begin``; empty if none was."""
        now = layout.versions(self.flat)
        pairs = zip(self.flat.paths, self.versions, now, strict=True)
        return next((path for path, before, after in pairs if before != after), "")


def record_torn(step: int, path: str) -> None:
    """Say in the ledger that a copy was dropped because the tensor at ``path`` had changed."""
    remedy = "call finish() before optimizer.step and change parameters nowhere else"
    detail = {"step": step, "path": path, "remedy": remedy}
    events.record("snapshot_torn", detector="version counter", detail=detail)

"""One rank's part in loading a checkpoint (rung 5), when memory holds nothing intact."""

import time
from collections.abc import Callable
from pathlib import Path

from holdfast import events
from holdfast.errors import SnapshotCorrupt, SnapshotMismatch
from holdfast.events import EventKind
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.persist_format import Index
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node.supervisor import PersistSettings

_ANY_STEP = 2**62

Propose = Callable[[int | None, int], tuple[str, int]]


class DiskRestore:
    """Finds the newest persisted step that all ranks that take part can load.

    A damaged checkpoint is recorded as ``snapshot_corrupt`` and renamed, so that no later restart
    tries it again. One that cannot be read is recorded and skipped.

    Args:
        settings: the directory of the checkpoints.
        training: the live objects that are to load the state.
        local_rank: the rank whose part is loaded here.
        propose: tells the other ranks this rank's newest intact step (None if it has none) and its
            size in bytes. It returns the verdict for all, ``load``, ``older`` or ``nothing``, and
            the step to load or not to exceed.
    """

    def __init__(
        self, settings: PersistSettings, training: Training, local_rank: int, propose: Propose
    ) -> None:
        self._settings, self._training = settings, training
        self._checkpoints = checkpoints_at(settings.directory)
        self._rank = settings.first_rank + local_rank
        self._propose = propose
        self._step: int | None = None
        self._nbytes = 0
        self._tree: Tree = {}
        self._refused: set[int] = set()

    def agree(self) -> tuple[int, Tree] | None:
        """Return the step that all of them load, and this rank's state; None without a step."""
        verdict, limit = "older", _ANY_STEP
        while verdict == "older":
            self._find(limit)
            verdict, limit = self._propose(self._step, self._nbytes)
        return (limit, self._tree) if verdict == "load" else None

    def _find(self, limit: int) -> None:
        """Set this rank's newest intact step, and its tree, to one not newer than ``limit``."""
        if self._step is not None and self._step <= limit:
            return
        self._step, self._tree = None, {}
        try:
            steps = self._checkpoints.steps()
        except OSError as error:
            self._refuse(-1, error, time.monotonic())
            return
        for step in reversed(steps):
            if step <= limit and step not in self._refused and self._read(step):
                self._step = step
                return

    def _read(self, step: int, again: bool = True) -> bool:
        started_s = time.monotonic()
        folder = self._checkpoints.path(step)
        try:
            self._checkpoints.fetch(step)
            index = persist_format.read_index(folder)
            self._check_ranks(folder, index)
            row = persist_format.row_of(index, self._rank)
            if row is None:
                raise OSError(f"{folder} holds no state of rank {self._rank}")
            self._nbytes = row["bytes"]
            described, buffer = persist_format.read_rank(folder, row)
            tensors = flat_buffer.read(described.entries, buffer)
            self._tree = self._training.tree(described, tensors)
            return True
        except (SnapshotCorrupt, OSError) as error:
            damaged = isinstance(error, SnapshotCorrupt) and persist_format.damage_of(folder)
            if damaged and self._checkpoints.quarantine(step) and again:
                return self._read(step, again=False)
            self._refuse(step, error, started_s)
            return False

    def _refuse(self, step: int, error: Exception, started_s: float) -> None:
        self._refused.add(step)
        events.record(
            EventKind.SNAPSHOT_CORRUPT,
            detector="digest",
            rung="reload",
            duration_s=time.monotonic() - started_s,
            detail={"step": step, "reason": str(error), "source": "disk"},
        )

    def _check_ranks(self, folder: Path, index: Index) -> None:
        if index["world_size"] != self._settings.world_size:
            raise SnapshotMismatch(
                f"{folder} was written by {index['world_size']} ranks, this run has "
                f"{self._settings.world_size}: start as many, or give another persist_dir and load "
                "it yourself (docs/snapshots.md)"
            )

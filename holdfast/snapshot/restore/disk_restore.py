"""One rank's part in loading a checkpoint (rung 5), when memory holds nothing intact."""

import time
from pathlib import Path

from holdfast import events
from holdfast.errors import SnapshotCorrupt, SnapshotMismatch
from holdfast.events import EventKind
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.persist_format import Index
from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather
from holdfast.snapshot.protocol.restore_agreement import agreed_on_disk

_ANY_STEP = 2**62


class DiskRestore:
    """Finds the newest persisted step that all ranks that take part can load.

    A damaged checkpoint is recorded as ``snapshot_corrupt`` and renamed, so that no later restart
    tries it again. One that cannot be read is recorded and skipped.

    Args:
        settings: the directory of the checkpoints.
        training: the live objects that are to load the state.
        local_rank: the rank whose part is loaded here.
        together: true if the ranks of all nodes propose a step to each other; otherwise those of
            this node propose one to their SMP.
    """

    def __init__(
        self, settings: PersistSettings, training: Training, local_rank: int, together: bool
    ) -> None:
        self._settings, self._training = settings, training
        self._checkpoints = Checkpoints(Path(settings.directory))
        self._rank = settings.first_rank + local_rank
        self._together = together
        self._step: int | None = None
        self._nbytes = 0
        self._tree: Tree = {}
        self._refused: set[int] = set()

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return self._settings.directory

    def unloadable(self) -> str:
        """Name a checkpoint that is there, though none could be loaded; empty if there is none."""
        return self._checkpoints.unloadable()

    def agreeing(self) -> Exchange[tuple[int, Tree] | None]:
        """Return the step that all of them load, and this rank's state; None without a step."""
        verdict, limit = "older", _ANY_STEP
        while verdict == "older":
            self._find(limit)
            if self._together:
                verdict, limit = agreed_on_disk((yield Gather(self._step)))
            else:
                verdict, limit = yield Call("recall", (self._step, self._nbytes))
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

    def _read(self, step: int) -> bool:
        started_s = time.monotonic()
        folder = self._checkpoints.path(step)
        try:
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
            if isinstance(error, SnapshotCorrupt) and persist_format.damage_of(folder):
                self._checkpoints.quarantine(step)
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

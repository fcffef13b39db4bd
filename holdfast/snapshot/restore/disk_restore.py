"""One rank's part in loading a checkpoint (rung 5), when memory holds nothing intact."""

import time
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from holdfast import events
from holdfast.errors import SnapshotCorrupt, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.checkpoints import Checkpoints
from holdfast.snapshot.disk.export import checkpoints_of
from holdfast.snapshot.disk.persist_format import Index, Row
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.flat_buffer import Tree
from holdfast.snapshot.layout.manifest import Manifest
from holdfast.snapshot.layout.training_state import Training
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.exchange import Call, Exchange, Gather
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.protocol.restore_agreement import agreed_on_disk
from holdfast.snapshot.restore import elastic
from holdfast.snapshot.restore.elastic import Former


class DiskRestore:
    """Finds the newest persisted step that all ranks that take part can load.

    A damaged checkpoint is recorded as ``snapshot_corrupt`` and renamed, so that no later restart
    tries it again. One that cannot be read is recorded and skipped.

    With ``together`` the ranks of all nodes propose a step to each other; otherwise those of this
    node propose one to their SMP.
    """

    def __init__(
        self, settings: PersistSettings, training: Training, local_rank: int, together: bool
    ) -> None:
        self._settings, self._training, self._together = settings, training, together
        self._checkpoints = checkpoints_at(settings.directory)
        self._rank = settings.first_rank + local_rank
        self._step: int | None = None
        self._nbytes, self._tree, self._refused = 0, Tree(), set[int]()

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return self._settings.directory

    def unloadable(self) -> str:
        """Name a checkpoint that is there, though none could be loaded; empty if there is none."""
        return self._checkpoints.unloadable()

    def agreeing(self) -> Exchange[tuple[int, Tree] | None]:
        """Return the step that all of them load, and this rank's state; None without a step."""
        verdict, limit = "older", ANY_STEP
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
            steps = sorted({*self._checkpoints.steps(), *self._former()})
        except OSError as error:
            self._refuse(-1, error, time.monotonic())
            return
        for step in reversed(steps):
            if step <= limit and step not in self._refused and self._read(step):
                self._step = step
                return

    def _former(self) -> dict[int, dict[Path, Index]]:
        """Return what a run with another number of ranks has left in the folders of all nodes."""
        own = self._checkpoints.folder
        root = own.parent if own.name.startswith("node-") else own
        found: dict[int, dict[Path, Index]] = defaultdict(dict)
        for folder in {own, root, *(each.folder for each in checkpoints_of(root))}:
            for step in Checkpoints(folder).steps():
                path = Checkpoints(folder).path(step)
                with suppress(OSError, SnapshotCorrupt):
                    index = persist_format.read_index(path)
                    if index["world_size"] != self._settings.world_size:
                        found[step][path] = index
        return found

    def _read(self, step: int, again: bool = True) -> bool:
        started_s = time.monotonic()
        folder = self._checkpoints.path(step)
        try:
            self._checkpoints.fetch(step)
            self._tree = self._tree_of(step, folder)
            self._nbytes = sum(file.stat().st_size for file in folder.glob(f"rank-{self._rank}.*"))
            return True
        except (SnapshotCorrupt, SnapshotLost, OSError) as error:
            damaged = isinstance(error, SnapshotCorrupt) and persist_format.damage_of(folder)
            if damaged and self._checkpoints.quarantine(step) and again:
                return self._read(step, again=False)
            self._refuse(step, error, started_s)
            return False

    def _tree_of(self, step: int, folder: Path) -> Tree:
        places = self._former().get(step, {})
        if step in self._checkpoints.steps() and folder not in places:
            places = {folder: persist_format.read_index(folder)}  # of as many ranks as there are
        if not places:
            raise SnapshotLost(f"{folder} is gone: another rank has found it damaged")
        newest = max(places, key=lambda each: (each / persist_format.INDEX_NAME).stat().st_mtime)
        world_size = places[newest]["world_size"]
        places = {each: i for each, i in places.items() if i["world_size"] == world_size}
        rows = {row["rank"]: (each, row) for each in places for row in places[each]["ranks"]}
        if world_size == self._settings.world_size:
            if self._rank not in rows:
                raise OSError(f"{folder} holds no state of rank {self._rank}")
            tree = self._training.tree(*_loaded(*rows[self._rank]))
            if not elastic.is_needed(self._training, tree, world_size):
                return tree
        former = {
            rank: Former(partial(persist_format.described_of, *place), partial(_loaded, *place))
            for rank, place in sorted(rows.items())
        }
        return elastic.dealt(self._training, former)

    def _refuse(self, step: int, error: Exception, started_s: float) -> None:
        self._refused.add(step)
        kind, took_s = EventKind.SNAPSHOT_CORRUPT, time.monotonic() - started_s
        detail = {"step": step, "reason": str(error), "source": "disk"}
        events.record(kind, detector="digest", rung="reload", duration_s=took_s, detail=detail)


def _loaded(folder: Path, row: Row) -> tuple[Manifest, list[torch.Tensor]]:
    described, buffer = persist_format.read_rank(folder, row)
    return described, flat_buffer.read(described.entries, buffer)

"""The folder of a node's persisted checkpoints: ``step-<n>``, each complete or not there at all.

A checkpoint is written into a hidden folder, synchronized to disk, and renamed. One process writes
at a time, and removes what an interrupted one has left. Under a separate lock the writer asks
whether the run still needs the step, and renames its folder. A rollback takes this lock, too, so
that it finds every step that appears, without waiting for one that is being written.
"""

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from holdfast import config
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotCorrupt, SnapshotError
from holdfast.snapshot.disk import persist_format
from holdfast.snapshot.disk.object_store import Location, ObjectStore, is_url, local_folder
from holdfast.snapshot.disk.persist_format import Part
from holdfast.snapshot.layout import identity
from holdfast.snapshot.layout.identity import RunIdentity
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.locks import locked
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.checkpoint_schedule import ALONE, Needed

_WRITE_LOCK, _PUBLISH_LOCK = ".lock", ".publish-lock"
_DRAFT = ".writing-"
SLOWEST_BYTES_S = 25 * 10**6
_POLL_S = 0.05
_STEP = re.compile(r"step-(\d+)")
_DAMAGED = "damaged-"
_VOID = re.compile(r"rolled-back-step-(\d+)")


def settings(
    directory: object, every: int, keep: int, run_dir: Path = Path()
) -> PersistSettings | None:
    """Return this rank's settings for its node; None without a directory.

    Nodes of a run may share a directory, in which each has a folder of its own. What goes to an
    object store is staged in ``run_dir`` if its URL names no other folder. What cannot be used
    raises ConfigError.
    """
    for name, value in {"persist_every": every, "persist_keep": keep}.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    if directory is None:
        return None
    local = config.local_world_size()
    world_size, node = max(config.world_size(), local), ""
    if world_size > local:
        node = f"node-{os.environ.get('GROUP_RANK') or config.rank() // local}"
    # pathlib makes s3:/bucket of s3://bucket.
    given = re.sub(r"^(s3|gs|az):/(?!/)", r"\1://", str(directory))
    if is_url(given):
        location = Location.parse(given).inside(node, run_dir / "staged")
        ObjectStore(location)  # names what is wrong with it
        place, path = str(location), Path(location.staging)
    else:
        path = Path(given).absolute() / node
        place = str(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot use persist_dir {path}: {error.strerror}; choose another"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into persist_dir {path}: choose another")
    first_rank = config.rank() - config.local_rank() if world_size > 1 else 0
    return PersistSettings(place, every, keep, world_size, max(0, first_rank))


class Revoked(SnapshotError):
    """The memory of the step was needed, or the run rolled back, before all of it was on disk."""


class Checkpoints:
    """The persisted checkpoints in one folder, which need not exist for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, str(folder)

    def steps(self) -> list[int]:
        """Return the steps in the folder, oldest first; they may be damaged."""
        return self._staged()

    def folders(self) -> list[str]:
        """Return the names of the folders in this one."""
        return [path.name for path in self.folder.glob("*/")]

    def fetch(self, step: int) -> Path:
        """Make the files of a step readable; return its folder."""
        return self.path(step)

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.folder))
        return []

    def _staged(self, pattern: re.Pattern[str] = _STEP) -> list[int]:
        return sorted(int(m[1]) for name in self._names() if (m := pattern.fullmatch(name)))

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"step-{step}"

    def write(
        self,
        step: int,
        parts: Sequence[Part],
        *,
        world_size: int,
        first_rank: int,
        keep: int,
        needed: Needed = ALONE,
        still_intact: Callable[[], bool] = lambda: True,
    ) -> int:
        """Make ``step`` appear, complete and durable, and remove all but the newest ``keep`` steps.

        ``parts`` are the states of all local ranks, from ``first_rank`` on. Steps that are
        ``needed`` stay too, because other nodes may need them. When all is written,
        ``still_intact`` must return false if the parts were overwritten or the run rolled back.
        Return the number of bytes on disk; 0 if the very same checkpoint was there already.

        Raises:
            SnapshotCorrupt: a part does not match its digests.
            Revoked: ``still_intact`` returned false.
            OSError: the storage failed or is full.
            ConfigError: the folder belongs to another run.
        """
        with self._locked(_WRITE_LOCK):
            for name in self._names():
                if name.startswith(_DRAFT):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
            run = persist_format.run_of(parts[0])
            if self._has(step, parts, run):
                return 0
            # Replicas share memory, and are written once.
            nbytes = sum({part.buffer.data_ptr(): part.buffer.numel() for part in parts}.values())
            if nbytes > self._free():
                self._make_room(nbytes, needed)
            if nbytes > (free := self._free()):
                text = f"{nbytes} bytes are needed and {free} are free on the storage"
                raise OSError(errno.ENOSPC, text, str(self.folder))
            draft = self.folder / f"{_DRAFT}step-{step}"
            try:
                draft.mkdir()
                rows = persist_format.write_ranks(draft, parts, first_rank)
                persist_format.write_index(draft, step, world_size, rows, run)
                _sync(draft)
                with self._locked(_PUBLISH_LOCK):
                    if not still_intact():
                        why = "its memory was needed for a snapshot, or the run went back"
                        raise Revoked(f"step {step}: {why}")
                    draft.rename(self.path(step))
                _sync(self.folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
            there = self._staged()
            gone = [(self.path(old), old) for old in needed.removable(there, keep)]
            gone += [(self._void(old), old) for old in self._staged(_VOID) if old <= there[-1]]
            for path, old in gone:
                self._remove(path, old)
        return sum(row["bytes"] for row in rows)

    def _has(self, step: int, parts: Sequence[Part], run: Mapping[str, object] | None) -> bool:
        if run is not None and (whose := self.foreign(identity.parse(run))):
            raise ConfigError(
                f"{self.folder} holds checkpoints of {whose}: nothing is written there; give each "
                "run its own persist_dir, or restore() to go on from there"
            )
        if step in self._staged():
            try:
                rows = persist_format.read_index(self.path(step))["ranks"]
            except SnapshotCorrupt:
                self.quarantine(step)
            else:
                if [row["manifest_digest"] for row in rows] == [part.digest for part in parts]:
                    return True
        newest = max(self._staged(), default=-1)
        if newest >= step:
            raise ConfigError(
                f"{self.folder} holds another step {newest}, this run is at step {step}: it is "
                "another run's; give each its own persist_dir, or restore() to go on from there"
            )
        return False

    def foreign(self, run: RunIdentity) -> str:
        """Return whose the newest readable checkpoint is; empty if it is this run's, or none is."""
        for step in reversed(self._staged()):
            with suppress(OSError, SnapshotError):
                return run.differs(persist_format.read_index(self.path(step)).get("run"))
        return ""

    def set_aside(self) -> None:
        """Rename all checkpoints to ``set-aside-…``, because the run begins anew.

        They are never removed, as they may be another run's. If they cannot be renamed either,
        raise ConfigError.
        """
        mark = secrets.token_hex(3)  # so that a second fresh start overwrites nothing
        self._went_back(-1)
        for path in map(self.path, self._staged()):
            try:
                path.rename(self.folder / f"set-aside-{mark}-{path.name}")
            except OSError as error:
                text = f"cannot set {path} aside: {error.strerror}; give another persist_dir"
                raise ConfigError(text) from error

    def unloadable(self) -> str:
        """Return what checkpoints are or were in the folder; empty if none was ever damaged."""
        try:
            names = self._names()
        except OSError as error:
            return str(error)
        return ", ".join(name for name in names if _STEP.fullmatch(name.removeprefix(_DAMAGED)))

    def quarantine(self, step: int) -> bool:
        """Rename a damaged step to ``damaged-step-<n>``, so that it is not tried again.

        It stays if the folder cannot be written. Return true if a sound copy took its place.
        """
        goal = self.folder / f"{_DAMAGED}step-{step}"
        with suppress(OSError):
            shutil.rmtree(goal, ignore_errors=True)
            self.path(step).rename(goal)
        return False

    def go_back(self, step: int) -> None:
        """Rename steps newer than ``step``, from which the run continues, because they are void.

        They are called ``rolled-back-step-<n>`` until the run has written a step as new. A step
        that is being written must not be ``still_intact`` any more. The steps stay if the folder
        cannot be written.
        """
        if not self.folder.exists():
            return
        with suppress(OSError), self._locked(_PUBLISH_LOCK):
            self._went_back(step)
            for newer in [there for there in self._staged() if there > step]:
                goal = self._void(newer)
                shutil.rmtree(goal, ignore_errors=True)
                self.path(newer).rename(goal)

    def inode(self, step: int) -> int:
        """Return a number that no later folder of the step will have; 0 if there is none."""
        folder, written_ns = self.path(step), 0
        with suppress(OSError):
            written_ns = (folder / persist_format.INDEX_NAME).stat().st_mtime_ns
        with suppress(OSError):  # a file system gives numbers again
            return hash((folder.stat().st_ino, written_ns)) or 1
        return 0

    def mend(self, step: int, draft: Path, seen: int) -> bool:
        """Put the files of a draft into a step, or the draft in the place of one that is missing.

        ``seen`` is the step's ``inode`` when it was read. Return false if the run has removed it
        since, or went back behind it: then nothing is changed but what is removed anyway.
        """
        with self._locked(_PUBLISH_LOCK), suppress(FileNotFoundError):
            if self.inode(step) != seen or (not seen and self._is_void(step, draft)):
                return False
            if seen:
                for path in list(draft.iterdir()):
                    path.replace(self.path(step) / path.name)
            else:
                draft.rename(self.path(step))
            _sync(self.path(step))
            _sync(self.folder)
            return True
        return False

    def _went_back(self, step: int) -> None:
        with suppress(OSError):
            (self.folder / _PUBLISH_LOCK).write_text(str(step))  # -1 if the run begins anew

    def _is_void(self, step: int, draft: Path) -> bool:
        """Return true if the run went back behind a step after it was written."""
        mark, index = self.folder / _PUBLISH_LOCK, draft / persist_format.INDEX_NAME
        went_back = int(mark.read_text() or step) < step
        late = mark.stat().st_mtime >= index.stat().st_mtime
        return self._void(step).exists() or (went_back and late)

    def _void(self, step: int) -> Path:
        return self.folder / f"rolled-back-step-{step}"

    def _make_room(self, nbytes: int, needed: Needed) -> None:
        """Remove void steps, then the oldest that no node needs, if that frees enough bytes."""
        spare = [(self._void(step), step) for step in self._staged(_VOID)]
        if needed != ALONE:
            spare += [(self.path(step), step) for step in needed.removable(self._staged(), 1)]
        held = sum(file.stat().st_size for path, _ in spare for file in path.rglob("*"))
        for path, step in spare if held + self._free() >= nbytes else ():
            if self._free() < nbytes:
                self._remove(path, step)

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _remove(self, path: Path, step: int) -> None:
        doomed = self.folder / f"{_DRAFT}removed-{step}"
        with suppress(OSError):
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _locked(self, name: str) -> AbstractContextManager[None]:
        why = f"{self.folder} was being written by another process for {config.timeout_s():g} s"
        return locked(self.folder / name, TimeoutError(why))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def persist_now(settings: launch.SmpSettings, step: int | None) -> Path:
    """Have the persister write ``step``, or a newer one; wait for it and return its folder.

    It raises the errors of ``Snapshots.persist``.
    """
    if settings.persist is None:
        raise ConfigError("nothing can be persisted: give Snapshots a persist_dir")
    if step is None:
        raise SnapshotError("nothing can be persisted: no snapshot was committed yet")
    status = launch.ask_persist(settings.run_dir)
    limit_s = config.timeout_s() + (status or {}).get("bytes", 0) / SLOWEST_BYTES_S
    deadline = time.monotonic() + limit_s
    while status is not None:
        done, failed = status["persisted"], status["persist_failed"]
        if done is not None and done >= step:
            return Checkpoints(local_folder(settings.persist.directory)).path(done)
        if failed is not None and failed["step"] >= step:
            raise SnapshotError(f"step {failed['step']} was not persisted: {failed['error']}")
        if time.monotonic() > deadline:
            raise SmpUnavailable(
                f"step {step} was not on disk within {limit_s:g} s: see "
                f"{settings.run_dir / launch.LOG_NAME} or raise {config.TIMEOUT_VARIABLE}"
            )
        time.sleep(_POLL_S)
        status = launch.smp_status(settings.run_dir)
    raise SmpUnavailable(f"no SMP runs in {settings.run_dir}: it was lost or stopped")

"""The id that a run's ranks share, and the checkpoints that are its own."""

import os
import secrets
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast import config, digest, events
from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.events import EventKind
from holdfast.snapshot.disk.export import checkpoints_of
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.layout.identity import RunIdentity
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.launch import SmpSettings
from holdfast.snapshot.node.membership import Membership

RUN_ID_NAME = "run-id"


class RunIdFile:
    """The file of a run directory with the id of the run, which all local ranks use.

    Raises:
        ConfigError: the run directory cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RUN_ID_NAME

    def read_or_make(self) -> str:
        """Return the id; make one if there is none."""
        try:
            if not (known := self._read()):
                draft = self._drafted(secrets.token_hex(6))
                with suppress(FileExistsError):  # another rank was faster
                    os.link(draft, self._path)
                draft.unlink()
                known = self._read()
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror}; choose another run_dir"
            ) from error
        return known

    def keep(self, run_id: str) -> None:
        """Note the id under which this run continues."""
        with suppress(OSError):  # the snapshots carry it as well
            if self._read() != run_id:
                self._drafted(run_id).replace(self._path)

    def remove(self) -> None:
        """Forget the id, because the run has finished or begins anew."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            return self._path.read_text().strip()
        except FileNotFoundError:
            return ""

    def _drafted(self, run_id: str) -> Path:
        draft = self._path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
        draft.write_text(run_id + "\n")
        return draft


class Ownership:
    """What belongs to this run in its run directory and on disk.

    Args:
        settings: the directories.
        membership: the ranks of all nodes, if the nodes protect each other.
    """

    def __init__(self, settings: SmpSettings, membership: Membership | None) -> None:
        self.file = RunIdFile(settings.run_dir)
        self._membership = membership
        local_first = config.local_rank() == 0
        disk = settings.persist
        self._checkpoints = checkpoints_at(disk.directory) if disk and local_first else None
        self._disk_checked = False

    def named(self, identity: RunIdentity) -> RunIdentity:
        """Return the identity with an id that all ranks of the run share.

        Raises:
            ConfigError: the user gave ranks different ids, or the file cannot be written.
        """
        run_id = identity.id or self.file.read_or_make()
        ids = [run_id] if self._membership is None else self._membership.gather(run_id)
        if identity.given and len(set(ids)) > 1:
            raise ConfigError(
                f"run_id differs between ranks: {sorted(set(ids))}; give all the same"
            )
        return replace(identity, id=ids[0])

    def renamed(self, identity: RunIdentity) -> RunIdentity:
        """Return the identity of a run that begins anew where another one was."""
        if identity.given:
            return identity
        # All ranks know the former id, and make the same new one of it.
        run_id = digest.hexdigest(f"{identity.id} again".encode())[: len(identity.id)]
        self.file.keep(run_id)
        return replace(identity, id=run_id)

    def set_checkpoints_aside(self) -> bool:
        """Rename the checkpoints of an earlier run; return false if this rank has no such task."""
        if self._checkpoints is None:
            return False
        self._checkpoints.set_aside()
        return True

    def check_disk(self, identity: RunIdentity, step: int) -> None:
        """Say it once if another run's checkpoints keep this run from writing its own."""
        if self._checkpoints is None or self._disk_checked:
            return
        self._disk_checked = True
        if whose := self._checkpoints.foreign(identity):
            remedy, folder = "give this run its own persist_dir", self._checkpoints.address
            reason = f"the checkpoints there are of {whose}: none will be written"
            detail = {"step": step, "directory": folder, "reason": reason, "remedy": remedy}
            events.record(EventKind.PERSIST_FAILED, detail=detail)
            warnings.warn(f"{folder}: {reason}; {remedy}", RuntimeWarning, stacklevel=5)


def goes_on_alone(settings: SmpSettings) -> bool:
    """Return true if this node goes on by itself, from disk, after a run of several nodes."""
    if settings.persist is None or config.world_size() > config.local_world_size():
        return False
    with suppress(OSError, SmpUnavailable):
        status = launch.smp_status(settings.run_dir)
        several = status is not None and status["cluster"] is not None
        return several and any(c.steps() for c in checkpoints_of(settings.persist.directory))
    return False

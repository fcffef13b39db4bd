"""What belongs to a run besides its snapshots: files of its run directory, and checkpoints."""

import os
import secrets
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast import config, digest, events
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotMismatch
from holdfast.events import EventKind
from holdfast.snapshot.disk.export import checkpoints_of
from holdfast.snapshot.disk.remote_checkpoints import checkpoints_at
from holdfast.snapshot.layout.identity import RunIdentity
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.launch import SmpSettings
from holdfast.snapshot.node.membership import Membership

_POLL_S = 0.1
_FINISHED_REMEDY = (
    "to continue it, give Snapshots a persist_dir and call snapshots.persist() before the run "
    "ends; for another run, use another run_dir"
)
_LOST_REMEDY = "the run starts over: stop it and load a checkpoint if there is one"


class RunFiles:
    """The files of a run directory that outlive the snapshot process; all local ranks use them.

    ``run-id`` has the id of the run. ``snapshots-taken`` is there while a run has snapshots: if the
    process holds none then, they were lost. ``run-finished`` has the last step of a run that ended
    well, so that none begins there again unsaid.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._id = run_dir, run_dir / "run-id"
        self._taken, self._finished = run_dir / "snapshots-taken", run_dir / launch.FINISHED_NAME

    def id_or_new(self) -> str:
        """Return the id of the run; make one if there is none."""
        try:
            if not (known := self._read()):
                draft = self._drafted(secrets.token_hex(6))
                with suppress(FileExistsError):  # another rank was faster
                    os.link(draft, self._id)
                draft.unlink()
                known = self._read()
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._id}: {error.strerror}; choose another run_dir"
            ) from error
        return known

    def keep_id(self, run_id: str) -> None:
        """Note the id under which this run continues."""
        with suppress(OSError):  # the snapshots carry it as well
            if self._read() != run_id:
                self._drafted(run_id).replace(self._id)

    def _read(self) -> str:
        try:
            return self._id.read_text().strip()
        except FileNotFoundError:
            return ""

    def _drafted(self, run_id: str) -> Path:
        draft = self._id.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
        draft.write_text(run_id + "\n")
        return draft

    def taken(self) -> None:
        """Note that a snapshot is committed."""
        if not self._taken.exists():
            self._taken.touch()
            self._finished.unlink(missing_ok=True)

    def begun_anew(self) -> None:
        """Note that the snapshots were given up."""
        self._taken.unlink(missing_ok=True)

    def finished(self, step: int) -> None:
        """Note that the run ended well after ``step``."""
        if config.local_rank() == 0:
            with suppress(OSError):  # it only serves a later message
                self._finished.write_text(f"{step}\n")
        for path in (self._taken, self._id):
            path.unlink(missing_ok=True)

    def say_nothing_left(self) -> None:
        """Say if snapshots were lost, or if the run begins where another one was finished."""
        if self._taken.exists():
            detail: dict[str, object] = {"remedy": _LOST_REMEDY}
            events.record(EventKind.SNAPSHOTS_LOST, detector="smp", detail=detail)
        try:
            step = int(self._finished.read_text())
        except (OSError, ValueError):
            return
        if config.local_rank() > 0:
            return
        detail = {"finished_step": step, "remedy": _FINISHED_REMEDY}
        events.record(EventKind.BEGUN_AGAIN, detail=detail)
        warnings.warn(
            f"the run of {self._run_dir} was finished at step {step}, which ended the process with "
            "its snapshots, and no checkpoint is left: training begins at step 0; "
            f"{_FINISHED_REMEDY}",
            stacklevel=4,
        )


class Ownership:
    """The id that the ranks of a run share, and the checkpoints that are its own."""

    def __init__(self, settings: SmpSettings, membership: Membership | None) -> None:
        self.files, self._membership = RunFiles(settings.run_dir), membership
        disk = settings.persist if config.local_rank() == 0 else None
        self._checkpoints = checkpoints_at(disk.directory) if disk else None
        self._disk_checked = False

    def named(self, identity: RunIdentity) -> RunIdentity:
        """Return the identity with an id that all ranks of the run share.

        Different ids that the user gave raise ConfigError, as does a directory that cannot be
        written.
        """
        run_id = identity.id or self.files.id_or_new()
        ids = [run_id] if self._membership is None else self._membership.gather(run_id)
        if identity.given and len(set(ids)) > 1:
            raise ConfigError(
                f"run_id differs between ranks: {sorted(set(ids))}; give all the same"
            )
        return replace(identity, id=ids[0])

    def begin_anew(self, identity: RunIdentity) -> tuple[RunIdentity, bool]:
        """Give up an earlier run: return the identity of the new one, and if checkpoints moved."""
        self.files.begun_anew()
        if not identity.given:
            # All ranks know the former id, and make the same new one of it.
            run_id = digest.hexdigest(f"{identity.id} again".encode())[: len(identity.id)]
            self.files.keep_id(run_id)
            identity = replace(identity, id=run_id)
        if self._checkpoints is not None:
            self._checkpoints.set_aside()
        return identity, self._checkpoints is not None

    def continues(self, run_id: str, step: int) -> None:
        """Note the id under which the run goes on after ``step``; newer checkpoints are void."""
        self.files.keep_id(run_id)
        if self._checkpoints is not None:
            self._checkpoints.go_back(step)

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
    """Return true if this node goes on by itself, from disk, after a run of several nodes.

    The last checkpoint of that run may still be under way; it is waited for.

    Raises:
        SnapshotMismatch: memory holds a part of a newer step than any on disk.
    """
    if settings.persist is None or config.world_size() > config.local_world_size():
        return False
    with suppress(OSError, SmpUnavailable):
        deadline, on_disk = time.monotonic() + config.timeout_s(), [-1]
        while (status := launch.smp_status(settings.run_dir)) and status["cluster"]:
            held = -1 if status["newest"] is None else int(status["newest"])
            found = checkpoints_of(settings.persist.directory)
            on_disk = [step for each in found for step in each.steps()]
            if not on_disk or max(on_disk) >= held:
                return bool(on_disk)
            if time.monotonic() > deadline:
                raise SnapshotMismatch(
                    f"the SMP of {settings.run_dir} holds a part of step {held}, which several "
                    f"nodes divided; the newest checkpoint is of step {max(on_disk)}: start as "
                    "many nodes again, or stop the SMP (`holdfast snapshots stop`) to go on from it"
                )
            time.sleep(_POLL_S)
    return False

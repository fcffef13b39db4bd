"""``Snapshots``: a training loop's view of the in-memory snapshots."""

import logging
import time
import warnings
from pathlib import Path
from typing import Any, Self, Unpack

import torch

from holdfast import config, events
from holdfast.errors import SmpUnavailable, SnapshotLost
from holdfast.events import EventKind
from holdfast.snapshot.client.copier import Copier
from holdfast.snapshot.client.inflight import Copy, ShardedCopy
from holdfast.snapshot.client.membership import Membership
from holdfast.snapshot.client.session import SmpSession
from holdfast.snapshot.client.settings import SnapshotOptions, SnapshotSettings
from holdfast.snapshot.client.training_state import Epoch, Stateful, Training
from holdfast.snapshot.disk.checkpoints import Checkpoints, persist_now
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.restore import newest_state
from holdfast.snapshot.restore.newest_state import Found

_logger = logging.getLogger("holdfast.snapshot")
TAKEN_NAME = "snapshots-taken"
_RELOAD = "the run starts over: stop it and load a checkpoint if there is one"


class Snapshots:
    """Snapshots of a training run in memory that outlives this process.

    Args:
        model: the module that is trained; dense tensors or DTensors, any dtype.
        optimizer: of its parameters.
        scheduler: saved too if given.
        loader: saved too if it has ``state_dict``.
        extra: any object with ``state_dict`` and ``load_state_dict``, saved too.
        **options: the keywords below.

    Keywords:
        run_dir: identifies the run on this node; default ``config.run_dir()``.
        every: take a snapshot each so many steps; by default each one.
        interval: ``"auto"``: after as many steps as cost least, by what snapshots are measured to
            cost here (``pacing``, docs/planning.md); ``begin`` must be called after every step.
        mttf_s: the job's mean time to a failure for ``"auto"``, in seconds; by default one day, or
            less for jobs of thousands of ranks (``pacing.assumed_mttf_s``).
        keep: clean snapshots kept per rank, by default 2, with parities 1; memory is ``keep + 1``
            times the state, or the node's share of it.
        parities: nodes of each sharding group that may be lost, trainer, SMP and all: 0, 1 or 2; by
            default 1 if the run has several nodes. With parities each of n nodes keeps, for every
            clean snapshot and for the one in flight, 1/(n - parities) of the state; where nodes
            hold different states (FSDP2), n/(n - parities) of the largest.
        mesh: the ``DeviceMesh`` of the whole job, or a ``groups.Job``, if the model's parameters do
            not tell which ranks hold the same state (``groups.of_model``).
        linger_s: how long the SMP waits for a new trainer, in seconds.
        persist_dir: where a process of its own writes checkpoints to disk; None: nowhere. One
            directory a run: what is in it is what the run goes on from when memory is lost. Of
            nodes that protect each other all write the same steps, or none writes any.
        persist_every: write one each so many steps (by default 1000), one when all local ranks
            died, and on demand.
        persist_keep: checkpoints kept on disk.

    Of ``every``, ``interval``, ``mttf_s``, ``parities`` and ``persist_every`` the config file's
    value is the default, if there is one (``holdfast.config``); ``status()`` says what is in force.

    **Guarantees**: after SIGKILL of any or all ranks at any moment, ``restore`` on the same node
    gives the newest step that all local ranks had committed, bit for bit; bytes that changed
    since are found (by digests) and the next older step is given instead. A copy whose tensors were
    changed in place before ``finish`` is dropped and recorded as ``snapshot_torn``.

    With ``persist_dir``, ``restore`` falls back on the newest checkpoint that all local ranks have
    intact. No snapshot waits for a checkpoint; memory is ``keep + 2`` times the state then.

    With ``parities`` the nodes divide the state and protect each other's parts; where they hold
    different ones each keeps its own, and the SMPs make the parities over the network while
    training goes on. A step counts as committed once every node holds it. As many nodes as there
    are parities may then be lost, and ``restore`` gives all ranks of all nodes, replacements
    included, the newest step that all survivors hold, bit for bit; what is damaged is found and
    rebuilt, too. Replicas whose bits differ are found when they are copied (``replica_diverged``).

    **Not covered**: without parities, loss of the node or of the SMP (its snapshots go with it, but
    for what was persisted), with them, of more nodes than there are parities; parameters changed
    between ``begin`` and ``finish`` behind autograd's back (through ``.data``).

    Raises:
        ConfigError: unusable settings. SmpUnavailable: no SMP can be started or reached.
        SnapshotMismatch: the SMP of ``run_dir`` serves another number of local ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        loader: object = None,
        extra: Stateful | None = None,
        **options: Unpack[SnapshotOptions],
    ) -> None:
        settings = SnapshotSettings.of(options)
        self.step = 0
        self.every = settings.every
        self.scheduler, self.loader = scheduler, loader
        self._pacing, self._settings = settings.pacing, settings.smp
        self._training = Training(model, optimizer, scheduler, loader, extra)
        self._loader_unsaved = loader is not None and "loader" not in self.parts
        self._session = SmpSession(self._settings, config.local_rank())
        self._membership = (
            Membership.of_model(model, settings.mesh, settings.parities, self._settings.persist)
            if settings.parities
            else None
        )
        self._copier = Copier(self._session, self._membership)
        # Outlives the SMP: whoever finds it, and no snapshot, knows that something was lost.
        self._marker = self._settings.run_dir / TAKEN_NAME
        self._begun: int | None = None
        self._closed = False
        _log_start(self._settings, self.every)

    @property
    def copied_bytes(self) -> int:
        """Bytes copied so far."""
        return self._copier.copied_bytes

    @property
    def stall_s(self) -> float:
        """Seconds that training has waited for snapshots so far."""
        return self._copier.stall_s

    @property
    def commits(self) -> int:
        """Snapshots known to be committed on this node."""
        return self._session.commits

    @property
    def committed_step(self) -> int | None:
        """The newest step known to be committed on this node; None before the first."""
        return self._session.last_committed

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are saved, besides the random number generators and the step."""
        return self._training.parts

    @property
    def run_dir(self) -> Path:
        """The run directory, which holds the SMP's socket."""
        return self._settings.run_dir

    @property
    def epoch(self) -> Epoch | None:
        """The place where a loader without ``state_dict`` began its pass: (step, random state)."""
        return self._training.epoch

    @epoch.setter
    def epoch(self, value: Epoch | None) -> None:
        self._training.epoch = value

    def begin(self, step: int) -> None:
        """Start copying the state after ``step`` in the background; returns at once.

        Nothing happens unless ``step`` is a multiple of ``every``.

        Raises:
            ConfigError: an entry of the state cannot be stored; names its path.
        """
        self.finish()
        self.step = step
        if self._pacing is not None:
            self.every = self._pacing.every(step, self.stall_s)
        if step % self.every == 0:
            self._begin(step)

    def _begin(self, step: int) -> None:
        if self._membership is not None and self._membership.roster is None:
            self._membership.join(self._session)
        if self.commits and not self._marker.exists():
            self._marker.touch()
        if self._loader_unsaved and self.epoch is None:
            # Nobody, such as Guard.batches, notes how its pass could be begun anew.
            self._loader_unsaved = False
            _say_unsaved(self.loader)
        flat = self._training.capture(step)
        self._begun = step
        if self._membership is None:
            copy = Copy(step, flat)
        else:
            parities, peers = self._membership.parities, self._membership.peers()
            seat = self._membership.seat
            copy = ShardedCopy(step, flat, seat=seat, parities=parities, peers=peers)
        self._copier.start(copy)

    def finish(self) -> None:
        """Wait until the copy in flight no longer needs the model's tensors.

        Must come before ``optimizer.step``. Nothing in flight: returns at once.

        Raises:
            ConfigError: the SMP refused (not enough memory, a step it already holds).
            SmpUnavailable: the SMP or another rank did not answer in time.
        """
        self._copier.prioritize()
        self._copier.finish()

    def wait_committed(self) -> int | None:
        """Wait for the last begun snapshot; return its step, or None if it was abandoned.

        Raises:
            SmpUnavailable: the other ranks did not write it in time.
        """
        self._copier.finish()
        try:
            committed = self._session.settle()
        except ConnectionError as error:
            self._copier.replace_smp(error)
            return None
        return committed if committed == self._begun else None

    def restore(self) -> int | None:
        """Load the newest intact snapshot that all local ranks hold; every rank must call it.

        If memory holds none, it is the newest checkpoint in ``persist_dir`` that all of them have
        intact, and memory has it, too, afterwards.

        Returns:
            Its step, or None if there is nothing. If the run had committed snapshots and the
            SMP that held them is gone, a ``snapshots_lost`` event says so.

        Raises:
            SnapshotLost: there were snapshots but none is intact.
            SnapshotMismatch: it belongs to another model, optimizer or number of ranks; nothing
                was changed.
            SmpUnavailable: the SMP or another rank did not answer in time.
        """
        return self._restore(self._settings.persist, skip=())

    def _restore(self, disk: PersistSettings | None, skip: tuple[str, ...]) -> int | None:
        self._copier.abandon()
        started_s = time.monotonic()
        try:
            found = self._newest(disk)
        except ConnectionError as error:
            if self._membership is not None:
                # Nobody else would know that this rank begins anew.
                raise SmpUnavailable(f"the SMP was lost while restoring: {error}") from error
            self._copier.replace_smp(error)
            try:
                found = self._newest(disk)
            except ConnectionError as again:
                raise self._copier.contested(again) from again
        if found is None:
            if self._marker.exists():
                events.record(EventKind.SNAPSHOTS_LOST, detector="smp", detail={"remedy": _RELOAD})
            return None
        step, tree, source = found.step, found.tree, found.source
        found_s = time.monotonic() - started_s
        self._training.check(tree)
        self._training.load(tree, skip)
        self.step = self._begun = step
        folder = disk if source == "disk" else self._settings.persist
        if folder is not None and config.local_rank() == 0:
            Checkpoints(Path(folder.directory)).go_back(step)
        duration_s = time.monotonic() - started_s
        detail = {
            "step": step,
            "source": source,
            "found_s": found_s,
            "load_s": duration_s - found_s,
        }
        rung = "rollback" if source == "memory" else "reload"
        events.record(EventKind.RESTORED, rung=rung, duration_s=duration_s, detail=detail)
        if source == "disk" or (self._membership is not None and not skip):
            # The very first step can be rolled back, too, and survives the loss of a node. After a
            # roll-back all hold it already, with the loader's position that belongs to it.
            self._begin(step)
            self.wait_committed()
        return step

    def _newest(self, disk: PersistSettings | None) -> Found | None:
        return newest_state.newest(self._session, self._training, disk, self._membership)

    def rollback(self) -> int:
        """Restore during training: there must be a snapshot.

        The loader stays where it is: whoever rolls back still holds the batches since then.

        Raises:
            SnapshotLost: there is none that is intact. Others: as ``restore``.
        """
        step = self._restore(None, skip=("loader",))
        if step is None:
            raise SnapshotLost(
                f"the SMP of {self._settings.run_dir} holds no snapshot: none was committed yet, "
                "or it was lost; start from a checkpoint"
            )
        return step

    def persist(self) -> Path:
        """Wait until the last begun snapshot, or a newer one, is on disk; every rank may call it.

        Returns:
            The folder of the checkpoint.

        Raises:
            ConfigError: there is no ``persist_dir``.
            SnapshotError: it could not be written; says why. SmpUnavailable: or not in time.
        """
        self.wait_committed()
        return persist_now(self._settings, self._session.last_committed)

    def status(self) -> launch.Status:
        """Return the SMP's status: clean steps per rank, bytes, commits, refused, uptime_s, more.

        ``interval`` is this rank's: how many steps, and if they are chosen, by what. ``config``
        are the values of the config file that are in force in this process.

        Raises:
            SmpUnavailable: there is no SMP, or it does not answer in time.
        """
        status = launch.smp_status(self._settings.run_dir)
        if status is None:
            raise SmpUnavailable(f"no SMP runs in {self._settings.run_dir}: it was lost or stopped")
        fixed = {"auto": False, "every": self.every}
        interval = self._pacing.status() if self._pacing else fixed
        return status | {"interval": interval, "config": config.used()}

    def close(self, *, finished: bool) -> None:
        """Disconnect; with ``finished`` the SMP ends once all ranks said so, else it lingers."""
        if self._closed:
            return
        self._closed = True
        try:
            if finished:
                self.wait_committed()
                if self._membership is not None:
                    # An SMP that ended could not help another node any more.
                    self._membership.gather(None)
                self._session.finished()
                self._marker.unlink(missing_ok=True)
            else:
                self._copier.abandon()
        except ConnectionError as error:
            events.record(EventKind.SMP_LOST, detector="socket", detail={"error": str(error)})
        finally:
            self._session.close()
            self._copier.close()
            if self._membership is not None:
                self._membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(finished=error[0] is None)


def _log_start(settings: launch.SmpSettings, every: int) -> None:
    disk = settings.persist
    _logger.info(
        "snapshots every %d steps into the memory of the process of %s; checkpoints: %s",
        every,
        settings.run_dir,
        "none on disk" if disk is None else f"every {disk.every} steps in {disk.directory}",
    )


def _say_unsaved(loader: object) -> None:
    name = type(loader).__name__
    remedy = (
        "draw its batches through Guard.batches, which begins its pass anew after a restart and "
        "skips what was trained on, or give it state_dict and load_state_dict"
    )
    events.record(EventKind.LOADER_UNSAVED, detail={"loader": name, "remedy": remedy})
    where = f"where the loader, a {name} without state_dict, stands is not in the snapshots"
    warnings.warn(f"{where}: {remedy}", stacklevel=4)

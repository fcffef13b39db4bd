"""``Snapshots``: a training loop's interface to the snapshots in memory and on disk."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from holdfast import config, events
from holdfast.errors import SmpUnavailable, SnapshotLost
from holdfast.events import EventKind
from holdfast.optimizers import AnyOptimizer
from holdfast.snapshot.client.copier import Copier
from holdfast.snapshot.client.copies import Copy
from holdfast.snapshot.client.loaders import LoaderCheck
from holdfast.snapshot.client.outage import Outage
from holdfast.snapshot.client.ownership import Ownership, goes_on_alone
from holdfast.snapshot.client.replicas import Replicas
from holdfast.snapshot.client.settings import SnapshotOptions, SnapshotSettings
from holdfast.snapshot.disk.checkpoints import persist_now
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.training_state import Models, Stateful, Training
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.session import SmpSession
from holdfast.snapshot.node.supervisor import PersistSettings
from holdfast.snapshot.protocol.messages import ANY_STEP
from holdfast.snapshot.restore import newest_state
from holdfast.spare_process import is_spare


class Snapshots:
    """Snapshots of a training run in memory that outlives this process.

    The memory belongs to the snapshot management process (SMP) of the node, which ``Snapshots``
    starts if none runs.

    Args:
        model: the module that is trained, or a list of its parts, with dense tensors or DTensors
            of any dtype.
        optimizer: the optimizer of its parameters; a list or ``holdfast.Optimizers`` for several;
            or any container of optimizers with ``state_dict`` and ``load_state_dict``.
        scheduler: a learning-rate scheduler to save as well; ``holdfast.Schedulers`` for several.
        scaler: a ``GradScaler`` to save as well.
        loader: a data loader, which is saved as well if it has ``state_dict``.
        extra: any other object with ``state_dict`` and ``load_state_dict`` to save as well.
        **options: the keywords below.

    Keywords:
        run_dir: the directory of the run on this node; by default ``config.run_dir()``.
        every: the number of steps from one snapshot to the next, by default 1.
        interval: ``"auto"`` chooses the number of steps that costs least, from the measured cost of
            snapshots (docs/planning.md); ``begin`` must then be called after every step.
        mttf_s: the job's mean time to a failure in seconds, for ``"auto"``; by default one day, or
            less for jobs of thousands of ranks (``pacing.assumed_mttf_s``).
        keep: the number of clean snapshots kept for each rank, by default 2, or 1 with parities.
            Memory is ``keep + 1`` times the state, or the node's share of it. Ranks of one node
            that hold the same state (DDP) keep it once together, each a part of it.
        parities: the number of nodes in each parity group that may be lost with their trainers
            and SMPs: 0, 1 or 2; by default 1 if the run has several nodes. Each of a group's n
            nodes then keeps, for every clean snapshot and for the one in flight, 1/(n - parities)
            of the state. If nodes hold different states (FSDP2), it keeps n/(n - parities) times
            the largest.
        group_nodes: the largest number of nodes of a parity group, by default 8; from 4 to 16 for
            runs of many nodes (docs/snapshots.md, "Parity groups").
        mesh: the ``DeviceMesh`` of the whole job, or a ``groups.Job``. It is needed only if the
            model's parameters do not show which ranks hold the same state (``groups.of_model``).
        linger_s: how long the SMP waits for a new trainer after all have ended, in seconds.
        persist_dir: the directory to which another process writes checkpoints, or the URL of an
            object store (``s3://bucket/prefix``, extra ``storage``); None writes none.
            Each run needs its own, because the run continues from it when memory is lost. Nodes
            that protect each other all write the same steps, or none of them writes any.
        persist_every: the number of steps from one checkpoint to the next, by default 1000. More
            are written when all local ranks have died, and on demand.
        persist_keep: the number of checkpoints kept on disk.
        run_id: a name for the run, by default ``HOLDFAST_RUN_ID``. What was saved under another
            name is refused. Without a name, what another command line or an optimizer with other
            hyper-parameters has saved is refused (docs/snapshots.md, "Whose snapshots these are").
        fresh: True begins at step 0 whatever is there: ``restore`` gives up the snapshots in memory
            and renames the checkpoints to ``set-aside-…``. A run that torchrun or Slurm restarts
            continues from its own snapshots nevertheless.
        strict: True raises where snapshots fail during training. By default training continues
            without them for a while (``snapshots_suspended``), and ``suspended`` is true.

    For ``every``, ``interval``, ``mttf_s``, ``parities``, ``group_nodes`` and ``persist_every`` the
    config file may set other defaults (``holdfast.config``); ``status()`` returns what is in force.

    **Guarantees**: after SIGKILL of any or all ranks at any moment, ``restore`` on the same node
    loads the newest step that all local ranks had committed, bit for bit. Bytes that changed since
    then are detected by their digests, and the next older step is loaded instead. If a tensor is
    changed in place before ``finish``, its copy is dropped and recorded as ``snapshot_torn``.
    Copies from CUDA devices are ordered after the optimizer's step and before the next one, in any
    stream (``CudaQueue``), and committed only if the digests of both sides agree.

    With ``persist_dir``, ``restore`` falls back on the newest checkpoint that all local ranks have
    intact. No snapshot waits for a checkpoint; memory is ``keep + 2`` times the state then.

    With ``parities`` the nodes of a group divide the state and protect each other's parts. If they
    hold different states, each node keeps its own, and the SMPs compute the parities over the
    network while training continues. A step is committed once every node of the run holds it. As
    many nodes of each group as there are parities may then be lost, and ``restore`` loads the
    newest step that all groups can put together, bit for bit, on all ranks of all nodes, including
    replacements. Damaged bytes are detected and rebuilt. Replicas whose bits differ are detected
    when they are copied (``replica_diverged``).

    Another number of ranks or nodes, or another mesh, may go on from the same state, which is dealt
    anew to them (docs/snapshots.md, "With other ranks").

    **Not covered**: without parities, the loss of the node or of the SMP, which takes its snapshots
    with it (checkpoints remain); with parities, the loss of more nodes of a group than there are
    parities; parameters that were changed between ``begin`` and ``finish`` without autograd's
    knowledge (through ``.data``).

    Raises:
        ConfigError: the settings cannot be used, or an object could not be restored.
        SmpUnavailable: no SMP can be started or reached.
        SnapshotMismatch: the SMP of ``run_dir`` serves another number of local ranks.
    """

    def __init__(
        self,
        model: Models,
        optimizer: AnyOptimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: object = None,
        extra: Stateful | None = None,
        **options: Unpack[SnapshotOptions],
    ) -> None:
        if is_spare():  # the run's snapshots are not a spare's, and its Guard takes none
            self.scheduler, self.scaler, self._closed = scheduler, scaler, True
            return
        settings = SnapshotSettings.of(options)
        self.step, self.every = 0, settings.every
        self.scheduler, self.scaler, self.loader = scheduler, scaler, loader
        self._pacing, self._settings = settings.pacing, settings.smp
        self.training = Training(
            model, optimizer, scheduler, loader, extra, scaler=scaler, run_id=settings.run_id
        )
        self.training.dry_run(shares.plan if settings.parities else flat_buffer.plan)
        self._loader_check = LoaderCheck(self.training)
        alone = goes_on_alone(self._settings)
        self._session = SmpSession(self._settings, config.local_rank(), alone=alone)
        self._membership = settings.membership(self.training.model)
        self._ownership = Ownership(self._settings, self._membership)
        self.training.identity = self._ownership.named(self.training.identity)
        self._fresh = settings.fresh
        local = self._membership is None and settings.mesh is None and Replicas.possible()
        self._replicas = Replicas(config.local_rank()) if local else None
        self._copier = Copier(self._session, self._membership, self._replicas)
        self._outage = Outage(self.run_dir, settings.strict)
        self.restored_from, self._closed = "", False
        self._begun: int | None = None
        settings.log()

    @property
    def suspended(self) -> bool:
        """True while snapshots fail: the newest one grows older, and no step is protected."""
        return bool(self._outage.reason)

    @property
    def run_id(self) -> str:
        """The id of the run: the user's, or the one that was made at its first start."""
        return self.training.identity.id

    @property
    def copied_bytes(self) -> int:
        """The number of bytes copied so far."""
        return self._copier.copied_bytes

    @property
    def stall_s(self) -> float:
        """The time that training has waited for snapshots so far, in seconds."""
        return self._copier.stall_s

    @property
    def commits(self) -> int:
        """The number of snapshots known to be committed on this node."""
        return self._session.commits

    @property
    def committed_step(self) -> int | None:
        """The newest step known to be committed on this node; None before the first."""
        return self._session.last_committed

    @property
    def compares_replicas(self) -> bool:
        """True if replicas divide a state, on one node or several, and so notice differences."""
        return self._membership is not None or bool(self._replicas and self._replicas.shared)

    @property
    def diverged_steps(self) -> frozenset[int]:
        """The steps so far whose replicas held different bits when they were copied."""
        return frozenset(self._copier.diverged | self._session.diverged.keys())

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the saved parts, without the random number generators and the step."""
        return self.training.parts

    @property
    def run_dir(self) -> Path:
        """The run directory, which holds the SMP's socket."""
        return self._settings.run_dir

    def begin(self, step: int) -> None:
        """Start copying the state after ``step`` in the background, and return at once.

        Nothing happens unless ``step`` is a multiple of ``every``. Without ``strict``, trouble is
        recorded as ``snapshots_suspended``, and training goes on without snapshots for a while.

        Raises:
            ConfigError: an entry of the state cannot be stored; names its path.
        """
        self.hand_over()
        self.step = step
        with self._outage.tolerated():
            if self._pacing is not None:
                self.every = self._pacing.every(step, self.stall_s)
            if step % self.every == 0:
                self._begin(step)
            else:
                self._copier.start_digests(step, self.training.held)

    def _begin(self, step: int) -> None:
        self._outage.watch(self.commits, self._session.refusal)
        if not self._outage.may_begin(self._copier.reconnect):
            if self._outage.connected:
                with self._copier.talking:
                    self._session.skip_step(step)
            return
        if self._fresh:
            self._begin_anew()
        self._ownership.check_disk(self.training.identity, step)
        if self._membership is not None and self._membership.roster is None:
            with self._copier.talking:
                self._membership.join(self._session)
        if self.commits:
            self._ownership.files.taken()
        self._loader_check.check()
        # Guard.batches sets the epoch, from which the loader's pass can be repeated, before step 1.
        self._loader_check.say(repeatable=not step or self.training.epoch is not None)
        flat = self.training.capture(step)
        self._begun = step
        self._copier.start(self._copier.copy_of(step, flat))

    def finish(self) -> None:
        """Let the state change: wait until the copy in flight no longer needs the model's tensors.

        It must be called before ``optimizer.step``. It returns at once if nothing is in flight.
        What is copied from CUDA devices their current streams wait for, and the calling thread does
        not; optimizers of ``torch.optim`` have the streams wait in which they step.
        Without ``strict``, trouble is recorded as ``snapshots_suspended`` and not raised.

        Raises:
            ConfigError: the SMP holds this step or a newer one already; with ``strict`` also: it
                lacks memory.
            SmpUnavailable: with ``strict``, the SMP or another rank did not answer in time.
        """
        self._copier.prioritize()
        with self._outage.tolerated():
            self._copier.finish()

    def hand_over(self) -> None:
        """Wait until the copy in flight is complete and the SMP knows it; else as ``finish``."""
        self._copier.prioritize()
        with self._outage.tolerated():
            self._copier.complete()

    def watch(
        self, choose: Callable[[Sequence[Entry]], list[int]], wants: Callable[[], bool]
    ) -> None:
        """Let ``choose`` return which entries are to be digested after each step (``AtRest``).

        ``wants`` is asked after steps without a snapshot whether to digest them at all.
        """
        self._copier.watch, self._copier.wants = choose, wants

    def copied(self, step: int) -> Copy | None:
        """Wait until the state after ``step`` is read; return its copy, or its digests, if any."""
        self._copier.prioritize()
        copy = self._copier.read()
        return copy if copy is not None and copy.step == step else None

    def holds_before(self, step: int) -> bool:
        """Return whether memory holds a clean snapshot of an earlier step for all local ranks."""
        status = launch.smp_status(self.run_dir)
        return status is not None and all(
            min(steps, default=step) < step for steps in status["clean"]
        )

    def wait_committed(self) -> int | None:
        """Wait for the snapshot begun last; return its step, or None if it was abandoned.

        Raises:
            SmpUnavailable: with ``strict``, the other ranks did not write it in time.
        """
        self.hand_over()
        if self._outage.broken:
            return None
        committed = None
        with self._copier.talking, self._outage.tolerated():
            try:
                committed = self._session.settle()
            except ConnectionError as error:
                self._copier.replace_smp(error)
        self._copier.report_divergence()
        return committed if committed == self._begun else None

    def restore(self) -> int | None:
        """Load the newest intact snapshot that all local ranks hold; every rank must call it.

        If memory holds none, load the newest checkpoint in ``persist_dir`` that all of them have
        intact, and store it in memory as well.

        Returns:
            The step of the snapshot, or None if there is none. If the run had committed snapshots
            and the SMP that held them is gone, a ``snapshots_lost`` event is recorded.

        Raises:
            SnapshotLost: there were snapshots or checkpoints, but none is intact or can be read.
            SnapshotMismatch: the snapshot belongs to another run, model or optimizer, or cannot be
                dealt to these ranks; nothing was changed.
            SmpUnavailable: the SMP or another rank did not answer in time, or a node that holds the
                newest snapshot cannot be reached.
        """
        if self._fresh:
            self._begin_anew()
            return None
        return self._restore(self._settings.persist, skip=())

    def _begin_anew(self) -> None:
        """Give up what memory and disk hold of an earlier run, at the wish of the user."""
        with self._copier.talking:
            newest_state.discard(self._session, self._membership)
        self._fresh = False
        self.training.identity, moved = self._ownership.begin_anew(self.training.identity)
        if moved:
            self._session.restart_persister()

    def _restore(
        self, disk: PersistSettings | None, skip: tuple[str, ...], before: int = ANY_STEP
    ) -> int | None:
        self._outage.settle()
        self._copier.abandon()
        started_s = time.monotonic()
        about = self._session, self.training, disk, self._membership, before
        found = self._copier.restored(partial(newest_state.newest, *about))
        self._outage.broken = False
        if found is None:
            self._ownership.files.say_nothing_left()
            return None
        self._loader_check.check()
        step, source = found.step, found.source
        if self._replicas is not None:
            self._replicas.found(found.ranks)
        place = self.run_dir if source == "memory" or disk is None else disk.directory
        self.restored_from = "; ".join([f"{source} ({place})", *found.notes])
        found_s = time.monotonic() - started_s
        self.training.load(self.training.fitted(found.tree, str(place)), skip)
        self._ownership.continues(self.run_id, step)
        self.step = self._begun = step
        found.record(found_s, time.monotonic() - started_s)
        nodes = self._membership is not None and not skip
        if source == "disk" or self._session.former or nodes:
            # So that memory holds the state from which the first step starts. After a rollback all
            # nodes hold it already, with the loader's position that belongs to it.
            self._begin(step)
            self.wait_committed()
        else:
            self._copier.start_digests(step, self.training.held)
        return step

    def rollback(self, before: int | None = None) -> int:
        """Load the newest snapshot in memory during training; there must be one.

        The loader keeps its position, because the caller still holds the batches since that step.
        With ``before``, load one of an older step, and forget those of newer ones.

        Raises:
            SnapshotLost: there is no such snapshot that is intact; none was forgotten.
            SnapshotMismatch, SmpUnavailable: as for ``restore``.
        """
        step = self._restore(None, ("loader",), ANY_STEP if before is None else before)
        if step is None:
            none = f"the SMP of {self.run_dir} holds no snapshot: none was committed yet, or it was"
            raise SnapshotLost(f"{none} lost; start from a checkpoint")
        return step

    def persist(self) -> Path:
        """Wait until the snapshot begun last, or a newer one, is on disk; return its folder.

        Raises:
            ConfigError: there is no ``persist_dir``.
            SnapshotError: the checkpoint could not be written; says why.
            SmpUnavailable: it was not written in time.
        """
        self.wait_committed()
        return persist_now(self._settings, self._session.last_committed)

    def status(self) -> launch.Status:
        """Return the SMP's status: clean steps of each rank, bytes, commits, uptime and more.

        ``interval`` states this rank's number of steps between snapshots and, with ``"auto"``, its
        reasons. ``config`` has the values of the config file that are in force in this process.

        Raises:
            SmpUnavailable: there is no SMP, or it does not answer in time.
        """
        status = launch.smp_status(self.run_dir)
        if status is None:
            raise SmpUnavailable(f"no SMP runs in {self.run_dir}: it was lost or stopped")
        interval = self._pacing.status() if self._pacing else {"auto": False, "every": self.every}
        return status | {"interval": interval, "config": config.used()}

    def close(self, *, finished: bool) -> None:
        """Disconnect from the SMP.

        With ``finished`` the SMP ends after all ranks have closed with it; otherwise it waits for
        another trainer. Without ``strict`` nothing is raised, because the run itself has ended.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._outage.settle()
            with self._outage.tolerated():
                try:
                    self._end() if finished else self._copier.abandon()
                except ConnectionError as error:
                    detail = {"error": str(error)}
                    events.record(EventKind.SMP_LOST, detector="socket", detail=detail)
        finally:
            self._session.close()
            self._copier.close()
            if self._membership is not None:
                self._membership.close()

    def _end(self) -> None:
        if not self.suspended:
            self.wait_committed()
        if self._membership is not None:
            # An SMP that has ended cannot help another node to restore.
            self._membership.gather(None)
        with self._copier.talking:
            self._session.finished()
        self._ownership.files.finished(self.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(finished=error[0] is None)

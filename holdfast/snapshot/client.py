"""``Snapshots``: what a training loop sees of the in-memory snapshots."""

import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast import config, events
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotLost
from holdfast.snapshot import groups, launch, pacing, persist, rebuild, restore
from holdfast.snapshot.inflight import Copy, ShardedCopy, record_diverged, record_torn
from holdfast.snapshot.membership import Membership
from holdfast.snapshot.persist import Checkpoints
from holdfast.snapshot.persist_request import persist_now
from holdfast.snapshot.restore import Found
from holdfast.snapshot.session import Content, SmpSession, patience_s
from holdfast.snapshot.state import Training
from holdfast.snapshot.supervisor import PersistSettings

TAKEN_NAME = "snapshots-taken"
# Ranks agree after each read its part of the state: parameters and a few times as much besides.
_MOMENTS = 4
PERSIST_EVERY = 1000
_AGREEMENT = 2
_RELOAD = "the run starts over: stop it and load a checkpoint if there is one"


class Snapshots:
    """Snapshots of a training run in memory that outlives this process.

    Args:
        model, optimizer: what is trained; dense tensors or DTensors, any dtype.
        scheduler, loader, extra: saved too if given (a loader only if it has ``state_dict``).
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
        model: Any,
        optimizer: Any,
        *,
        scheduler: Any = None,
        loader: Any = None,
        extra: Any = None,
        run_dir: Any = None,
        every: int | None = None,
        interval: str | None = None,
        mttf_s: float | None = None,
        keep: int | None = None,
        parities: int | None = None,
        mesh: Any = None,
        linger_s: float = 600.0,
        persist_dir: Any = None,
        persist_every: int | None = None,
        persist_keep: int = 2,
    ) -> None:
        every, interval, mttf_s = pacing.resolved(every, interval, mttf_s)
        several_nodes = int(config.world_size() > config.local_world_size())
        parities = config.value("snapshots.parities", parities, several_nodes)
        persist_every = config.value("snapshots.persist_every", persist_every, PERSIST_EVERY)
        if parities < 0:
            raise ConfigError(f"parities={parities}: must be 0, 1 or 2")
        keep = keep if keep is not None else 1 if parities else 2
        for name, value in {"every": every, "keep": keep}.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if not linger_s > 0:
            raise ConfigError(f"linger_s={linger_s}: must be more than 0 seconds")
        self.step = 0
        self.copied_bytes = 0
        self.stall_s = self._copy_s = 0.0
        self._pacing = pacing.of(interval, every, mttf_s)
        self.every = every if self._pacing is None else pacing.MEASURING
        self.scheduler, self.loader = scheduler, loader
        self._training = Training(model, optimizer, scheduler, loader, extra)
        self._loader_unsaved = loader is not None and "loader" not in self.parts
        world_size = config.local_world_size()
        self._settings = launch.SmpSettings(
            config.run_dir(run_dir),
            world_size,
            keep,
            linger_s,
            persist.settings(persist_dir, persist_every, persist_keep),
        )
        self._session = SmpSession(self._settings, config.local_rank())
        self._membership = (
            _membership(model, mesh, parities, self._settings.persist) if parities else None
        )
        # Outlives the SMP: whoever finds it, and no snapshot, knows that something was lost.
        self._marker = self._settings.run_dir / TAKEN_NAME
        self._worker = ThreadPoolExecutor(1, "holdfast-snapshot")
        self._copy: Copy | None = None
        self._future: Future[Content | None] | None = None
        self._begun: int | None = None
        self._closed = False

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
        """What is saved, besides the random number generators and the step."""
        return self._training.parts

    @property
    def run_dir(self) -> Path:
        """The run directory, which holds the SMP's socket."""
        return self._settings.run_dir

    @property
    def epoch(self) -> Any:
        """Where a loader without ``state_dict`` began its present pass: (step, random state)."""
        return self._training.epoch

    @epoch.setter
    def epoch(self, value: Any) -> None:
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
            self._copy = Copy(step, flat)
        else:
            self._copy = ShardedCopy(
                step,
                flat,
                seat=self._membership.seat,
                parities=self._membership.parities,
                peers=self._membership.peers(),
            )
        self._future = self._worker.submit(self._run, self._copy)

    def finish(self) -> None:
        """Wait until the copy in flight needs the model's tensors no more.

        Must come before ``optimizer.step``. Nothing in flight: returns at once.

        Raises:
            ConfigError: the SMP refused (not enough memory, a step it already holds).
            SmpUnavailable: the SMP or another rank did not answer in time.
        """
        if self._copy is not None:
            self._copy.hurry()
        self._finish()

    def _finish(self) -> None:
        copy, future = self._copy, self._future
        if copy is None or future is None:
            return
        started_s = time.monotonic()
        try:
            content = future.result(3 * patience_s(copy.nbytes))
            changed = copy.changed()
            if changed:
                record_torn(copy.step, changed)
                self._pass_over(copy.step)
            elif content is not None:
                self._hand_over(copy, content)
            self._report_divergence()
        except TimeoutError as error:
            copy.cancelled.set()
            raise SmpUnavailable(
                f"the copy of step {copy.step} hangs: see the SMP's log"
            ) from error
        finally:
            self._copy = self._future = None
            self.stall_s += time.monotonic() - started_s

    def _run(self, copy: Copy) -> Content | None:
        try:
            return self._write(copy)
        except ConnectionError as error:
            self._replace_smp(error)
            try:
                return self._write(copy)
            except ConnectionError as again:
                raise self._contested(again) from again

    def _write(self, copy: Copy) -> Content | None:
        if not copy.agree(self._session):
            return None
        buffer = self._session.begin(copy.step, copy.nbytes)
        if buffer is None:
            return None
        started_s = time.monotonic()
        content = copy.write(buffer)
        self._copy_s = time.monotonic() - started_s
        self.copied_bytes += copy.nbytes
        return content

    def _hand_over(self, copy: Copy, content: Content) -> None:
        try:
            self._say_written(copy, content)
        except ConnectionError as error:
            # optimizer.step has not run yet: the same state can be copied to a new SMP.
            self._replace_smp(error)
            again = self._write(copy)
            if again is not None:
                self._say_written(copy, again)

    def _say_written(self, copy: Copy, content: Content) -> None:
        self._session.written(copy.step, content, copy_s=self._copy_s, stall_s=self.stall_s)

    def _pass_over(self, step: int) -> None:
        try:
            self._session.pass_over(step)
        except ConnectionError as error:
            self._replace_smp(error)
            self._session.pass_over(step)

    def _report_divergence(self) -> None:
        found, self._session.diverged = self._session.diverged, {}
        if config.local_rank() == 0:
            for step, pairs in found.items():
                record_diverged(step, pairs)

    def _replace_smp(self, error: ConnectionError) -> None:
        events.record("smp_lost", detector="socket", rung="rollback", detail={"error": str(error)})
        unsettled = self._session.reconnect()
        if self._membership is not None:
            self._membership.rejoin(self._session)
        if unsettled is not None:
            self._session.pass_over(unsettled)

    def _contested(self, error: ConnectionError) -> SmpUnavailable:
        return SmpUnavailable(
            f"the SMP of {self._settings.run_dir} was lost twice ({error}): another run may be "
            "using this run directory: give each its own run_dir"
        )

    def wait_committed(self) -> int | None:
        """Wait for the last begun snapshot; its step, or None if it was abandoned or there is none.

        Raises:
            SmpUnavailable: the other ranks did not write it in time.
        """
        self._finish()
        try:
            committed = self._session.settle()
        except ConnectionError as error:
            self._replace_smp(error)
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
        self._abandon()
        started_s = time.monotonic()
        try:
            found = self._newest(disk)
        except ConnectionError as error:
            if self._membership is not None:
                # Nobody else would know that this rank begins anew.
                raise SmpUnavailable(f"the SMP was lost while restoring: {error}") from error
            self._replace_smp(error)
            try:
                found = self._newest(disk)
            except ConnectionError as again:
                raise self._contested(again) from again
        if found is None:
            if self._marker.exists():
                events.record("snapshots_lost", detector="smp", detail={"remedy": _RELOAD})
            return None
        step, tree, source = found
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
        events.record("restored", rung=rung, duration_s=duration_s, detail=detail)
        if source == "disk" or (self._membership is not None and not skip):
            # The very first step can be rolled back, too, and survives the loss of a node. After a
            # roll-back all hold it already, with the loader's position that belongs to it.
            self._begin(step)
            self.wait_committed()
        return step

    def _newest(self, disk: PersistSettings | None) -> Found | None:
        if self._membership is None:
            return restore.newest(self._session, self._training, disk)
        return rebuild.newest(self._membership, self._session, self._training, disk)

    def rollback(self) -> int:
        """As ``restore``, during training: there must be a snapshot.

        The loader stays where it is: whoever rolls back still holds the batches since then.

        Raises:
            SnapshotLost: there is none that is intact. Else as ``restore``.
        """
        step = self._restore(None, skip=("loader",))
        if step is None:
            raise SnapshotLost(
                f"the SMP of {self._settings.run_dir} holds no snapshot: none was committed yet, "
                "or it was lost; start from a checkpoint"
            )
        return step

    def _abandon(self) -> None:
        copy, future = self._copy, self._future
        self._copy = self._future = None
        if copy is None or future is None:
            return
        copy.cancelled.set()
        try:
            # Whatever became of it does not matter any more, only that it has ended.
            future.exception(3 * patience_s(copy.nbytes))
        except TimeoutError as error:
            raise SmpUnavailable(
                f"the copy of step {copy.step} hangs: see the SMP's log"
            ) from error

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

    def status(self) -> dict[str, Any]:
        """What the SMP holds: clean steps per rank, bytes, commits, refused, uptime_s and more.

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
                self._abandon()
        except ConnectionError as error:
            events.record("smp_lost", detector="socket", detail={"error": str(error)})
        finally:
            self._session.close()
            self._worker.shutdown(wait=False)
            if self._membership is not None:
                self._membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(finished=error is None)


def _say_unsaved(loader: Any) -> None:
    name = type(loader).__name__
    remedy = (
        "draw its batches through Guard.batches, which begins its pass anew after a restart and "
        "skips what was trained on, or give it state_dict and load_state_dict"
    )
    events.record("loader_unsaved", detail={"loader": name, "remedy": remedy})
    where = f"where the loader, a {name} without state_dict, stands is not in the snapshots"
    warnings.warn(f"{where}: {remedy}", stacklevel=4)


def _membership(model: Any, mesh: Any, parities: int, disk: PersistSettings | None) -> Membership:
    ranks_per_node = config.local_world_size()
    if isinstance(mesh, groups.Job):
        job = mesh
    else:
        job = groups.of_model(model, config.world_size(), ranks_per_node, mesh)
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return Membership(job, parities, disk, _AGREEMENT * patience_s(_MOMENTS * nbytes))

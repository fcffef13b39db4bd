"""``Snapshots``: what a training loop sees of the in-memory snapshots."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast import config, events
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotLost
from holdfast.snapshot import launch, layout, manifest
from holdfast.snapshot.inflight import Copy, record_torn
from holdfast.snapshot.manifest import Entry
from holdfast.snapshot.restore import agree
from holdfast.snapshot.session import SmpSession, patience_s
from holdfast.snapshot.state import Training

TAKEN_NAME = "snapshots-taken"
_RELOAD = "the run starts over: stop it and load a checkpoint if there is one"


class Snapshots:
    """Snapshots of a training run in memory that outlives this process.

    Args:
        model, optimizer: what is trained; dense tensors, any dtype.
        scheduler, loader, extra: saved too if given (a loader only if it has ``state_dict``).
        run_dir: identifies the run on this node; default ``config.run_dir()``.
        every: take a snapshot each so many steps.
        keep: clean snapshots kept per rank; memory is ``keep + 1`` times the state.
        linger_s: how long the SMP waits for a new trainer, in seconds.

    **Guarantees**: after SIGKILL of any or all ranks at any moment, ``restore`` on the same node
    gives the newest step that all local ranks had committed, bit for bit; bytes that changed
    since are found (xxh3-128) and the next older step is given instead. A copy whose tensors were
    changed in place before ``finish`` is dropped and recorded as ``snapshot_torn``.

    **Not covered**: loss of the node or of the SMP (its snapshots go with it); parameters changed
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
        every: int = 1,
        keep: int = 2,
        linger_s: float = 600.0,
    ) -> None:
        for name, value in {"every": every, "keep": keep}.items():
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if not linger_s > 0:
            raise ConfigError(f"linger_s={linger_s}: must be more than 0 seconds")
        self.step = 0
        self.copied_bytes = 0
        self.stall_s = 0.0
        self.every = every
        self.scheduler, self.loader = scheduler, loader
        self._training = Training(model, optimizer, scheduler, loader, extra)
        world_size = config.local_world_size()
        self._settings = launch.SmpSettings(config.run_dir(run_dir), world_size, keep, linger_s)
        self._session = SmpSession(self._settings, config.local_rank())
        # Outlives the SMP: whoever finds it, and no snapshot, knows that something was lost.
        self._marker = self._settings.run_dir / TAKEN_NAME
        self._worker = ThreadPoolExecutor(1, "holdfast-snapshot")
        self._copy: Copy | None = None
        self._future: Future[list[Entry] | None] | None = None
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
        if step % self.every:
            return
        if self.commits and not self._marker.exists():
            self._marker.touch()
        flat = self._training.capture(step)
        self._begun = step
        self._copy = Copy(step, flat, layout.plan(flat), layout.versions(flat))
        self._future = self._worker.submit(self._run, self._copy)

    def finish(self) -> None:
        """Wait until the copy in flight needs the model's tensors no more.

        Must come before ``optimizer.step``. Nothing in flight: returns at once.

        Raises:
            ConfigError: the SMP refused (not enough memory, a step it already holds).
            SmpUnavailable: the SMP or another rank did not answer in time.
        """
        copy, future = self._copy, self._future
        if copy is None or future is None:
            return
        started_s = time.monotonic()
        try:
            entries = future.result(3 * patience_s(copy.nbytes))
            changed = copy.changed()
            if changed:
                record_torn(copy.step, changed)
            elif entries is not None:
                self._hand_over(copy, entries)
        except TimeoutError as error:
            copy.cancelled.set()
            raise SmpUnavailable(
                f"the copy of step {copy.step} hangs: see the SMP's log"
            ) from error
        finally:
            self._copy = self._future = None
            self.stall_s += time.monotonic() - started_s

    def _run(self, copy: Copy) -> list[Entry] | None:
        try:
            return self._write(copy)
        except ConnectionError as error:
            self._replace_smp(error)
            try:
                return self._write(copy)
            except ConnectionError as again:
                raise self._contested(again) from again

    def _write(self, copy: Copy) -> list[Entry] | None:
        buffer = self._session.begin(copy.step, copy.nbytes)
        if buffer is None:
            return None
        entries = list(layout.write(copy.flat, copy.entries, buffer, copy.cancelled.is_set))
        self.copied_bytes += copy.nbytes
        return entries

    def _hand_over(self, copy: Copy, entries: list[Entry]) -> None:
        try:
            self._send_manifest(copy, entries)
        except ConnectionError as error:
            # optimizer.step has not run yet: the same state can be copied to a new SMP.
            self._replace_smp(error)
            again = self._write(copy)
            if again is not None:
                self._send_manifest(copy, again)

    def _send_manifest(self, copy: Copy, entries: list[Entry]) -> None:
        blob = manifest.encode(copy.flat.skeleton, entries)
        self._session.written(copy.step, blob, manifest.digest_of(blob))

    def _replace_smp(self, error: ConnectionError) -> None:
        events.record("smp_lost", detector="socket", rung="rollback", detail={"error": str(error)})
        self._session.reconnect()

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
        self.finish()
        try:
            committed = self._session.settle()
        except ConnectionError as error:
            self._replace_smp(error)
            return None
        return committed if committed == self._begun else None

    def restore(self) -> int | None:
        """Load the newest intact snapshot that all local ranks hold; every rank must call it.

        Returns:
            Its step, or None if the SMP holds nothing. If the run had committed snapshots and the
            SMP that held them is gone, a ``snapshots_lost`` event says so.

        Raises:
            SnapshotLost: there were snapshots but none is intact.
            SnapshotMismatch: it belongs to another model or optimizer; nothing was changed.
            SmpUnavailable: the SMP or another rank did not answer in time.
        """
        return self._restore(skip=())

    def _restore(self, skip: tuple[str, ...]) -> int | None:
        self._abandon()
        started_s = time.monotonic()
        try:
            found = agree(self._session, self._training)
        except ConnectionError as error:
            self._replace_smp(error)
            try:
                found = agree(self._session, self._training)
            except ConnectionError as again:
                raise self._contested(again) from again
        if found is None:
            if self._marker.exists():
                events.record("snapshots_lost", detector="smp", detail={"remedy": _RELOAD})
            return None
        step, tree = found
        self._training.check(tree)
        self._training.load(tree, skip)
        self.step = self._begun = step
        detail = {"step": step, "source": "memory"}
        duration_s = time.monotonic() - started_s
        events.record("restored", rung="rollback", duration_s=duration_s, detail=detail)
        return step

    def rollback(self) -> int:
        """As ``restore``, during training: there must be a snapshot.

        The loader stays where it is: whoever rolls back still holds the batches since then.

        Raises:
            SnapshotLost: there is none that is intact. Else as ``restore``.
        """
        step = self._restore(skip=("loader",))
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

    def status(self) -> dict[str, Any]:
        """What the SMP holds: clean steps per rank, bytes, commits, refused, uptime_s and more.

        Raises:
            SmpUnavailable: there is no SMP, or it does not answer in time.
        """
        status = launch.smp_status(self._settings.run_dir)
        if status is None:
            raise SmpUnavailable(f"no SMP runs in {self._settings.run_dir}: it was lost or stopped")
        return status

    def close(self, *, finished: bool) -> None:
        """Disconnect; with ``finished`` the SMP ends once all ranks said so, else it lingers."""
        if self._closed:
            return
        self._closed = True
        try:
            if finished:
                self.wait_committed()
                self._session.finished()
                self._marker.unlink(missing_ok=True)
            else:
                self._abandon()
        except ConnectionError as error:
            events.record("smp_lost", detector="socket", detail={"error": str(error)})
        finally:
            self._session.close()
            self._worker.shutdown(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(finished=error is None)

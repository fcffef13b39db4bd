"""The copy of a state to the SMP while training continues, and the replacement of a lost SMP."""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event, RLock, Thread
from typing import Any, TypeVar
from weakref import WeakMethod

from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast import config, events
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotError, SnapshotMismatch
from holdfast.events import EventKind
from holdfast.snapshot.client.copies import Copy, DigestsOnly, ShardedCopy
from holdfast.snapshot.client.device_copy import CudaQueue, DeviceCopy
from holdfast.snapshot.client.replicas import LocalCopy, Replicas
from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.session import Content, SmpSession, patience_s
from holdfast.snapshot.protocol.exchange import Call, Exchange, carry_out

_TORN_REMEDY = (
    "change weights in guard.step(..., after=fn), or, without a Guard, between finish() and begin()"
)
_DAMAGED_REMEDY = (
    "let the stream that was current at finish() wait for every other stream that writes weights; "
    "if there is none, check the memory of the device and of this host, and what connects them"
)

_WATCH_S = 0.2
Result = TypeVar("Result")
_logger = logging.getLogger("holdfast.snapshot")


class Copier:
    """Runs one copy at a time in a thread of its own.

    If the SMP dies meanwhile, another one is started and the copy is made again, because the
    model's tensors still hold the state. With ``membership`` the nodes protect each other;
    ``replicas`` are the local ranks that divide a state, if this node may divide one by itself.

    Attributes:
        copied: the copy, or the digests, finished last, if that succeeded, until the next begins.
        watch: returns the indices of the entries of a state whose digests the caller needs, if any;
            ``wants`` says whether it needs those of steps without a copy.
        talking: is held by the trainer's thread while it talks to the SMP.
    """

    def __init__(
        self, session: SmpSession, membership: Membership | None, replicas: Replicas | None = None
    ) -> None:
        self.copied: Copy | None = None
        self.watch: Callable[[Sequence[Entry]], list[int]] | None = None
        self.wants: Callable[[], bool] = lambda: False
        self.copied_bytes, self.stall_s, self.diverged = 0, 0.0, set[int]()
        self.future: Future[Content | None] | None = None
        self._copy: Copy | None = None
        self._copy_s, self._torn_said = 0.0, False
        self._session, self._membership, self.replicas = session, membership, replicas
        self._worker = ThreadPoolExecutor(1, "holdfast-snapshot")
        self.queue, self.talking = CudaQueue(), RLock()
        self._closed = Event()
        if membership is not None:
            about = WeakMethod(self.replace_if_lost), self._closed
            Thread(target=_watch, args=about, name="holdfast-smp-watch", daemon=True).start()
        before = WeakMethod(self._before_optimizer)
        self._hook = register_optimizer_step_pre_hook(lambda *_: (alive := before()) and alive())

    def copy_of(self, step: int, flat: Flat) -> Copy:
        """Return a copy of a state, or of this rank's share of it, that is still to be made."""
        if self.replicas is not None:
            return LocalCopy(step, flat, replicas=self.replicas)
        if self._membership is None:
            return Copy(step, flat)
        parities, peers = self._membership.parities, self._membership.peers()
        seat = self._membership.seat
        return ShardedCopy(step, flat, seat=seat, parities=parities, peers=peers)

    def start(self, copy: Copy) -> None:
        """Begin a copy in the background; the copy before must have been finished."""
        self._begin(copy, partial(self.retried, partial(self._write, copy)))

    def start_digests(self, step: int, held: Callable[[], Flat]) -> None:
        """Begin to digest a state without a copy, if that is wanted; nothing may be in flight."""
        if self.watch is not None and self.wants():
            digests = DigestsOnly(step, held())
            self._begin(digests, digests.fill)

    def _begin(self, copy: Copy, work: Callable[[], Any]) -> None:
        self._forget_copied()
        self._copy = copy
        if any(map(self.queue.serves, copy.flat.tensors)):
            copy.device = DeviceCopy(self.queue, copy.flat.tensors)
        if self.watch is not None:
            copy.watched = self.watch(copy.entries)
        self.future = self._worker.submit(work)
        if copy.device is not None:
            self.future.add_done_callback(copy.device.ended)

    def prioritize(self) -> None:
        """Speed up the copy in flight, because training waits for it from now on."""
        if self._copy is not None:
            self._copy.prioritize()

    def read(self) -> Copy | None:
        """Wait until the state is read; return the copy, of which the SMP is told nothing yet.

        So that it is never committed if training rolls back. None if there is no intact one. Of
        tensors on devices only the digests are waited for.
        """
        copy, future = self._copy, self.future
        if copy is None or future is None:
            return self.copied
        started_s = time.monotonic()
        failed = False
        try:
            if copy.device is None or not copy.device.digested.wait(3 * patience_s(copy.nbytes)):
                failed = future.exception(3 * patience_s(copy.nbytes)) is not None
        except TimeoutError:
            failed = True  # ``finish`` raises
        self.stall_s += time.monotonic() - started_s
        return None if failed or not copy.digests or copy.changed() else copy

    def finish(self) -> None:
        """Let the trainer change the state.

        Wait until the copy in flight is complete (``complete``). If all that is left of it is the
        devices' work, the trainer's present streams wait instead, and this thread does not.
        """
        copy, future = self._copy, self.future
        device = self._queued(copy)
        if copy is None or device is None or future is None or future.done():
            self.complete()
        else:
            copy.let_change(device)

    def _before_optimizer(self) -> None:
        """Order a step of any optimizer of torch behind what the devices have left of the copy."""
        self.queue.note_streams()
        copy = self._copy
        if copy is not None and (device := self._queued(copy)) is not None:
            copy.let_change(device)

    def _queued(self, copy: Copy | None) -> DeviceCopy | None:
        """Return the part of a copy that devices do, once all of it is queued or the copy ended."""
        if copy is None or copy.device is None:
            return None
        started_s = time.monotonic()
        queued = copy.device.queued.wait(3 * patience_s(copy.nbytes))
        self.stall_s += time.monotonic() - started_s
        return copy.device if queued else None

    def complete(self) -> None:
        """Wait until the copy in flight is in the SMP, or was dropped because a tensor changed."""
        with self.talking:
            self._complete()

    def _complete(self) -> None:
        copy, future = self._copy, self.future
        if copy is None or future is None:
            return
        started_s = time.monotonic()
        try:
            content = future.result(3 * patience_s(copy.nbytes))
            changed = copy.changed()
            if changed or copy.damaged:
                self._say_torn(copy.step, changed, copy.damaged)
                self.retried(partial(self._session.skip_step, copy.step))
            else:
                if content is not None:
                    self._hand_over(copy, content)
                self.copied = copy if copy.digests else None
            self.report_divergence()
        except TimeoutError as error:
            copy.cancelled.set()
            raise _hangs(copy) from error
        finally:
            self._copy = self.future = None
            self.stall_s += time.monotonic() - started_s

    def abandon(self) -> None:
        """Drop the copy in flight, and wait until its thread has stopped."""
        copy, future = self._copy, self.future
        self._copy = self.future = None
        self._forget_copied()
        if copy is None or future is None:
            return
        copy.cancelled.set()
        try:
            future.exception(3 * patience_s(copy.nbytes))
        except TimeoutError as error:
            raise _hangs(copy) from error
        copy.room = None

    def close(self) -> None:
        """End the thread once it is idle, and let go of the SMP's memory."""
        self._hook.remove()
        self._closed.set()
        self._worker.submit(self.queue.register, [])
        self._worker.shutdown(wait=False)
        self._forget_copied()

    def _forget_copied(self) -> None:
        """Let go of the SMP's memory, also where somebody still holds the copy."""
        if self.copied is not None:
            self.copied.room = None
        self.copied = None

    def replace_smp(self, error: ConnectionError) -> None:
        """Find or start another SMP in the place of one that was lost with ``error``."""
        detail, rung = {"error": str(error)}, "rollback"
        events.record(EventKind.SMP_LOST, detector="socket", rung=rung, detail=detail)
        self._reconnect()

    def replace_if_lost(self) -> None:
        """Replace an SMP that is lost, unless another thread talks to it or will soon."""
        if self._session.is_lost() and self.future is None:
            with suppress(RuntimeError):  # the thread that copies has ended
                self._worker.submit(self._replace_if_idle).result()

    def _replace_if_idle(self) -> None:
        if self.future is None and self.talking.acquire(blocking=False):
            try:
                if self._session.is_lost():
                    self.replace_smp(ConnectionError("it closed the connection"))
            except (SnapshotError, OSError) as error:
                _logger.warning("the SMP was lost and not replaced yet: %s", error)
            finally:
                self.talking.release()

    def reconnect(self) -> Future[None]:
        """Find or start an SMP in the background; no copy may be in flight."""
        return self._worker.submit(self._reconnect)

    def _reconnect(self) -> None:
        self.queue.register([])
        try:
            carry_out(replacing(self._membership), self._session, list)
        except (ConfigError, SnapshotMismatch) as error:
            # At the start these would be the user's to mend; now something has changed meanwhile.
            raise SmpUnavailable(f"the SMP cannot be replaced: {error}") from error

    def retried(self, action: Callable[[], Result]) -> Result:
        """Return the result of ``action``; if the SMP is lost, replace it and try once more."""
        try:
            return action()
        except ConnectionError as error:
            self.replace_smp(error)
        try:
            return action()
        except ConnectionError as again:
            raise SmpUnavailable(
                f"the SMP of {self._session.settings.run_dir} was lost twice ({again}): another "
                "run may be using this run directory: give each its own run_dir"
            ) from again

    def restored(self, find: Callable[[], Result]) -> Result:
        """Return the result of ``find``, which restores, after replacing a lost SMP if need be."""
        if self._membership is None:
            return self.retried(find)
        try:
            with self.talking:
                return find()
        except ConnectionError as error:
            # The other nodes would not know that this rank starts the restore again.
            raise SmpUnavailable(f"the SMP was lost while restoring: {error}") from error

    def _write(self, copy: Copy) -> Content | None:
        agreed = copy.agree(self._session)
        buffer = self._session.begin(copy.step, copy.nbytes) if agreed else None
        if buffer is None:  # the step is skipped
            copy.fill()
            return None
        started_s = time.monotonic()
        try:
            if copy.device is not None:
                self.queue.register(self._session.slots())
            content = copy.write(buffer)
        except RuntimeError as error:
            if copy.device is None:
                raise
            what = f"the copy of step {copy.step} from a device failed: {error}"
            raise SnapshotError(what) from error
        self._copy_s = time.monotonic() - started_s
        self.copied_bytes += copy.nbytes
        return content

    def _hand_over(self, copy: Copy, content: Content) -> None:
        try:
            self._say_written(copy, content)
        except ConnectionError as error:
            self.replace_smp(error)
            if copy.may_have_changed:
                self._session.skip_step(copy.step)
            # Otherwise the same state can be copied to the new SMP.
            elif (again := self._write(copy)) is not None:
                self._say_written(copy, again)

    def _say_written(self, copy: Copy, content: Content) -> None:
        self._session.written(copy.step, content, copy_s=self._copy_s, stall_s=self.stall_s)

    def _say_torn(self, step: int, changed: str, damaged: str) -> None:
        path, detector = changed or damaged, "version counter" if changed else "digest"
        remedy = _TORN_REMEDY if changed else _DAMAGED_REMEDY
        detail = {"step": step, "path": path, "remedy": remedy}
        events.record(EventKind.SNAPSHOT_TORN, detector=detector, detail=detail)
        if self._torn_said:
            return
        self._torn_said = True
        warnings.warn(
            f"{path} was changed while the snapshot of step {step} was copied, so that there is no "
            f"snapshot of this step, nor of others that this happens to: {remedy}",
            stacklevel=4,
        )

    def report_divergence(self) -> None:
        """Record the steps whose replicas differed, as far as the SMP has answered."""
        if self.replicas is not None:
            self.replicas.judged(self._session.diverged)
        found, self._session.diverged = self._session.diverged, {}
        self.diverged |= found.keys()
        if config.local_rank() > 0:
            return
        first = 0 if self.replicas is None else config.rank()
        remedy = "audit these ranks (Guard(audit=…)) to find the faulty device, and evict it"
        for step, pairs in found.items():
            ranks = sorted({tuple(sorted(first + rank for rank in pair[:2])) for pair in pairs})
            detail = {"step": step, "ranks": ranks, "blocks": len(pairs), "remedy": remedy}
            events.record(EventKind.REPLICA_DIVERGED, detector="digest", detail=detail)


def _watch(replace: "WeakMethod[Callable[[], None]]", closed: Event) -> None:
    """Replace a lost SMP soon, in a thread, and not only when this rank needs it next.

    Ranks of other nodes may wait for what it was to tell theirs, while this rank waits for those
    ranks in a collective of the training: nobody would go on before a timeout.
    """
    while not closed.wait(_WATCH_S) and (alive := replace()) is not None:
        alive()
        del alive


def replacing(membership: Membership | None) -> Exchange[None]:
    """Find or start an SMP in the place of a lost one; all learn what it does not hold."""
    past = yield Call("reconnect")
    if membership is not None:
        yield from membership.rejoining()
    if past is not None:
        yield Call("skip_step", (past,))


def _hangs(copy: Copy) -> SmpUnavailable:
    return SmpUnavailable(f"the copy of step {copy.step} does not end: see the SMP's log")

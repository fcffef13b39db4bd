"""The thread that copies a state to the SMP while training goes on, and the SMP's replacement."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast import config, events
from holdfast.errors import SmpUnavailable
from holdfast.events import EventKind
from holdfast.snapshot.client.inflight import Copy, record_diverged, record_torn
from holdfast.snapshot.client.membership import Membership
from holdfast.snapshot.client.session import Content, SmpSession, patience_s


class Copier:
    """Takes one copy at a time from the model's tensors to the SMP.

    Args:
        session: with the SMP of this node.
        membership: the ranks of all nodes, if these protect each other.

    An SMP that dies meanwhile is replaced, and the copy made again: the tensors still hold it.
    """

    def __init__(self, session: SmpSession, membership: Membership | None) -> None:
        self.copied_bytes = 0
        self.stall_s = 0.0
        self.future: Future[Content | None] | None = None
        self._copy_s = 0.0
        self._copy: Copy | None = None
        self._session, self._membership = session, membership
        self._worker = ThreadPoolExecutor(1, "holdfast-snapshot")

    def start(self, copy: Copy) -> None:
        """Begin a copy in the background; the one before must have been finished."""
        self._copy, self.future = copy, self._worker.submit(self._run, copy)

    def prioritize(self) -> None:
        """Hurry the copy in flight: training waits for it from now on."""
        if self._copy is not None:
            self._copy.prioritize()

    def finish(self) -> None:
        """Wait until the copy in flight is in the SMP, or was dropped because tensors changed.

        Raises:
            ConfigError: the SMP refused (not enough memory, a step it already holds).
            SmpUnavailable: the SMP or another rank did not answer in time.
        """
        copy, future = self._copy, self.future
        if copy is None or future is None:
            return
        started_s = time.monotonic()
        try:
            content = future.result(3 * patience_s(copy.nbytes))
            changed = copy.changed()
            if changed:
                record_torn(copy.step, changed)
                self._skip(copy.step)
            elif content is not None:
                self._hand_over(copy, content)
            self._report_divergence()
        except TimeoutError as error:
            copy.cancelled.set()
            raise _hangs(copy) from error
        finally:
            self._copy = self.future = None
            self.stall_s += time.monotonic() - started_s

    def abandon(self) -> None:
        """Drop the copy in flight: its outcome does not matter any more, only that it has ended.

        Raises:
            SmpUnavailable: it does not end.
        """
        copy, future = self._copy, self.future
        self._copy = self.future = None
        if copy is None or future is None:
            return
        copy.cancelled.set()
        try:
            future.exception(3 * patience_s(copy.nbytes))
        except TimeoutError as error:
            raise _hangs(copy) from error

    def close(self) -> None:
        """End the thread once it is idle."""
        self._worker.shutdown(wait=False)

    def replace_smp(self, error: ConnectionError) -> None:
        """Find or start another SMP in the place of one that was lost."""
        events.record(
            EventKind.SMP_LOST, detector="socket", rung="rollback", detail={"error": str(error)}
        )
        unsettled = self._session.reconnect()
        if self._membership is not None:
            self._membership.rejoin(self._session)
        if unsettled is not None:
            self._session.skip_step(unsettled)

    def contested(self, error: ConnectionError) -> SmpUnavailable:
        """Return the error to raise when the SMP was lost once more after it was replaced."""
        return SmpUnavailable(
            f"the SMP of {self._session.settings.run_dir} was lost twice ({error}): another run "
            "may be using this run directory: give each its own run_dir"
        )

    def _run(self, copy: Copy) -> Content | None:
        try:
            return self._write(copy)
        except ConnectionError as error:
            self.replace_smp(error)
            try:
                return self._write(copy)
            except ConnectionError as again:
                raise self.contested(again) from again

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
            self.replace_smp(error)
            again = self._write(copy)
            if again is not None:
                self._say_written(copy, again)

    def _say_written(self, copy: Copy, content: Content) -> None:
        self._session.written(copy.step, content, copy_s=self._copy_s, stall_s=self.stall_s)

    def _skip(self, step: int) -> None:
        try:
            self._session.skip_step(step)
        except ConnectionError as error:
            self.replace_smp(error)
            self._session.skip_step(step)

    def _report_divergence(self) -> None:
        found, self._session.diverged = self._session.diverged, {}
        if config.local_rank() == 0:
            for step, pairs in found.items():
                record_diverged(step, pairs)


def _hangs(copy: Copy) -> SmpUnavailable:
    return SmpUnavailable(f"the copy of step {copy.step} hangs: see the SMP's log")

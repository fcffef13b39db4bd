"""The copy of a state to the SMP while training continues, and the replacement of a lost SMP."""

import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TypeVar

import torch

from holdfast import config, digest, events
from holdfast.digest.tensors import tensor_digest
from holdfast.errors import ConfigError, SmpUnavailable, SnapshotMismatch
from holdfast.events import EventKind
from holdfast.snapshot.client import shards
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.groups import Mode, Seat
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import Digests, Share
from holdfast.snapshot.node.membership import Membership
from holdfast.snapshot.node.session import Content, SmpSession, patience_s
from holdfast.snapshot.protocol.steps import SEAL_PATIENCE_S

# The most threads that help the copying one; a few threads saturate the memory.
_MOST_HELPERS = 3
_TORN_REMEDY = (
    "change weights in guard.step(..., after=fn), or, without a Guard, between finish() and begin()"
)

Result = TypeVar("Result")


@dataclass
class Copy:
    """One snapshot of a whole state, from the model's tensors to the SMP's memory.

    Attributes:
        flat: the state, with its tensors separated from the rest.
        cancelled: is set when the copy is no longer wanted.
        entries: the places of the tensors in the state's buffer.
        nbytes: the size of the memory that the copy fills, in bytes.
        watched: the indices of the tensors that are compared with their digests later on.
        digests: once it is written, the digests of at least these tensors, by index.
        room: once it is written, the memory that holds the whole state; None if it does not.
        versions: the version counters of the live tensors when the copy began.
    """

    step: int
    flat: flat_buffer.Flat
    cancelled: Event = field(default_factory=Event)
    watched: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    room: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._helpers = 0
        self.entries = self._planned()
        self.nbytes = flat_buffer.total_bytes(self.entries)
        self._versions = flat_buffer.versions(self.flat)
        self.versions = [flat_buffer.live_version(self.flat, n) for n in range(len(self.entries))]

    def _planned(self) -> list[Entry]:
        return flat_buffer.plan(self.flat)

    def agree(self, session: SmpSession) -> bool:
        """Ask other nodes for what this copy needs; return false if the step is to be skipped."""
        return True

    def prioritize(self) -> None:
        """Copy with more threads, because training waits for this copy from now on."""
        self._helpers = min(_MOST_HELPERS, torch.get_num_threads() - 1)

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` (uint8) and return the manifest for the SMP."""
        cancelled, helpers = self.cancelled.is_set, lambda: self._helpers
        entries = flat_buffer.write(self.flat, self.entries, buffer, cancelled, helpers)
        self.digests, self.room = {n: entry.digest for n, entry in enumerate(entries)}, buffer
        blob = manifest.encode(self.flat.skeleton, entries)
        return Content(blob, manifest.digest_of(blob))

    def fill(self) -> None:
        """Compute the digests of the watched tensors, without a copy."""
        self.digests = {n: tensor_digest(self.flat.tensors[n]) for n in self.watched}

    def repaired(self, index: int) -> None:
        """Note that a live tensor was overwritten with what was copied of it."""
        self.versions[index] = self._versions[index] = flat_buffer.live_version(self.flat, index)

    def is_edited(self, index: int) -> bool:
        """Return whether the program changed a live tensor in place since the copy began."""
        return flat_buffer.live_version(self.flat, index) != self.versions[index]

    def changed(self) -> str:
        """Return the path of a tensor that has changed in place since the copy began, or ``""``."""
        now = flat_buffer.versions(self.flat)
        pairs = zip(self.flat.paths, self._versions, now, strict=True)
        return next((path for path, before, after in pairs if before != after), "")


class DigestsOnly(Copy):
    """The digests of a state's watched tensors after a step of which there is no snapshot."""

    def fill(self) -> None:
        """Compute the digests; those of tensors that change meanwhile are not compared."""
        self.digests = {n: tensor_digest(self.flat.live[n]) for n in self.watched}

    def changed(self) -> str:
        """Return ``""``: there is no copy that a change could tear."""
        return ""


@dataclass
class ShardedCopy(Copy):
    """The copy of one rank's share of a state, where several nodes protect each other.

    If the nodes hold replicas of one state, the memory receives the rank's shard and the parities
    of other ranks' shards. If they hold different states, it receives the rank's part of its own
    state, and room for the parities that the SMPs add up.

    Attributes:
        seat: the place of the rank in its sharding group.
        parities: the number of nodes that may be lost.
        peers: the ranks that stripe a state together, one for each node of the group.
    """

    seat: Seat = field(kw_only=True)
    parities: int = field(kw_only=True)
    peers: tuple[int, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        own = flat_buffer.stable_bytes(self.flat, self.entries)
        self._share_out([own] * len(self.peers))
        self._patient_until_s = time.monotonic() + config.timeout_s()

    def _planned(self) -> list[Entry]:
        return shares.plan(self.flat)

    def _share_out(self, sizes: list[int]) -> None:
        self.share = Share.of(self.seat, self.parities, sizes)
        self.nbytes = self.share.buffer_nbytes

    def agree(self, session: SmpSession) -> bool:
        """Ask for the sizes of the states that are striped with this one; as ``Copy.agree``."""
        if self.seat.group.mode is Mode.REPLICATED:
            return True
        own = self.share.sizes[self.seat.index]
        found = session.sizes(self.step, own, self.peers, self._patient)
        if found is not None:
            self._share_out(found)
        return found is not None

    def prioritize(self) -> None:
        """Wait for other nodes only a moment longer, because training waits from now on."""
        self._patient_until_s = min(self._patient_until_s, time.monotonic() + SEAL_PATIENCE_S)

    def _patient(self) -> bool:
        return not self.cancelled.is_set() and time.monotonic() < self._patient_until_s

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` with this rank's share, as ``Copy.write``."""
        share = self.share
        room = buffer[: share.buffer_nbytes]
        digests = shards.write(self.flat, self.entries, share, room, self.cancelled.is_set)
        self.fill()
        blob = shares.describe(self.flat, self.entries, share, digests).encode()
        content = Content(blob, manifest.digest_of(blob), *self._claims(share, digests))
        if share.replicated or share.idle:
            return content
        plan = shards.plan_parities(share.striping, share.node, self.peers, shares.BUCKET_BYTES)
        return Content(content.manifest, content.digest, plan=plan)

    def _claims(
        self, share: Share, digests: Digests
    ) -> tuple[list[str], list[tuple[int, int, str]]]:
        if not share.replicated:
            return [], []
        claims = [digest.hexdigest(digests.data.get(s, b"")) for s in range(share.nodes)]
        seen = [
            (self.peers[node], stripe, digest.hexdigest(source))
            for stripe, sources in digests.sources.items()
            for node, source in sources.items()
        ]
        return claims, seen


class Copier:
    """Runs one copy at a time in a thread of its own.

    If the SMP dies meanwhile, another one is started and the copy is made again, because the
    model's tensors still hold the state.

    Args:
        session: the connection to the SMP of this node.
        membership: the ranks of all nodes, if the nodes protect each other.

    Attributes:
        copied: the copy, or the digests, finished last, if that succeeded, until the next begins.
        watch: returns the indices of the entries of a state whose digests the caller needs; None if
            it needs none.
    """

    def __init__(self, session: SmpSession, membership: Membership | None) -> None:
        self.copied: Copy | None = None
        self.watch: Callable[[Sequence[Entry]], list[int]] | None = None
        self.copied_bytes = 0
        self.stall_s = 0.0
        self.diverged: set[int] = set()
        self.future: Future[Content | None] | None = None
        self._copy_s = 0.0
        self._torn_said = False
        self._copy: Copy | None = None
        self._session, self._membership = session, membership
        self._worker = ThreadPoolExecutor(1, "holdfast-snapshot")

    def start(self, copy: Copy) -> None:
        """Begin a copy in the background; the copy before must have been finished."""
        self._begin(copy)
        self.future = self._worker.submit(self.retried, partial(self._write, copy))

    def start_digests(self, digests: DigestsOnly) -> None:
        """Begin to digest in the background what is watched; nothing may be in flight."""
        self._begin(digests)
        self.future = self._worker.submit(self._digest, digests)

    def _begin(self, copy: Copy) -> None:
        self._forget_copied()
        self._copy = copy
        if self.watch is not None:
            copy.watched = self.watch(copy.entries)

    def prioritize(self) -> None:
        """Speed up the copy in flight, because training waits for it from now on."""
        if self._copy is not None:
            self._copy.prioritize()

    def read(self) -> Copy | None:
        """Wait until the state is read; return the copy, of which the SMP is told nothing yet.

        So that it is never committed if training rolls back. None if there is no intact one.
        """
        copy, future = self._copy, self.future
        if copy is None or future is None:
            return self.copied
        started_s = time.monotonic()
        try:
            failed = future.exception(3 * patience_s(copy.nbytes)) is not None
        except TimeoutError:
            failed = True  # ``finish`` raises
        self.stall_s += time.monotonic() - started_s
        return None if failed or not copy.digests or copy.changed() else copy

    def finish(self) -> None:
        """Wait until the copy in flight is in the SMP, or was dropped because a tensor changed."""
        copy, future = self._copy, self.future
        if copy is None or future is None:
            return
        started_s = time.monotonic()
        try:
            content = future.result(3 * patience_s(copy.nbytes))
            changed = copy.changed()
            if changed:
                _record_torn(copy.step, changed)
                self._warn_torn(copy.step, changed)
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
        self._worker.shutdown(wait=False)
        self._forget_copied()

    def _forget_copied(self) -> None:
        """Let go of the SMP's memory, also where somebody still holds the copy."""
        if self.copied is not None:
            self.copied.room = None
        self.copied = None

    def replace_smp(self, error: ConnectionError) -> None:
        """Find or start another SMP in the place of one that was lost with ``error``."""
        events.record(
            EventKind.SMP_LOST, detector="socket", rung="rollback", detail={"error": str(error)}
        )
        self._reconnect()

    def reconnect(self) -> Future[None]:
        """Find or start an SMP in the background; no copy may be in flight."""
        return self._worker.submit(self._reconnect)

    def _reconnect(self) -> None:
        try:
            unsettled = self._session.reconnect()
        except (ConfigError, SnapshotMismatch) as error:
            # At the start these would be the user's to mend; now something has changed meanwhile.
            raise SmpUnavailable(f"the SMP cannot be replaced: {error}") from error
        if self._membership is not None:
            self._membership.rejoin(self._session)
        if unsettled is not None:
            self._session.skip_step(unsettled)

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

    def _digest(self, digests: DigestsOnly) -> Content | None:
        digests.fill()
        return None

    def _write(self, copy: Copy) -> Content | None:
        agreed = copy.agree(self._session)
        buffer = self._session.begin(copy.step, copy.nbytes) if agreed else None
        if buffer is None:  # the step is skipped
            copy.fill()
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

    def _warn_torn(self, step: int, path: str) -> None:
        if self._torn_said:
            return
        self._torn_said = True
        warnings.warn(
            f"{path} was changed while the snapshot of step {step} was copied, so that there is no "
            f"snapshot of this step, nor of others that this happens to: {_TORN_REMEDY}",
            stacklevel=4,
        )

    def report_divergence(self) -> None:
        """Record the steps whose replicas differed, as far as the SMP has answered."""
        found, self._session.diverged = self._session.diverged, {}
        self.diverged |= found.keys()
        if found and config.local_rank() == 0:
            for step, pairs in found.items():
                _record_diverged(step, pairs)


def _hangs(copy: Copy) -> SmpUnavailable:
    return SmpUnavailable(f"the copy of step {copy.step} does not end: see the SMP's log")


def _record_torn(step: int, path: str) -> None:
    detail = {"step": step, "path": path, "remedy": _TORN_REMEDY}
    events.record(EventKind.SNAPSHOT_TORN, detector="version counter", detail=detail)


def _record_diverged(step: int, pairs: list[tuple[int, ...]]) -> None:
    ranks = sorted({tuple(sorted(pair[:2])) for pair in pairs})
    remedy = "audit these ranks (Guard(audit=…)) to find the faulty device, and evict it"
    detail = {"step": step, "ranks": ranks, "blocks": len(pairs), "remedy": remedy}
    events.record(EventKind.REPLICA_DIVERGED, detector="digest", detail=detail)

"""The copy in flight: its content, and whether the model held still meanwhile."""

import time
from dataclasses import dataclass, field
from threading import Event

import torch

from holdfast import config, digest, events
from holdfast.events import EventKind
from holdfast.snapshot.client import shards
from holdfast.snapshot.client.session import Content, SmpSession
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.groups import Mode, Seat
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import Digests, Share
from holdfast.snapshot.protocol.parity_plan import ParityPlan
from holdfast.snapshot.protocol.steps import SEAL_PATIENCE_S

# Besides the thread that copies anyway; few saturate the memory.
_MOST_HELPERS = 3


@dataclass
class Copy:
    """One snapshot, whole, on its way from the model's tensors to the SMP's memory."""

    step: int
    flat: flat_buffer.Flat
    entries: list[Entry] = field(default_factory=list)
    cancelled: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self._versions = flat_buffer.versions(self.flat)
        self._helpers = 0
        self.entries = self._planned()

    def _planned(self) -> list[Entry]:
        return flat_buffer.plan(self.flat)

    @property
    def nbytes(self) -> int:
        """The size of the buffer that the copy fills, in bytes."""
        return flat_buffer.total_bytes(self.entries)

    def agree(self, session: SmpSession) -> bool:
        """Learn from other nodes what this copy needs; False: it is to be skipped."""
        return True

    def prioritize(self) -> None:
        """Let the threads of training help, which is held up from now on."""
        self._helpers = min(_MOST_HELPERS, torch.get_num_threads() - 1)

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` (uint8); return the description for the SMP.

        Raises:
            Cancelled: it was abandoned meanwhile.
        """
        cancelled, helpers = self.cancelled.is_set, lambda: self._helpers
        entries = flat_buffer.write(self.flat, self.entries, buffer, cancelled, helpers)
        blob = manifest.encode(self.flat.skeleton, entries)
        return Content(blob, manifest.digest_of(blob))

    def changed(self) -> str:
        """Return the path of a tensor that was changed in place since ``begin``; or nothing."""
        now = flat_buffer.versions(self.flat)
        pairs = zip(self.flat.paths, self._versions, now, strict=True)
        return next((path for path, before, after in pairs if before != after), "")


@dataclass
class ShardedCopy(Copy):
    """One rank's share of a state that several nodes divide, and the parities of others' shares.

    Where nodes hold different states it is that rank's part of its own state, and room for parities
    that the SMPs fill.
    """

    seat: Seat = field(kw_only=True)
    parities: int = field(kw_only=True)
    peers: tuple[int, ...] = field(kw_only=True)  # ranks, by node of the group

    def __post_init__(self) -> None:
        super().__post_init__()
        own = flat_buffer.stable_bytes(self.flat, self.entries)
        self._sizes = [own] * len(self.peers)
        self._patient_until_s = time.monotonic() + config.timeout_s()

    def _planned(self) -> list[Entry]:
        return shares.plan(self.flat)

    def agree(self, session: SmpSession) -> bool:
        """Learn how large the states are that are striped with this one."""
        if self.seat.group.mode is Mode.REPLICATED:
            return True
        own = self._sizes[self.seat.index]
        found = session.sizes(self.step, own, self.peers, self._patient)
        self._sizes = found or self._sizes
        return found is not None

    def prioritize(self) -> None:
        """Wait for other nodes a moment at most: training is held up from now on."""
        self._patient_until_s = min(self._patient_until_s, time.monotonic() + SEAL_PATIENCE_S)

    def _patient(self) -> bool:
        return not self.cancelled.is_set() and time.monotonic() < self._patient_until_s

    @property
    def share(self) -> Share:
        """The share of the state that is this rank's."""
        return Share.of(self.seat, self.parities, self._sizes)

    @property
    def nbytes(self) -> int:
        """The size of the buffer that the copy fills, in bytes."""
        return self.share.buffer_nbytes

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` with this rank's share, as ``Copy.write``."""
        share = self.share
        room = buffer[: share.buffer_nbytes]
        digests = shards.write(self.flat, self.entries, share, room, self.cancelled.is_set)
        blob = shares.describe(self.flat, self.entries, share, digests).encode()
        if not share.replicated:
            return Content(blob, manifest.digest_of(blob), plan=self._plan(share))
        claims, seen = self._claims(share, digests)
        return Content(blob, manifest.digest_of(blob), claims, seen)

    def _plan(self, share: Share) -> ParityPlan | None:
        if share.idle:
            return None
        return shards.plan_parities(share.striping, share.node, self.peers, shares.BUCKET_BYTES)

    def _claims(
        self, share: Share, digests: Digests
    ) -> tuple[list[str], list[tuple[int, int, str]]]:
        claims = [digest.hexdigest(digests.data.get(s, b"")) for s in range(share.nodes)]
        seen = [
            (self.peers[node], stripe, digest.hexdigest(source))
            for stripe, sources in digests.sources.items()
            for node, source in sources.items()
        ]
        return claims, seen


def record_torn(step: int, path: str) -> None:
    """Say in the ledger that a copy was dropped because the tensor at ``path`` had changed."""
    remedy = "call finish() before optimizer.step and change parameters nowhere else"
    detail = {"step": step, "path": path, "remedy": remedy}
    events.record(EventKind.SNAPSHOT_TORN, detector="version counter", detail=detail)


def record_diverged(step: int, pairs: list[tuple[int, ...]]) -> None:
    """Say in the ledger that replicas of a state were not the same bits, and whose."""
    ranks = sorted({tuple(sorted(pair[:2])) for pair in pairs})
    remedy = "audit these ranks (Guard(audit=…)) to find the faulty device, and evict it"
    detail = {"step": step, "ranks": ranks, "blocks": len(pairs), "remedy": remedy}
    events.record(EventKind.REPLICA_DIVERGED, detector="digest", detail=detail)

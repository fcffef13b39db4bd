"""The copy of one training state: whole, as a node's share of it, or its digests alone."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Event

import torch

from holdfast import config, digest
from holdfast.digest.tensors import tensor_digests
from holdfast.snapshot.client import shards
from holdfast.snapshot.client.device_copy import DeviceCopy
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.groups import Mode, Seat
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import Digests, Share
from holdfast.snapshot.node.session import Content, SmpSession
from holdfast.snapshot.protocol.steps import SEAL_PATIENCE_S

# The most threads that help the copying one; a few threads saturate the memory.
_MOST_HELPERS = 3


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
            From a device it is written when ``device.copied`` is set.
        versions: the version counters of the live tensors when the copy began.
        device: the part of the state that is on devices; None if there is none.
        damaged: the path of a tensor that the copy does not hold as the device did, or ``""``.
    """

    step: int
    flat: flat_buffer.Flat
    cancelled: Event = field(default_factory=Event)
    watched: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    room: torch.Tensor | None = None
    device: DeviceCopy | None = field(default=None, init=False)
    damaged: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._helpers = 0
        self._changed, self.may_have_changed = "", False
        self.entries = self._planned()
        self.nbytes = flat_buffer.total_bytes(self.entries)
        self._versions = flat_buffer.versions(self.flat)
        self.versions = [flat_buffer.live_version(self.flat, n) for n in range(len(self.entries))]

    def _planned(self) -> list[Entry]:
        return flat_buffer.plan(self.flat)

    def let_change(self, device: DeviceCopy) -> None:
        """Let the trainer's streams change the state once it is read; return at once.

        What was changed before this call tears the copy; what is changed after it does not, but the
        state cannot be copied again (``may_have_changed``).
        """
        self._changed, self.may_have_changed = self.changed(), True
        device.hold()

    def agree(self, session: SmpSession) -> bool:
        """Ask other nodes for what this copy needs; return false if the step is to be skipped."""
        return True

    def prioritize(self) -> None:
        """Copy with more threads, because training waits for this copy from now on."""
        self._helpers = min(_MOST_HELPERS, torch.get_num_threads() - 1)

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` (uint8) and return the manifest for the SMP."""
        if self.device is not None:
            entries = self._write_from(self.device, buffer)
        else:
            entries = self._write_host(self.flat, self.entries, buffer)
            self.digests, self.room = {n: entry.digest for n, entry in enumerate(entries)}, buffer
        blob = manifest.encode(self.flat.skeleton, entries)
        return Content(blob, manifest.digest_of(blob))

    def _write_host(
        self, flat: flat_buffer.Flat, entries: list[Entry], buffer: torch.Tensor
    ) -> list[Entry]:
        cancelled, helpers = self.cancelled.is_set, lambda: self._helpers
        return flat_buffer.write(flat, entries, buffer, cancelled, helpers)

    def _write_from(self, device: DeviceCopy, buffer: torch.Tensor) -> list[Entry]:
        """Let the devices copy while this thread copies what the host has; then compare."""
        try:
            device.start(self.entries, buffer, self.cancelled.is_set)
            host = sorted(set(range(len(self.entries))) - set(device.indices))
            flat = replace(self.flat, tensors=[self.flat.tensors[n] for n in host])
            found = self._write_host(flat, [self.entries[n] for n in host], buffer)
            device.queued.set()
            digests = device.digests() | {n: e.digest for n, e in zip(host, found, strict=True)}
            self.digests, self.room = digests, buffer
            device.digested.set()
            self.damaged = device.differing(self.entries, buffer, digests)
        finally:
            device.drain()
        return [entry._replace(digest=digests[n]) for n, entry in enumerate(self.entries)]

    def fill(self) -> None:
        """Compute the digests of the watched tensors, without a copy."""
        with self._ordered():
            found = tensor_digests([self.flat.tensors[n] for n in self.watched])
        self.digests = dict(zip(self.watched, found, strict=True))

    def _ordered(self) -> AbstractContextManager[object]:
        return nullcontext() if self.device is None else self.device.ordered()

    def stored(self, index: int) -> torch.Tensor | None:
        """Return the bytes that were copied of a tensor; None if memory has none that are intact.

        They are intact if they match the digest of the live tensor at the time of the copy.
        """
        entry = self.entries[index]
        raw = None if self.room is None else self.room[entry.offset : entry.offset + entry.nbytes]
        return raw if raw is not None and self._is_intact(index, raw) else None

    def _is_intact(self, index: int, raw: torch.Tensor) -> bool:
        return digest.hexdigest(raw.numpy()) == self.digests[index]

    def repaired(self, index: int) -> None:
        """Note that a live tensor was overwritten with what was copied of it."""
        self.versions[index] = self._versions[index] = flat_buffer.live_version(self.flat, index)

    def is_edited(self, index: int) -> bool:
        """Return whether the program changed a live tensor in place since the copy began."""
        return flat_buffer.live_version(self.flat, index) != self.versions[index]

    def changed(self) -> str:
        """Return the path of a tensor that has changed in place since the copy began, or ``""``."""
        if self.may_have_changed:
            return self._changed
        now = flat_buffer.versions(self.flat)
        pairs = zip(self.flat.paths, self._versions, now, strict=True)
        return next((path for path, before, after in pairs if before != after), "")


class DigestsOnly(Copy):
    """The digests of a state's watched tensors after a step of which there is no snapshot.

    Tensors that change meanwhile are not compared.
    """

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
        self.share_out([own] * len(self.peers))
        self.start_waiting()

    def start_waiting(self) -> None:
        """Wait for other ranks or nodes as long as they may take to answer, from now on."""
        self._patient_until_s = time.monotonic() + config.timeout_s()

    def _planned(self) -> list[Entry]:
        return shares.plan(self.flat)

    def share_out(self, sizes: list[int]) -> None:
        """Divide states of these sizes in bytes, one for each node of the group."""
        self.share = Share.of(self.seat, self.parities, sizes)
        self.nbytes = self.share.buffer_nbytes

    def agree(self, session: SmpSession) -> bool:
        """Ask for the sizes of the states that are striped with this one; as ``Copy.agree``."""
        if self.seat.group.mode is Mode.REPLICATED:
            return True
        own = self.share.sizes[self.seat.index]
        found = session.sizes(self.step, own, self.peers, self.is_patient)
        if found is not None:
            self.share_out(found)
        return found is not None

    def prioritize(self) -> None:
        """Wait for other nodes only a moment longer, because training waits from now on."""
        self.limit_patience(SEAL_PATIENCE_S)

    def limit_patience(self, seconds: float) -> None:
        """Wait for others only so many seconds longer."""
        self._patient_until_s = min(self._patient_until_s, time.monotonic() + seconds)

    def is_patient(self) -> bool:
        """Return whether to wait for others any longer."""
        return not self.cancelled.is_set() and time.monotonic() < self._patient_until_s

    def write(self, buffer: torch.Tensor) -> Content:
        """Fill ``buffer`` with this rank's share, as ``Copy.write``."""
        share = self.share
        room = buffer[: share.buffer_nbytes]
        with self._ordered():
            cancelled, compared = self.cancelled.is_set, self._compared()
            digests = shards.write(self.flat, self.entries, share, room, cancelled, compared)
        self.fill()
        blob = shares.describe(self.flat, self.entries, share, digests).encode()
        content = Content(blob, manifest.digest_of(blob), *self._claims(share, digests))
        if share.replicated or share.idle:
            return content
        plan = shards.plan_parities(share.striping, share.node, self.peers, shares.BUCKET_BYTES)
        return Content(content.manifest, content.digest, plan=plan)

    def _compared(self) -> int | None:
        return None  # parities compare all that they are computed from

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

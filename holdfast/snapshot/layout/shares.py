"""The share of its group's state that a rank keeps, and its description: digests, manifest.

Only the stable tensors of a state are divided among the nodes (parameters, optimizer state: the
same bits on every replica); the *private* ones (buffers, random numbers, loader …) may differ
between ranks and lie whole in the rank's manifest.

Every fragment is digested in buckets of ``BUCKET_BYTES``. A parity's keeper digests what it read,
too: if the owner of those bytes has other digests, the replicas have diverged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import torch

from holdfast import digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.layout import flat_buffer, manifest
from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast.snapshot.layout.groups import Mode, Seat
from holdfast.snapshot.layout.manifest import Entry, Manifest
from holdfast.snapshot.parity.stripes import Fragment, Span, Striping, portion

BUCKET_BYTES = 4 * 2**20
DIGEST_BYTES = 16
# Manifests travel as one message, and to other nodes.
PRIVATE_MAX_BYTES = 128 * 2**20
_NAMED = 3


@dataclass(frozen=True)
class Share:
    """The share that one rank keeps of its group's state, in plain numbers.

    Attributes:
        node, nodes: the rank's node in its sharding group, and how many there are.
        parities: nodes that may be lost, 1 or 2.
        part, parts: the slice of the state that this rank and those of the same ``part`` on the
            other nodes stripe among themselves. Ranks beyond ``parts`` are ``idle``.
        replicated: whether all nodes hold the same state, or each one of its own.
        sizes: bytes of the stable tensors (``layout.stable_bytes``) of each node.
    """

    node: int
    nodes: int
    parities: int
    part: int
    parts: int
    replicated: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, seat: Seat, parities: int, nbytes: int | Sequence[int]) -> "Share":
        """Return the share of the rank that sits there.

        Args:
            seat: its place in its sharding group (``groups.seat``).
            parities: 1 or 2.
            nbytes: size of the stable tensors; one a node where nodes hold different states.

        Raises:
            ConfigError: sizes that do not belong to these nodes.
        """
        group, nodes = seat.group, len(seat.group.nodes)
        replicated = group.mode is Mode.REPLICATED
        sizes = (nbytes,) * nodes if isinstance(nbytes, int) else tuple(nbytes)
        if len(sizes) != nodes or (replicated and len(set(sizes)) > 1):
            raise ConfigError(
                f"states of {list(sizes)} bytes for {nodes} nodes: one a node is needed, and "
                "replicas must all be of one size"
            )
        parts = min(map(len, group.members))
        return cls(seat.index, nodes, parities, seat.part, parts, replicated, sizes)

    @property
    def idle(self) -> bool:
        """Whether this rank keeps nothing striped, as another node has fewer ranks than this."""
        return self.part >= self.parts

    @cached_property
    def striping(self) -> Striping:
        """The layout of this part of the state.

        Raises:
            ConfigError: as ``Striping``.
        """
        part = min(self.part, self.parts - 1)
        sizes = [portion(size, part, self.parts).nbytes for size in self.sizes]
        if self.replicated:
            return Striping.of_replicas(self.nodes, sizes[0], self.parities)
        return Striping.of_shards(sizes, self.parities)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of memory that ``write`` fills."""
        return 0 if self.idle else self.striping.buffer_nbytes

    def slice_of(self, node: int) -> Span:
        """Return the slice of the state of ``node`` that this part stripes."""
        return portion(self.sizes[node], min(self.part, self.parts - 1), self.parts)

    def place(self, fragment: Fragment, bucket: int) -> Span:
        """Return the place of a bucket of a data block in the state of the fragment's node."""
        start = self.slice_of(fragment.node).start + self.striping.place(fragment).start
        return span_of(start, fragment.nbytes, bucket)


def span_of(start: int, nbytes: int, bucket: int) -> Span:
    """Return a bucket of ``nbytes`` bytes that begin at ``start``; empty beyond their end."""
    first = min(nbytes, bucket * BUCKET_BYTES)
    return Span(start + first, start + min(nbytes, first + BUCKET_BYTES))


def buckets_of(nbytes: int) -> int:
    """Return the number of buckets of a fragment."""
    return -(-nbytes // BUCKET_BYTES)


@dataclass(frozen=True)
class Digests:
    """The digest of each bucket of each fragment, 16 bytes each, joined; by stripe.

    Attributes:
        data: of the rank's own data blocks, as the state's tensors held them.
        parity: of the parities that it keeps.
        sources: of the data blocks that these were computed from, as its own tensors held them, by
            stripe and by the node that keeps them. Empty where nodes hold different states.
    """

    data: Mapping[int, bytes]
    parity: Mapping[int, bytes]
    sources: Mapping[int, Mapping[int, bytes]]


def digest_at(digests: bytes, bucket: int) -> bytes:
    """Return the digest of one bucket."""
    return digests[bucket * DIGEST_BYTES : (bucket + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class ShareManifest:
    """A rank's description of its share of a step: enough, with buffers, to restore the rank.

    Attributes:
        manifest: the state without its tensors; the entries of stable ones have places in the
            group's state, those of private ones follow.
        private: the bytes of the private tensors, which begin where ``private_start`` says.
        share, digests: what its buffer holds.
    """

    manifest: Manifest
    private: bytes
    share: Share
    digests: Digests

    @property
    def private_start(self) -> int:
        """The offset of the first byte of ``private``."""
        return flat_buffer.aligned(self.share.sizes[self.share.node])

    def encode(self) -> bytes:
        """Return the manifest as bytes, to be guarded by ``manifest.digest_of``."""
        digests = tuple(dict(part) for part in vars(self.digests).values())
        attachment = (self.private, astuple(self.share), digests)
        return manifest.encode(self.manifest.skeleton, self.manifest.entries, attachment)

    @classmethod
    def decode(cls, blob: bytes, digest: str, *, opaque: bool = False) -> "ShareManifest":
        """Return the manifest, if its bytes match ``digest``; ``opaque`` as in ``manifest.decode``.

        Raises:
            SnapshotCorrupt: they do not, or it is no manifest of a share.
        """
        described = manifest.decode(blob, digest, opaque=opaque)
        attachment: Any = described.attachment
        try:
            private, share, digests = attachment
            return cls(described, private, Share(*share), Digests(*digests))
        except (TypeError, ValueError) as error:
            raise SnapshotCorrupt(
                f"a manifest of {len(blob)} bytes describes no share of a state: {error}"
            ) from error


def plan(flat: Flat) -> list[Entry]:
    """Give every tensor its place: the stable ones in the group's state, the others after them.

    Raises:
        ConfigError: the private tensors are larger than 128 MiB; names the largest.
    """
    entries = flat_buffer.plan(flat, stable_first=True)
    private = [e for e, stable in zip(entries, flat.stable, strict=True) if not stable]
    nbytes = sum(entry.nbytes for entry in private)
    if nbytes > PRIVATE_MAX_BYTES:
        largest = sorted(private, key=lambda entry: -entry.nbytes)[:_NAMED]
        names = ", ".join(f"{entry.path} ({entry.nbytes / 2**20:.1f} MiB)" for entry in largest)
        raise ConfigError(
            f"{nbytes / 2**20:.1f} MiB of the state are neither parameters nor optimizer state, "
            f"and lie whole in each rank's manifest, which takes {PRIVATE_MAX_BYTES / 2**20:g} "
            f"MiB: {names}; make large buffers parameters with requires_grad=False, or "
            "persistent=False"
        )
    return entries


def describe(flat: Flat, entries: list[Entry], share: Share, digests: Digests) -> ShareManifest:
    """Return the manifest of a share that was written, with the private tensors as they are now."""
    start = flat_buffer.aligned(share.sizes[share.node])
    private = torch.zeros(max(0, flat_buffer.total_bytes(entries) - start), dtype=torch.uint8)
    moved = [index for index, stable in enumerate(flat.stable) if not stable]
    tensors = [flat.tensors[index] for index in moved]
    written = list(entries)
    found = flat_buffer.copy_tensors(tensors, [entries[index] for index in moved], private, start)
    for index, entry in zip(moved, found, strict=True):
        written[index] = entry
    content = Manifest(flat.skeleton, tuple(written))
    return ShareManifest(content, private.numpy().tobytes(), share, digests)


def paths_at(entries: Iterable[Entry], span: Span) -> str:
    """Return the paths of the tensors that lie there, at most three of them by name."""
    there = (e for e in entries if e.nbytes and e.offset < span.stop)
    paths = [entry.path for entry in there if entry.offset + entry.nbytes > span.start]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return (", ".join(paths[:_NAMED]) or "no tensor") + more


def damage_in(described: ShareManifest, buffer: torch.Tensor) -> str:
    """Describe the first fragment of a rank that does not match its digests; or nothing."""
    share = described.share
    known = {**described.digests.data, **described.digests.parity}
    for stripe, digests in () if share.idle else known.items():
        fragment = share.striping.fragment(stripe, share.node)
        for bucket in range(buckets_of(fragment.nbytes)):
            span = span_of(fragment.offset, fragment.nbytes, bucket)
            held = buffer[span.start : span.stop].numpy().data
            if digest.digest(held) != digest_at(digests, bucket):
                return f"stripe {stripe}, bucket {bucket} does not match its digest"
    return ""

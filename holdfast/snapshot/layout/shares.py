"""The share of its group's state that a rank keeps, and its description: digests and manifest.

Only the stable tensors of a state are divided among the nodes: parameters and optimizer state,
which have the same bits on every replica. The *private* tensors (buffers, random numbers, the
loader's state …) may differ between ranks, and the rank's manifest holds all of them. Each bucket
of ``BUCKET_BYTES`` of a fragment has a digest; a node that computes a parity digests the blocks
that it reads, too: if their owner has other digests, the replicas have diverged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import chain
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
# A manifest is sent as one message, also to other nodes.
PRIVATE_MAX_BYTES = 128 * 2**20
_NAMED = 3


@dataclass(frozen=True)
class Share:
    """The share that one rank keeps of its group's state, in plain numbers.

    Attributes:
        node, nodes: the index of the rank's node in its sharding group, and the number of nodes.
        parities: the number of nodes that may be lost, 1 or 2; 0 if the ranks of one node divide
            the state, each of which counts as a node then.
        part, parts: the ranks with the same ``part`` on all nodes stripe one slice of the state, of
            which there are ``parts``. Ranks with a larger ``part`` are ``idle``.
        replicated: true if all nodes hold the same state, false if each has its own.
        sizes: the size of the stable tensors of each node, in bytes.
        ranks: without parities, the local ranks that divide the state.
    """

    node: int
    nodes: int
    parities: int
    part: int
    parts: int
    replicated: bool
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, seat: Seat, parities: int, nbytes: int | Sequence[int]) -> "Share":
        """Return the share of the rank with this seat.

        ``nbytes`` is the size of the stable tensors; a sequence, by node, if the nodes hold
        different states. Too few of them, or different ones of replicas, raise ConfigError.
        """
        group, nodes = seat.group, len(seat.group.nodes)
        replicated = group.mode is Mode.REPLICATED
        sizes = (nbytes,) * nodes if isinstance(nbytes, int) else tuple(nbytes)
        if len(sizes) != nodes or (replicated and len(set(sizes)) > 1):
            raise ConfigError(
                f"states of {list(sizes)} bytes for {nodes} nodes: each node needs one, and "
                "replicas must all be of one size"
            )
        parts = min(map(len, group.members))
        ranks = () if parities else tuple(chain.from_iterable(group.members))
        return cls(seat.index, nodes, parities, seat.part, parts, replicated, sizes, ranks)

    @property
    def own_nbytes(self) -> int:
        """The size of the stable tensors of this rank's node, in bytes."""
        return self.sizes[self.node]

    @property
    def idle(self) -> bool:
        """True if this rank keeps nothing, because another node has fewer ranks than this one."""
        return self.part >= self.parts

    @cached_property
    def striping(self) -> Striping:
        """The layout of this part of the state."""
        sizes = [self.slice_of(node).nbytes for node in range(self.nodes)]
        if self.replicated:
            return Striping.of_replicas(self.nodes, sizes[0], self.parities)
        return Striping.of_shards(sizes, self.parities)

    @property
    def buffer_nbytes(self) -> int:
        """The bytes of memory that ``shards.write`` fills."""
        return 0 if self.idle else self.striping.buffer_nbytes

    def slice_of(self, node: int) -> Span:
        """Return the slice of the state of ``node`` that this part stripes."""
        return portion(self.sizes[node], min(self.part, self.parts - 1), self.parts)

    def place(self, fragment: Fragment, bucket: int) -> Span:
        """Return the place of a bucket of a data block in the state of the fragment's node."""
        start = self.slice_of(fragment.node).start + self.striping.place(fragment).start
        return span_of(start, fragment.nbytes, bucket)


def span_of(start: int, nbytes: int, bucket: int) -> Span:
    """Return a bucket of the ``nbytes`` bytes that begin at ``start``, empty beyond their end."""
    first = min(nbytes, bucket * BUCKET_BYTES)
    return Span(start + first, start + min(nbytes, first + BUCKET_BYTES))


def buckets_of(nbytes: int) -> int:
    """Return the number of buckets of a fragment."""
    return -(-nbytes // BUCKET_BYTES)


@dataclass(frozen=True)
class Digests:
    """The digests of all buckets of fragments, 16 bytes each, joined; by stripe.

    Attributes:
        data: digests of the rank's own data blocks, computed from the state's tensors.
        parity: digests of the parities that it keeps.
        sources: by stripe and node, digests of the data blocks from which these parities were
            computed, as this rank's own tensors held them; without parities, of the blocks of
            another rank. Empty if the nodes hold different states.
    """

    data: Mapping[int, bytes]
    parity: Mapping[int, bytes]
    sources: Mapping[int, Mapping[int, bytes]]


def digest_at(digests: bytes, bucket: int) -> bytes:
    """Return the digest of one bucket from the joined digests of its fragment."""
    return digests[bucket * DIGEST_BYTES : (bucket + 1) * DIGEST_BYTES]


@dataclass(frozen=True)
class ShareManifest:
    """A rank's description of its share of a step, which with the buffers is enough to restore it.

    In ``manifest`` the offsets of stable tensors are places in the group's state; those of private
    tensors follow, whose bytes are in ``private``. ``digests`` are those of the rank's buffer.
    """

    manifest: Manifest
    private: bytes
    share: Share
    digests: Digests

    @property
    def private_start(self) -> int:
        """The offset of the first byte of ``private``."""
        return flat_buffer.aligned(self.share.own_nbytes)

    def encode(self) -> bytes:
        """Return the manifest as bytes."""
        digests = tuple(dict(part) for part in vars(self.digests).values())
        attachment = (self.private, astuple(self.share), digests)
        return manifest.encode(self.manifest.skeleton, self.manifest.entries, attachment)

    @classmethod
    def decode(cls, blob: bytes, digest: str, *, opaque: bool = False) -> "ShareManifest":
        """Return the manifest, as ``manifest.decode``."""
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
    """Assign every tensor its place: stable ones in the group's state, the others after them.

    Raises:
        ConfigError: the private tensors are larger than 128 MiB; names the largest.
    """
    entries = flat_buffer.plan(flat, stable_first=True)
    private = [e for e, stable in zip(entries, flat.stable, strict=True) if not stable]
    nbytes = sum(entry.nbytes for entry in private)
    if nbytes <= PRIVATE_MAX_BYTES:
        return entries
    largest = sorted(private, key=lambda entry: -entry.nbytes)[:_NAMED]
    names = ", ".join(f"{entry.path} ({entry.nbytes / 2**20:.1f} MiB)" for entry in largest)
    extra = any(entry.path.startswith("extra.") for entry in largest)
    remedy = (
        "give further optimizers in the list Snapshots(model, [first, second]), further modules in "
        "Snapshots([model, ema], …), and keep other large tensors out of extra"
        if extra
        else "make large buffers parameters with requires_grad=False, or persistent=False"
    )
    raise ConfigError(
        f"{nbytes / 2**20:.1f} MiB of the state are neither parameters nor optimizer state, and "
        f"are stored in each rank's manifest, which takes {PRIVATE_MAX_BYTES / 2**20:g} MiB: "
        f"{names}; {remedy}"
    )


def describe(flat: Flat, entries: list[Entry], share: Share, digests: Digests) -> ShareManifest:
    """Return the manifest of a share that was written, with the private tensors as they are now."""
    start = flat_buffer.aligned(share.own_nbytes)
    private = torch.zeros(max(0, flat_buffer.total_bytes(entries) - start), dtype=torch.uint8)
    moved = [index for index, stable in enumerate(flat.stable) if not stable]
    tensors = [flat.tensors[index] for index in moved]
    found = flat_buffer.copy_tensors(tensors, [entries[index] for index in moved], private, start)
    written = dict(enumerate(entries)) | dict(zip(moved, found, strict=True))
    content = Manifest(flat.skeleton, tuple(written.values()))
    return ShareManifest(content, private.numpy().tobytes(), share, digests)


def paths_at(entries: Iterable[Entry], span: Span) -> str:
    """Return the paths of the tensors in a span of the state, at most three of them by name."""
    there = (e for e in entries if e.nbytes and e.offset < span.stop)
    paths = [entry.path for entry in there if entry.offset + entry.nbytes > span.start]
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return (", ".join(paths[:_NAMED]) or "no tensor") + more


def damage_in(described: ShareManifest, buffer: torch.Tensor) -> str:
    """Describe the first fragment of a rank that does not match its digests; empty if all match."""
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

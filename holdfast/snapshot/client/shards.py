"""Copying a rank's share of a state: its shard, and the parities that it computes.

Nothing goes over the network while replicas save: a node computes its parities from its own copy of
what the others keep. Each byte is read once, in chunks that stay in a core's cache while they are
digested, copied or encoded.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from holdfast import digest
from holdfast.digest import Hasher
from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.flat_buffer import Cancelled, Flat
from holdfast.snapshot.layout.gather import Live
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import Digests, Share, buckets_of, span_of
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Encoding, Fragment, Striping
from holdfast.snapshot.protocol.parity_plan import BlockTransfer, ParityPlan, ParityRange

# A chunk of each source and of the parity fit into the second-level cache of a core.
CHUNK_BYTES = 512 * 2**10
_LAYOUTS = 8


def write(
    flat: Flat,
    entries: list[Entry],
    share: Share,
    buffer: torch.Tensor,
    cancelled: Callable[[], bool],
) -> Digests:
    """Fill ``buffer`` with this rank's shard, its parities, and zeros where neither reaches.

    Needs ``data_blocks`` times 512 KiB of memory besides; holds no lock of Python's for long. Where
    nodes hold different states the parities are left zero, for others' blocks to be added
    (``parity.accumulate``).

    Args:
        flat: the state; only its stable tensors are read.
        entries: where they lie (``shares.plan``).
        share: what of it is this rank's; an idle one keeps nothing.
        buffer: uint8 on CPU, ``share.buffer_nbytes`` bytes.
        cancelled: asked before each bucket.

    Raises:
        Cancelled: ``cancelled()`` became true.
        ValueError: the buffer, or the state, is not of the size that the share says.
    """
    found, said = flat_buffer.stable_bytes(flat, entries), share.sizes[share.node]
    if buffer.numel() != share.buffer_nbytes or found != said:
        raise ValueError(
            f"a buffer of {buffer.numel()} bytes for {share.buffer_nbytes}, a state of {found} "
            f"for {said}: plan, share and buffer must be of one state"
        )
    if share.idle:
        return Digests({}, {}, {})
    return _Writer(Live(flat, entries), share, buffer, cancelled).write()


@lru_cache(maxsize=_LAYOUTS)
def plan_parities(
    striping: Striping, node: int, peers: tuple[int, ...], bucket_nbytes: int
) -> ParityPlan:
    """Return one node's parity plan, where nodes hold different states.

    Args:
        striping: the layout.
        node: which of its nodes.
        peers: the rank that keeps the part of each node.
        bucket_nbytes: as in ``ParityPlan``.

    **Guarantees**: when all nodes' transfers are added to cleared ranges, these hold the parities
    that ``erasure_code.encode`` gives, up to their ``nbytes``.

    Raises:
        ConfigError: a second parity needs ISA-L, which is not installed.
    """
    rows = [erasure_code.encoding_row(n, striping.data_blocks) for n in range(striping.parities)]
    transfers = []
    for stripe in range(striping.nodes):
        block = striping.fragment(stripe, node)
        if block.role >= striping.data_blocks or not block.nbytes:
            continue
        for number, row in enumerate(rows):
            keeper = (stripe + number) % striping.nodes
            there, factor = striping.fragment(stripe, keeper).offset, row[block.role]
            size = block.offset, block.nbytes
            transfers.append(BlockTransfer(*size, peers[keeper], there, factor))
    kept = striping.encodings(node)
    return ParityPlan(
        transfers=tuple(transfers),
        ranges=tuple(ParityRange(c.target.stripe, c.target.offset, c.target.nbytes) for c in kept),
        due_nbytes=sum(source.nbytes for coding in kept for source in coding.sources),
        bucket_nbytes=bucket_nbytes,
    )


class _Writer:
    def __init__(
        self, live: Live, share: Share, buffer: torch.Tensor, cancelled: Callable[[], bool]
    ) -> None:
        self._live, self._share = live, share
        self._striping, self._cancelled = share.striping, cancelled
        self._buffer: Bytes = buffer.numpy()
        shape = self._striping.data_blocks, CHUNK_BYTES
        self._scratch = torch.empty(shape, dtype=torch.uint8, pin_memory=live.on_device).numpy()

    def write(self) -> Digests:
        node, striping = self._share.node, self._striping
        codings = striping.encodings(node)
        kept = {coding.target.stripe for coding in codings}
        blocks = [striping.fragment(s, node) for s in range(striping.nodes) if s not in kept]
        data = {block.stripe: self._copy(block) for block in blocks}
        if not striping.replicated:
            for coding in codings:
                self._clear(coding.target, 0)
            return Digests(data, {}, {})
        found = {c.target.stripe: self._encode(number, c) for number, c in enumerate(codings)}
        parities = {stripe: digests for stripe, (digests, _) in found.items()}
        return Digests(data, parities, {stripe: read for stripe, (_, read) in found.items()})

    def _copy(self, block: Fragment) -> bytes:
        start, digests = self._share.place(block, 0).start, []
        for bucket in self._buckets(block):
            hasher = digest.Hasher()
            for first, last in _chunks(block, bucket):
                target = self._buffer[block.offset + first : block.offset + last]
                room = self._scratch[0][: last - first] if self._live.on_device else target
                self._live.copy(start + first, start + last, target, room, hasher)
            digests.append(hasher.digest())
        self._clear(block, block.nbytes)
        return b"".join(digests)

    def _encode(self, number: int, coding: Encoding) -> tuple[bytes, dict[int, bytes]]:
        digests: list[bytes] = []
        seen: dict[int, bytes] = {source.node: b"" for source in coding.sources}
        for bucket in self._buckets(coding.target):
            hashers = [digest.Hasher() for _ in coding.sources]
            digests.append(self._encode_bucket(number, coding, bucket, hashers))
            for source, hasher in zip(coding.sources, hashers, strict=True):
                if bucket < buckets_of(source.nbytes):
                    seen[source.node] += hasher.digest()
        self._clear(coding.target, coding.target.nbytes)
        return b"".join(digests), seen

    def _encode_bucket(
        self, number: int, coding: Encoding, bucket: int, hashers: list[Hasher]
    ) -> bytes:
        target, hasher = coding.target, digest.Hasher()
        for first, last in _chunks(target, bucket):
            out = self._buffer[target.offset + first : target.offset + last]
            rows = zip(coding.sources, self._scratch, hashers, strict=True)
            blocks = [self._read(source, first, last, *row) for source, *row in rows]
            erasure_code.encode(number, out, blocks)
            hasher.update(out)
        return hasher.digest()

    def _read(self, source: Fragment, first: int, last: int, room: Bytes, hasher: Hasher) -> Bytes:
        last = min(last, source.nbytes)
        if first >= last:
            return room[:0]
        start = self._share.place(source, 0).start
        return self._live.read(start + first, start + last, room[: last - first], hasher)

    def _buckets(self, fragment: Fragment) -> Iterator[int]:
        for bucket in range(buckets_of(fragment.nbytes)):
            if self._cancelled():
                where = f"stripe {fragment.stripe}, bucket {bucket}"
                raise Cancelled(f"the copy was abandoned at {where}")
            yield bucket

    def _clear(self, fragment: Fragment, start: int) -> None:
        end = fragment.offset + self._striping.block_nbytes
        self._buffer[fragment.offset + start : end] = 0


def _chunks(fragment: Fragment, bucket: int) -> Iterator[tuple[int, int]]:
    columns = span_of(0, fragment.nbytes, bucket)
    for first in range(columns.start, columns.stop, CHUNK_BYTES):
        yield first, min(columns.stop, first + CHUNK_BYTES)

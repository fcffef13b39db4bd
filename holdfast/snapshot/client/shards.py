"""Copying a rank's share of a state: its shard, and the parities that it computes.

If nodes hold replicas of one state, saving sends no data over the network: each node computes its
parities from its own replica of the blocks that the other nodes keep. Each byte is read once, in
chunks that stay in a core's cache while they are digested, copied or encoded.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from holdfast import digest
from holdfast.digest import Hasher
from holdfast.digest.tensors import tensor_bytes
from holdfast.snapshot.layout import flat_buffer, shares
from holdfast.snapshot.layout.flat_buffer import Cancelled, Flat
from holdfast.snapshot.layout.manifest import Entry
from holdfast.snapshot.layout.shares import Digests, Share, buckets_of, span_of
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Encoding, Fragment, Striping
from holdfast.snapshot.protocol.parity_stream import BlockTransfer, ParityPlan, ParityRange

# A chunk of each source and one of the parity fit into the second-level cache of a core.
CHUNK_BYTES = 512 * 2**10
_LAYOUTS = 8


def write(
    flat: Flat,
    entries: list[Entry],
    share: Share,
    buffer: torch.Tensor,
    cancelled: Callable[[], bool],
    compared: int | None = None,
) -> Digests:
    """Fill ``buffer`` with this rank's shard, its parities, and zeros where neither reaches.

    Only the stable tensors are read. If the nodes hold different states the parities are left zero,
    for the SMPs to add up. An idle rank keeps nothing. ``entries`` are those of ``shares.plan``.
    ``cancelled`` is called before each bucket; the copy stops with ``Cancelled`` if it returns
    true. The blocks of the node ``compared`` are digested as well, as one's own tensors hold them.
    """
    found, said = flat_buffer.stable_bytes(flat, entries), share.own_nbytes
    if buffer.numel() != share.buffer_nbytes or found != said:
        raise ValueError(
            f"a buffer of {buffer.numel()} bytes for {share.buffer_nbytes}, a state of {found} "
            f"for {said}: plan, share and buffer must be of one state"
        )
    if share.idle:
        return Digests({}, {}, {})
    return _Writer(Live(flat, entries), share, buffer, cancelled).write(compared)


@lru_cache(maxsize=_LAYOUTS)
def plan_parities(
    striping: Striping, node: int, peers: tuple[int, ...], bucket_nbytes: int
) -> ParityPlan:
    """Return one node's parity plan, for nodes that hold different states.

    When all nodes' transfers are added to cleared ranges, these hold the parities of
    ``erasure_code.encode``. ``peers`` are the ranks that keep the part of each node.
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


class Live:
    """The stable tensors of a state by their places in its plan, with zeros between them.

    Bytes within one contiguous CPU tensor are read in place. Others pass through memory of the
    caller: several small tensors in one piece, strided tensors, tensors on other devices.
    """

    def __init__(self, flat: Flat, entries: Sequence[Entry]) -> None:
        rows = zip(entries, flat.tensors, flat.stable, strict=True)
        placed = [(entry, tensor) for entry, tensor, stable in rows if stable and entry.nbytes]
        placed.sort(key=lambda pair: pair[0].offset)
        self._starts = [entry.offset for entry, _ in placed]
        self._stops = [entry.offset + entry.nbytes for entry, _ in placed]
        self._tensors = [tensor for _, tensor in placed]
        self._bytes: list[Bytes | None] = [
            np.asarray(tensor_bytes(tensor)) if flat_buffer.in_place(tensor) else None
            for tensor in self._tensors
        ]
        self.in_place = all(data is not None for data in self._bytes)
        # Copies from a device are faster into pinned memory.
        self.on_device = any(tensor.is_cuda for tensor in self._tensors)

    def read(self, start: int, stop: int, scratch: Bytes, hasher: Hasher) -> Bytes:
        """Return bytes ``start`` … ``stop`` - 1, in place if possible, else from ``scratch``.

        ``hasher`` digests them at their source, which makes an error of the copy detectable.
        ``start`` and ``stop`` are multiples of 64, except at a state's end.
        """
        index, direct = self._placed(start, stop)
        if direct is None:
            return self._gathered(index, start, stop, scratch, hasher)
        hasher.update(direct)
        return direct

    def copy(self, start: int, stop: int, target: Bytes, scratch: Bytes, hasher: Hasher) -> None:
        """Copy bytes to ``target``, in one pass if they can be read in place; else as ``read``."""
        index, direct = self._placed(start, stop)
        if direct is not None:
            hasher.copy(direct, target)
            return
        found = self._gathered(index, start, stop, scratch, hasher)
        if found is not target:
            # torch's copy_ would start a second team of OpenMP threads, which slows down kernels of
            # the training thread.
            np.copyto(target, found)

    def digest(self, start: int, stop: int, hasher: Hasher) -> None:
        """Add bytes ``start`` … ``stop`` - 1 to a digest, where all tensors are read in place."""
        index, end = max(0, bisect_right(self._starts, start) - 1), start
        while index < len(self._starts) and self._starts[index] < stop:
            base, data = self._starts[index], self._bytes[index]
            first, last = max(start, base), min(stop, self._stops[index])
            if first < last and data is not None:
                hasher.update(bytes(first - end))
                hasher.update(data[first - base : last - base])
                end = last
            index += 1
        hasher.update(bytes(stop - end))

    def _placed(self, start: int, stop: int) -> tuple[int, Bytes | None]:
        """Return the index of the tensor at ``start``, and the bytes if it has all of them."""
        index = max(0, bisect_right(self._starts, start) - 1)
        direct = self._bytes[index] if self._bytes else None
        if direct is None or not self._starts[index] <= start <= stop <= self._stops[index]:
            return index, None
        base = self._starts[index]
        return index, direct[start - base : stop - base]

    def _gathered(self, index: int, start: int, stop: int, out: Bytes, hasher: Hasher) -> Bytes:
        end = start
        while index < len(self._starts) and self._starts[index] < stop:
            first, last = max(start, self._starts[index]), min(stop, self._stops[index])
            if first < last:
                _zero(out[end - start : first - start], hasher)
                self._copy(index, first, last, out[first - start : last - start], hasher)
                end = last
            index += 1
        _zero(out[end - start :], hasher)
        return out

    def _copy(self, index: int, first: int, last: int, out: Bytes, hasher: Hasher) -> None:
        base, direct = self._starts[index], self._bytes[index]
        if direct is not None:
            hasher.copy(direct[first - base : last - base], out)
            return
        tensor = self._tensors[index]
        size = tensor.element_size()
        target = torch.from_numpy(out).view(tensor.dtype)
        copy_elements(tensor, (first - base) // size, (last - base) // size, target)
        hasher.update(out)


def _zero(out: Bytes, hasher: Hasher) -> None:
    if len(out):
        out[:] = 0
        hasher.update(out)


def copy_elements(tensor: torch.Tensor, first: int, last: int, out: torch.Tensor) -> None:
    """Copy elements ``first`` … ``last`` - 1, in C order, to ``out``; allocates nothing on CPU."""
    if tensor.is_contiguous():
        out.copy_(tensor.reshape(-1)[first:last])
        return
    inner = tensor[0].numel()
    row = first // inner
    if head := min(-first % inner, last - first):
        copy_elements(tensor[row], first - row * inner, first - row * inner + head, out[:head])
        first, row = first + head, row + 1
    whole = (last - first) // inner
    if whole:
        block = tensor[row : row + whole]
        out[head : head + whole * inner].view(block.shape).copy_(block)
    if tail := last - first - whole * inner:
        copy_elements(tensor[row + whole], 0, tail, out[head + whole * inner :])


class _Writer:
    def __init__(
        self, live: Live, share: Share, buffer: torch.Tensor, cancelled: Callable[[], bool]
    ) -> None:
        self._live, self._share = live, share
        self._striping, self._cancelled = share.striping, cancelled
        self._buffer: Bytes = buffer.numpy()
        # Copies from a device take long to begin.
        self._chunk_bytes = shares.BUCKET_BYTES if live.on_device else CHUNK_BYTES
        sources = self._striping.data_blocks if self._striping.parities else 1
        shape = sources, self._chunk_bytes
        self._scratch = torch.empty(shape, dtype=torch.uint8, pin_memory=live.on_device).numpy()

    def write(self, compared: int | None) -> Digests:
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
        sources = {stripe: read for stripe, (_, read) in found.items()}
        if compared is not None:
            others = (striping.fragment(s, compared) for s in range(striping.nodes))
            sources = {b.stripe: {compared: self._digested(b)} for b in others if b.nbytes}
        return Digests(data, parities, sources)

    def _digested(self, block: Fragment) -> bytes:
        start, digests = self._share.place(block, 0).start, []
        for bucket in self._buckets(block):
            hasher = digest.Hasher()
            columns = span_of(start, block.nbytes, bucket)
            if self._live.in_place:
                self._live.digest(columns.start, columns.stop, hasher)
            else:
                for first, last in self._chunks(block, bucket):
                    self._read(block, first, last, self._scratch[0], hasher)
            digests.append(hasher.digest())
        return b"".join(digests)

    def _copy(self, block: Fragment) -> bytes:
        start, digests = self._share.place(block, 0).start, []
        for bucket in self._buckets(block):
            # Each call may wait for Python's lock, so that one copies as much as it can.
            hasher, columns = digest.Hasher(), span_of(0, block.nbytes, bucket)
            first, last = columns.start, columns.stop
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
        for first, last in self._chunks(target, bucket):
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

    def _chunks(self, fragment: Fragment, bucket: int) -> Iterator[tuple[int, int]]:
        columns = span_of(0, fragment.nbytes, bucket)
        for first in range(columns.start, columns.stop, self._chunk_bytes):
            yield first, min(columns.stop, first + self._chunk_bytes)

"""A sharding group in the memory of one process, and what befalls it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from holdfast.digest import digest
from holdfast.digest.tensors import state_digest
from holdfast.snapshot.client import shards
from holdfast.snapshot.layout import flat_buffer, manifest, shares
from holdfast.snapshot.layout.groups import Mode, Seat, ShardingGroup
from holdfast.snapshot.layout.shares import Share, ShareManifest
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.restore.assembly import Part

POISON = 0xAB
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        return raw[..., 0] > 127
    return raw.view(dtype).reshape(shape)


@dataclass(frozen=True)
class Spec:
    """How to make a tensor, again and again the same."""

    dtype: torch.dtype
    shape: list[int]
    kind: str
    seed: int

    def make(self) -> torch.Tensor:
        tensor = random_tensor(self.dtype, [*self.shape, 3], self.seed)
        if self.kind == "strided":
            return tensor[..., ::2].transpose(0, -1)
        if self.kind == "scalar":
            return tensor.reshape(-1)[0] if tensor.numel() else tensor
        if self.kind == "single":
            return tensor.reshape(-1)[::2][:1]
        if self.kind == "conjugated" and self.dtype.is_complex:
            return tensor.conj()
        if self.kind == "expanded":
            return tensor[..., :1].expand(tensor.shape)
        return tensor


specs = st.builds(
    Spec,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 7), max_size=3),
    st.sampled_from(
        ["plain", "plain", "plain", "strided", "scalar", "single", "conjugated", "expanded"]
    ),
    st.integers(0, 2**31),
)
states = st.lists(specs, max_size=6)


def stable_of(state: list[Spec]) -> dict[str, Any]:
    """A state of these tensors, the first of them tied."""
    tensors = {f"t{number}": spec.make() for number, spec in enumerate(state)}
    return {"tensors": tensors, "tied": [*tensors.values()][:1], "step": 7}


@contextmanager
def small_buckets() -> Iterator[None]:
    """Buckets and chunks so small that little states have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "BUCKET_BYTES", 256)
        patch.setattr(shards, "CHUNK_BYTES", 128)
        yield


def never() -> bool:
    return False


def flat_of(stable: object, private: object = None) -> flat_buffer.Flat:
    """A state of which everything under ``stable`` counts as parameters or optimizer state."""

    def hold(paths: list[str], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(paths, tensors, strict=True)
        return [t if path.startswith("stable") else t.clone() for path, t in pairs]

    return flat_buffer.flatten({"private": private, "stable": stable}, hold)


@dataclass
class Saved:
    """What one rank wrote."""

    described: ShareManifest
    buffer: torch.Tensor


def save(flat: flat_buffer.Flat, share: Share) -> Saved:
    entries = shares.plan(flat)
    buffer = torch.full((share.buffer_nbytes,), POISON, dtype=torch.uint8)
    digests = shards.write(flat, entries, share, buffer, never)
    blob = shares.describe(flat, entries, share, digests).encode()
    described = ShareManifest.decode(blob, manifest.digest_of(blob))
    return Saved(described, buffer)


@dataclass
class Memories:
    """The buffers of one part by node; those of ``dead`` nodes cannot be read.

    ``reads_left``: of a node, how many reads it answers before it dies.
    """

    buffers: dict[int, torch.Tensor]
    reads_left: dict[int, int] = field(default_factory=dict)
    reads: list[tuple[int, int]] = field(default_factory=list)
    locks: dict[int, Lock] = field(default_factory=dict)

    def read(self, node: int, offset: int, out: memoryview) -> None:
        lock = self.locks.setdefault(node, Lock())
        assert lock.acquire(blocking=False), "two readers of one node"
        try:
            self.reads.append((node, offset))
            left = self.reads_left.get(node, 2**60)
            if node not in self.buffers or not left:
                raise ConnectionError(f"node {node} does not answer")
            self.reads_left[node] = left - 1
            np.copyto(np.asarray(out), self.buffers[node][offset : offset + len(out)].numpy())
        finally:
            lock.release()


@dataclass
class Group:
    """All parts of a state that ``nodes`` nodes hold replicas of."""

    saved: dict[tuple[int, int], Saved]  # part, node
    nodes: int
    parts: int

    def parts_left(self, lost: tuple[int, ...] = ()) -> list[Part]:
        return [self.part_left(part, lost) for part in range(self.parts)]

    def part_left(self, part: int, lost: tuple[int, ...] = ()) -> Part:
        shares_of = {node: self.saved[part, node].described for node in range(self.nodes)}
        alive = [node for node in range(self.nodes) if node not in lost]
        return Part(shares_of, Memories({n: self.saved[part, n].buffer for n in alive}))

    def alive(self, lost: tuple[int, ...] = ()) -> list[list[int]]:
        return [[node for node in range(self.nodes) if node not in lost]] * self.parts


def seat_of(nodes: int, parts: int, node: int, part: int, mode: Mode = Mode.REPLICATED) -> Seat:
    members = tuple(tuple(range(n * parts, (n + 1) * parts)) for n in range(nodes))
    return Seat(ShardingGroup(mode, tuple(range(nodes)), members), node, part, parts)


def replicas(states: list[flat_buffer.Flat], parities: int, parts: int) -> Group:
    """What the ranks of all nodes write; ``states[node]`` are replicas in memory of their own."""
    nodes, saved = len(states), {}
    for node, flat in enumerate(states):
        nbytes = flat_buffer.stable_bytes(flat, shares.plan(flat))
        for part in range(parts):
            share = Share.of(seat_of(nodes, parts, node, part), parities, nbytes)
            saved[part, node] = save(flat, share)
    return Group(saved, nodes, parts)


def reduced(states: list[flat_buffer.Flat], parities: int, parts: int = 1) -> Group:
    """States of their own: each node writes its blocks, others add them to the parities."""
    nodes, saved = len(states), {}
    sizes = [flat_buffer.stable_bytes(flat, shares.plan(flat)) for flat in states]
    for node, flat in enumerate(states):
        for part in range(parts):
            share = Share.of(seat_of(nodes, parts, node, part, Mode.REDUCED), parities, sizes)
            saved[part, node] = save(flat, share)
    for (part, node), held in saved.items():
        _add_parities(held, {n: saved[part, n] for n in range(nodes)}, node)
    return Group(saved, nodes, parts)


def parity_digests(share: Share, buffer: torch.Tensor) -> dict[int, bytes]:
    """The digests of the parities in a buffer, where blocks of other nodes were added to them."""
    found = {}
    for coding in share.striping.encodings(share.node):
        target = coding.target
        held = buffer[target.offset : target.offset + target.nbytes].numpy().data
        count = shares.buckets_of(target.nbytes)
        spans = (shares.span_of(0, target.nbytes, bucket) for bucket in range(count))
        joined = b"".join(digest(held[span.start : span.stop]) for span in spans)
        found[target.stripe] = joined
    return found


def _add_parities(held: Saved, group: dict[int, Saved], node: int) -> None:
    striping = held.described.share.striping
    for number, coding in enumerate(striping.encodings(node)):
        target = coding.target
        out = held.buffer[target.offset : target.offset + target.nbytes].numpy()
        row = erasure_code.encoding_row(number, striping.data_blocks)
        for source, coefficient in zip(coding.sources, row, strict=True):
            block = group[source.node].buffer[source.offset : source.offset + source.nbytes]
            erasure_code.accumulate(out, block.numpy(), coefficient)
    added = parity_digests(held.described.share, held.buffer)
    digests = replace(held.described.digests, parity=added)
    held.described = replace(held.described, digests=digests)


def tree_digest(stable: object, private: object = None) -> str:
    return state_digest({"private": private, "stable": stable})

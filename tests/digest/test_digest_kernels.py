"""The digest: one value from every kernel, in any pieces; and every change changes it."""

import random
from collections.abc import Callable, Iterable
from itertools import combinations, pairwise

import numpy as np
import pytest
from case_loops import for_each
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast import digest
from holdfast.digest import reference

_digest = pytest.importorskip("holdfast._digest", reason="needs the native core")

Bytes = NDArray[np.uint8]
BLOCK = reference.BLOCK
SIZES = [0, 1, 7, 8, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 100_001]


def drawn(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def digest_with(kernels: str, pieces: Iterable[Bytes]) -> bytes:
    hasher = _digest.Hasher(kernels)
    for piece in pieces:
        hasher.update(piece)
    return bytes(hasher.digest())


@for_each("kernels", _digest.kernels())
@for_each("nbytes", SIZES)
def test_every_kernel_finds_the_digest_of_the_reference(kernels: str, nbytes: int) -> None:
    data, hasher = drawn(nbytes), reference.Hasher()
    hasher.update(data)
    assert digest_with(kernels, [data]) == hasher.digest()


def test_the_digest_of_these_bytes_never_changes() -> None:
    # Snapshots on disk are compared with it.
    data = np.arange(10_000, dtype=np.uint32).view(np.uint8)
    assert digest.hexdigest(data) == "05be9d8777e1e888a770d65f0e49873e"
    assert digest.hexdigest(b"") == "792359f1f54f4cf2ea2eaba4f166a09c"


@given(st.lists(st.integers(0, 3 * BLOCK), max_size=8), st.sampled_from(_digest.kernels()))
def test_pieces_do_not_matter(sizes: list[int], kernels: str) -> None:
    data = drawn(sum(sizes))
    ends = np.cumsum([0, *sizes])
    pieces = [data[start:end] for start, end in pairwise(ends)]
    assert digest_with(kernels, pieces) == digest.digest(data)
    plain = reference.Hasher()
    for piece in pieces:
        plain.update(piece)
    assert plain.digest() == digest.digest(data)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 70), st.integers(0, 70), st.data())
def test_a_copy_is_digested_in_the_same_pass(
    nbytes: int, from_offset: int, to_offset: int, data: st.DataObject
) -> None:
    hasher = data.draw(
        st.sampled_from([*map(_digest.Hasher, _digest.kernels()), reference.Hasher()])
    )
    source = drawn(from_offset + nbytes)[from_offset:]
    room = np.full(to_offset + nbytes + 100, 0xAB, np.uint8)
    hasher.copy(source, room[to_offset : to_offset + nbytes])
    assert np.array_equal(room[to_offset : to_offset + nbytes], source)
    assert (room[:to_offset] == 0xAB).all()
    assert (room[to_offset + nbytes :] == 0xAB).all()
    assert hasher.digest() == digest.digest(source)


@for_each("fill", [0, 0xFF, 0x55])
def test_constant_data_of_every_length_differ(fill: int) -> None:
    found = {digest.digest(np.full(nbytes, fill, np.uint8)) for nbytes in range(2 * BLOCK + 2)}
    assert len(found) == 2 * BLOCK + 2


@for_each("data", [drawn(BLOCK + 200), np.zeros(BLOCK + 200, np.uint8)])
def test_every_single_flip_is_seen(data: Bytes) -> None:
    found = {digest.digest(data)}
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            found.add(digest.digest(data))
            data[place] ^= 1 << bit
    assert len(found) == 8 * len(data) + 1


def test_every_pair_of_flips_in_a_few_words_is_seen() -> None:
    # Of one column of a lane, of neighbours and of other blocks: what a sum might cancel.
    data = drawn(3 * BLOCK)
    places = [0, 3, 4, 8, 64, 128, BLOCK, BLOCK + 64, 2 * BLOCK + 8]
    bits = [(place, bit) for place in places for bit in range(8)]
    found = {digest.digest(data)}
    for pair in combinations(bits, 2):
        for place, bit in pair:
            data[place] ^= 1 << bit
        found.add(digest.digest(data))
        for place, bit in pair:
            data[place] ^= 1 << bit
    assert len(found) == 1 + len(bits) * (len(bits) - 1) // 2


@for_each("size", [4, 8, 64, BLOCK])
def test_moved_pieces_are_seen(size: int) -> None:
    data = drawn(8 * BLOCK)
    whole, count = digest.digest(data), len(data) // size
    pieces = data.reshape(count, size)
    assert digest.digest(np.ascontiguousarray(pieces[::-1])) != whole
    assert digest.digest(np.roll(pieces, 1, axis=0)) != whole
    random.seed(size)
    for _ in range(500):
        one, other = random.sample(range(count), 2)
        moved = pieces.copy()
        moved[[one, other]] = moved[[other, one]]
        assert digest.digest(moved) != whole, (one, other)


def test_a_halved_digest_is_spread_over_all_values() -> None:
    # 20,000 digests of data that differ in a counter: none of their bits is biased, and none of
    # their first 32 bits meet more often than chance has it (0.05 pairs on average).
    counters = np.arange(20_000, dtype=np.uint32)
    rows = np.array([np.frombuffer(digest.digest(c.tobytes()), np.uint8) for c in counters])
    ones = np.unpackbits(rows, axis=1).mean(axis=0)
    assert abs(ones - 0.5).max() < 5 * 0.5 / len(counters) ** 0.5
    for start in range(0, 16, 4):
        assert len({row.tobytes() for row in rows[:, start : start + 4]}) >= len(counters) - 4


@for_each("copy_each", [_digest.copy_each, reference.copy_each])
def test_many_copies_are_one_call(copy_each: Callable[..., bytes]) -> None:
    sources = [drawn(nbytes, seed) for seed, nbytes in enumerate(SIZES)]
    targets = [np.zeros_like(source) for source in sources]
    pairs = zip(sources, targets, strict=True)
    rows = [(source.ctypes.data, target.ctypes.data, len(source)) for source, target in pairs]
    found = copy_each(np.array(rows, np.int64))
    assert found == b"".join(map(digest.digest, sources))
    assert all(map(np.array_equal, sources, targets))


def test_what_does_not_fit_is_refused_and_nothing_written() -> None:
    target = np.zeros(8, np.uint8)
    for hasher in (_digest.Hasher, reference.Hasher):
        with pytest.raises(ValueError, match="source has 8 bytes, target has 4"):
            hasher().copy(np.ones(8, np.uint8), target[:4])
    target.flags.writeable = False
    with pytest.raises((ValueError, TypeError, BufferError)):
        digest.Hasher().copy(np.ones(8, np.uint8), target)
    assert not target.any()
    with pytest.raises(ValueError, match="contiguous"):
        digest.digest(np.zeros(8, np.uint8)[::2])
    with pytest.raises(ValueError, match="no kernels sse9"):
        _digest.Hasher("sse9")

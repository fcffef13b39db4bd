"""The digest in NumPy, for tests of the compiled kernels and where these were not built."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRIPE, LANES, BLOCK = 64, 8, 4096
FIRST_STEP, SECOND_STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_MASK = 2**64 - 1
_BLOCKS_AT_ONCE = 1024

signed_sums: Any = None  # holdfast.collectives.sums computes them in torch
Words = NDArray[np.uint64]


def mixed(x: Words) -> Words:
    """Apply the finalizer of MurmurHash3, elementwise."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def _drawn() -> NDArray[np.uint32]:
    counted = np.arange(1, 16 * (BLOCK // STRIPE + 1) + 1, dtype=np.uint64)
    return (mixed(counted * np.uint64(FIRST_STEP)) >> np.uint64(32)).astype(np.uint32)


KEYS = _drawn()


def _sums(words: NDArray[np.uint32], first_key: int) -> Words:
    """Sum the keyed products of blocks [blocks, stripes, 2 * LANES] over the stripes."""
    stripes = words.shape[1]
    keys = KEYS[first_key : first_key + stripes * 2 * LANES].reshape(stripes, 2 * LANES)
    pairs = (words + keys).astype(np.uint64)
    summed: Words = (pairs[..., ::2] * pairs[..., 1::2]).sum(axis=1, dtype=np.uint64)
    return summed


class Hasher:
    """The same digest as ``holdfast._digest.Hasher``, in NumPy."""

    def __init__(self) -> None:
        self._first = self._second = np.zeros(1, np.uint64)
        self._blocks = 0
        self._rest = b""

    def update(self, data: Any) -> None:
        """Add the bytes of a contiguous buffer to the digest."""
        found = np.frombuffer(self._rest + bytes(data), np.uint8)
        whole = len(found) // BLOCK * BLOCK
        for start in range(0, whole, _BLOCKS_AT_ONCE * BLOCK):
            part = found[start : min(whole, start + _BLOCKS_AT_ONCE * BLOCK)]
            self._take(part.reshape(-1, BLOCK))
        self._rest = found[whole:].tobytes()

    def copy(self, source: Any, target: Any) -> None:
        """Add a contiguous buffer to the digest, and copy it to another of the same size."""
        if memoryview(source).nbytes != memoryview(target).nbytes:
            sizes = memoryview(source).nbytes, memoryview(target).nbytes
            raise ValueError(f"source has {sizes[0]} bytes, target has {sizes[1]}")
        self.update(source)
        memoryview(target).cast("B")[:] = memoryview(source).cast("B")

    def _take(self, blocks: NDArray[np.uint8]) -> None:
        words = np.ascontiguousarray(blocks).view("<u4").reshape(len(blocks), -1, 2 * LANES)
        first = self._blocks * LANES + 1
        counted = np.arange(first, first + len(blocks) * LANES, dtype=np.uint64)
        places = counted.reshape(len(blocks), LANES)
        mixes = (
            mixed(_sums(words, 0) + places * np.uint64(FIRST_STEP)),
            mixed(_sums(words, 2 * LANES) + places * np.uint64(SECOND_STEP)),
        )
        self._first = self._first + mixes[0].sum(dtype=np.uint64)
        self._second = self._second + mixes[1].sum(dtype=np.uint64)
        self._blocks += len(blocks)

    def digest(self) -> bytes:
        """Return the 16-byte digest of all bytes added so far."""
        last = Hasher()
        last._first, last._second, last._blocks = self._first, self._second, self._blocks
        if self._rest:
            padded = self._rest + bytes(-len(self._rest) % STRIPE)
            last._take(np.frombuffer(padded, np.uint8).reshape(1, -1))
        return finished(
            int(last._first[0]), int(last._second[0]), self._blocks * BLOCK + len(self._rest)
        )


def copy_each(rows: NDArray[np.int64]) -> bytes:
    """Copy rows of (source, target, bytes) addresses; return their digests, 16 bytes each."""
    found = b""
    for source, target, nbytes in rows.tolist():
        hasher = Hasher()
        hasher.copy(ctypes.string_at(source, nbytes), (ctypes.c_char * nbytes).from_address(target))
        found += hasher.digest()
    return found


def finished(first: int, second: int, nbytes: int) -> bytes:
    """Compute the digest from the two sums over all blocks of ``nbytes`` bytes."""
    ends = first + (nbytes + 1) * SECOND_STEP, second + (nbytes + 1) * FIRST_STEP
    return mixed(np.array([end & _MASK for end in ends], np.uint64)).astype("<u8").tobytes()

"""Slot memory in memfds, so that nothing is left in /dev/shm after a crash.

The first access to a page costs about twenty times a later one, so all pages of a buffer are
touched when it is allocated. The kernel kills a process when memory runs out, so the available
memory is checked first.
"""

import fcntl
import mmap
import os

from holdfast import digest
from holdfast.memory import available_bytes

_RESERVE_BYTES = 64 * 2**20


digest_of = digest.digest  # of a bucket of a parity


class NotEnoughMemory(Exception):
    """The buffer would not fit; the message states the bytes needed and available, and a remedy."""


class SlotMemory:
    """The memfd of every (rank, slot); a closed one is freed once clients unmap it."""

    def __init__(self) -> None:
        self._fds: dict[tuple[int, int], int] = {}
        self._maps: dict[tuple[int, int], mmap.mmap] = {}

    def allocate(self, rank: int, slot: int, nbytes: int) -> None:
        """Replace the slot's memory by ``nbytes`` fresh zero bytes, all of them touched."""
        self.free(rank, slot)
        room = available_bytes() - _RESERVE_BYTES
        advice = "lower keep, shrink the state or give the node more memory"
        if nbytes > room:
            raise NotEnoughMemory(
                f"a snapshot slot needs {nbytes} bytes and {max(0, room)} are available on this "
                f"node: {advice}"
            )
        fd = -1
        try:
            fd = os.memfd_create(f"holdfast-{rank}-{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, nbytes)
            # fallocate reserves the pages; MAP_POPULATE touches them, which fills them with zeros.
            mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE).close()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except (OSError, MemoryError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            reason = getattr(error, "strerror", None) or repr(error)
            raise NotEnoughMemory(
                f"allocating {nbytes} bytes failed ({reason}), {room} looked available: {advice}"
            ) from error
        self._fds[rank, slot] = fd

    def open(self, rank: int, slot: int, *, writable: bool) -> int:
        """Return a new descriptor of the slot's memory, which the caller closes."""
        fd = self._fds[rank, slot]
        return os.dup(fd) if writable else os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)

    def view(self, rank: int, slot: int) -> memoryview:
        """Return the slot's bytes as read-only memory."""
        return self.writable(rank, slot).toreadonly()

    def writable(self, rank: int, slot: int) -> memoryview:
        """Return the slot's bytes as writable memory."""
        if (rank, slot) not in self._maps:
            self._maps[rank, slot] = mmap.mmap(self._fds[rank, slot], 0, mmap.MAP_SHARED)
        return memoryview(self._maps[rank, slot])

    def free(self, rank: int, slot: int) -> None:
        """Free the slot's memory, if it has any."""
        # The mapping is not closed, because memory that is being sent may still refer to it.
        self._maps.pop((rank, slot), None)
        if (fd := self._fds.pop((rank, slot), None)) is not None:
            os.close(fd)

    def set_aside(self) -> None:
        """Change the number of every rank r to -1 - r; free the memory that had such a number."""
        for key in [key for key in self._fds if key[0] < 0]:
            self.free(*key)
        self._maps = {(-1 - rank, slot): held for (rank, slot), held in self._maps.items()}
        self._fds = {(-1 - rank, slot): fd for (rank, slot), fd in self._fds.items()}

    def close(self) -> None:
        """Free the memory of all slots."""
        for key in list(self._fds):
            self.free(*key)


def accumulate(target: memoryview, source: bytes, coefficient: int) -> None:
    """Add coefficient · source to target in GF(2⁸); both have the same length."""
    # Imported here, because most SMPs never need NumPy and start faster without it.
    import numpy as np

    from holdfast.snapshot.parity import erasure_code

    added = np.frombuffer(source, np.uint8)
    erasure_code.accumulate(np.frombuffer(target, np.uint8), added, coefficient)

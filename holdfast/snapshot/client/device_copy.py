"""The part of a state that is on devices: copied behind the optimizer's step, and compared.

Digests are computed on the device before the copy and on the host after it. If they differ, the
copy is not what the device held: its bytes changed on the way, or something that the copy does not
wait for wrote the tensor meanwhile.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from threading import Event

import torch

from holdfast import config
from holdfast.digest import hexdigest
from holdfast.digest.tensors import raw_bytes
from holdfast.snapshot.client.device_queue import CudaQueue, Mark
from holdfast.snapshot.layout.flat_buffer import Cancelled, batches
from holdfast.snapshot.layout.manifest import Entry

# What the trainer itself copies waits for one chunk at most.
CHUNK_BYTES = 64 * 2**20
# Smaller tensors are put together on the device and copied as one piece, of 32 MiB or less.
GATHERED_BYTES = 4 * 2**20
_MOST_THREADS = 8


class DeviceCopy:
    """The device's part of one copy. It is made in the trainer's thread, when the copy begins.

    Attributes:
        indices: the tensors on devices, by their places in the state.
        queued: is set once the trainer may go on, if its streams wait for the copy (``hold``).
        digested: is set once the digests are known.
        copied: is set once the bytes are on the host, and compared.
    """

    def __init__(self, queue: CudaQueue, tensors: Sequence[torch.Tensor]) -> None:
        self.indices = [n for n, tensor in enumerate(tensors) if queue.serves(tensor)]
        self.queued, self.digested, self.copied = Event(), Event(), Event()
        self._queue, self._tensors = queue, tensors
        self._begun = queue.mark([tensors[n] for n in self.indices])
        self._end: Mark = ()
        self._digests: list[tuple[Mark, list[int], Callable[[], list[bytes]]]] = []
        self._pieces: list[tuple[Mark, list[int]]] = []

    def ended(self, _: object) -> None:
        """Let nobody wait any more, because the copy has ended or failed."""
        for event in (self.queued, self.digested, self.copied):
            event.set()

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Wait until the state may be read, and read it in the copy streams."""
        self._queue.wait(self._begun)
        with self._queue.following(self._begun):
            yield

    def hold(self) -> None:
        """Let the trainer's current streams wait until the state is read; return at once."""
        self._queue.hold(self._end)

    def start(
        self, entries: Sequence[Entry], buffer: torch.Tensor, cancelled: Callable[[], bool]
    ) -> None:
        """Queue the digests, and then the copies to ``buffer`` (uint8); wait for neither."""
        queue = self._queue
        self._digests.clear()
        self._pieces.clear()
        with queue.following(self._begun):
            for _, held in groupby(self.indices, lambda n: entries[n].device):
                of = list(held)
                found = queue.digests([self._tensors[n] for n in of])
                self._digests.append((queue.marked(), of, found))
            for piece in self._cut(entries):
                if cancelled():
                    raise Cancelled(f"the copy was abandoned at {entries[piece[0]].path}")
                start, last = entries[piece[0]].offset, entries[piece[-1]]
                places = [(self._tensors[n], entries[n].offset - start) for n in piece]
                queue.run(partial(_copy, places, buffer[start : last.offset + last.nbytes]))
                self._end = queue.marked()
                self._pieces.append((self._end, piece))

    def _cut(self, entries: Sequence[Entry]) -> Iterator[list[int]]:
        """Yield the tensors that are copied together: a large one, or small neighbours."""

        def kind(index: int) -> tuple[bool, str]:
            return entries[index].nbytes < GATHERED_BYTES, entries[index].device

        placed = sorted(self.indices, key=lambda n: entries[n].offset)
        for (small, _), held in groupby(placed, kind):
            of = list(held)
            each = map(slice, range(len(of)), range(1, len(of) + 1))
            yield from (of[cut] for cut in (batches([entries[n] for n in of]) if small else each))

    def digests(self) -> dict[int, str]:
        """Wait until the devices have computed the digests, and return them by index."""
        known: dict[int, str] = {}
        for mark, of, found in self._digests:
            self._queue.wait(mark)
            known |= zip(of, map(bytes.hex, found()), strict=True)
        return known

    def differing(
        self, entries: Sequence[Entry], buffer: torch.Tensor, digests: dict[int, str]
    ) -> str:
        """Wait for the copies; return the path of one that has another digest, or ``""``."""

        def differs(index: int) -> bool:
            place = entries[index].offset, entries[index].offset + entries[index].nbytes
            return hexdigest(buffer[slice(*place)].numpy()) != digests[index]

        checks: list[tuple[int, Future[bool]]] = []
        with ThreadPoolExecutor(_threads(), "holdfast-snapshot-digest") as pool:
            for mark, piece in self._pieces:
                self._queue.wait(mark)
                checks += [(index, pool.submit(differs, index)) for index in piece]
        return next((entries[index].path for index, check in checks if check.result()), "")

    def drain(self) -> None:
        """Wait until nothing is copied any more, also after an error."""
        with suppress(RuntimeError):  # of the device, which the copy has raised
            self._queue.wait(self._queue.marked())


def _copy(places: Sequence[tuple[torch.Tensor, int]], target: torch.Tensor) -> None:
    """Copy one tensor, or small ones by way of one piece of device memory, without waiting."""
    parts = [raw_bytes(tensor) for tensor, _ in places]
    source = parts[0]
    if len(parts) > 1:
        source = torch.zeros(len(target), dtype=torch.uint8, device=source.device)
        rooms = [source[at : at + len(part)] for (_, at), part in zip(places, parts, strict=True)]
        torch._foreach_copy_(rooms, parts)
    for to, piece in zip(target.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True):
        to.copy_(piece, non_blocking=True)


def _threads() -> int:
    """Return how many threads digest on the host: of the cores that each rank of the node has."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // config.local_world_size()))

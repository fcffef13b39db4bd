"""The part of a state that is on devices: copied behind the optimizer's step, and compared.

A device works late, each *stream* in its own order; a *mark* (CUDA events) lets a stream wait for
what others were given before. The trainer's streams change the state, one copy stream reads it::

    trainer's stream   … optimizer step N | mark | forward, backward | wait | optimizer step N + 1
    copy stream                           wait | digests, copies | mark

Digests are computed on the device before the copy and on the host after it. If they differ, the
copy is not what the device held: its bytes changed on the way, or something that the copy does not
wait for wrote the tensor meanwhile.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from threading import Event
from typing import Any

import torch

from holdfast import config
from holdfast.digest import hexdigest
from holdfast.digest.tensors import is_on_device, raw_bytes
from holdfast.snapshot.layout.flat_buffer import Cancelled, batches
from holdfast.snapshot.layout.manifest import Entry

# What the trainer itself copies waits for one chunk at most.
CHUNK_BYTES = 64 * 2**20
# Smaller tensors are put together on the device and copied as one piece, of 32 MiB or less.
GATHERED_BYTES = 4 * 2**20
_MOST_THREADS = 8
_PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all devices
Mark = Sequence[Any]
_logger = logging.getLogger("holdfast.snapshot")


class CudaQueue:
    """The CUDA streams of this process, with one copy stream for each device.

    **Guarantees**: a copy reads what the work left that was queued before its mark, in the streams
    that were current then, in the default streams, and in those in which an optimizer of torch has
    stepped since the mark before. **Not covered**: writes in other streams that none of these waits
    for, which the digests show unless they lie wholly before or after the copy of their tensor.

    Memory is registered with the driver (``cudaHostRegister``), so that copies run beside other
    work. If that fails it is logged once, and copies take longer.
    """

    def __init__(self) -> None:
        self._copying: dict[torch.device, torch.cuda.Stream] = {}
        self._stepped: defaultdict[torch.device, set[torch.cuda.Stream]] = defaultdict(set)
        self._registered: dict[int, torch.Tensor] = {}
        self._refused: set[int] = set()

    def serves(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a device whose work has to be ordered."""
        return is_on_device(tensor)

    def mark(self, tensors: Sequence[torch.Tensor]) -> Mark:
        """Mark what the trainer's streams were given, before these tensors are read."""
        streams: set[torch.cuda.Stream] = set()
        for device in {tensor.device for tensor in tensors}:
            if device not in self._copying:
                self._copying[device] = torch.cuda.Stream(device)
            streams |= {torch.cuda.current_stream(device), torch.cuda.default_stream(device)}
            streams |= self._stepped.pop(device, set())
        return _recorded(streams)

    def note_streams(self) -> None:
        """Note that an optimizer steps in the current streams."""
        for device in self._copying:
            self._stepped[device].add(torch.cuda.current_stream(device))

    def hold(self, mark: Mark) -> None:
        """Let the current streams wait for a mark, unless it is reached; return at once."""
        # While a graph is captured nothing runs, and events of other streams are forbidden.
        if self._copying and not torch.cuda.is_current_stream_capturing():
            for event in (each for each in mark if not each.query()):
                for device in self._copying:
                    torch.cuda.current_stream(device).wait_event(event)

    @contextmanager
    def following(self, mark: Mark) -> Iterator[None]:
        """Enter the copy streams, which wait for a mark first."""
        with ExitStack() as stack:
            for stream in self._copying.values():
                for event in mark:
                    stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def run(self, action: Callable[[], object]) -> None:
        """Queue an action in the copy streams."""
        action()

    def digests(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        """Queue the digests of tensors of one device; what is returned gives them once waited."""
        # Not at the top: processes without a device do without Triton.
        from holdfast.digest import cuda

        return cuda.queued(tensors)

    def marked(self) -> Mark:
        """Mark what the copy streams were given."""
        return _recorded(self._copying.values())

    def wait(self, mark: Mark) -> None:
        """Wait, in the calling thread, until a mark is reached."""
        for event in mark:
            event.synchronize()

    def register(self, slots: Sequence[torch.Tensor]) -> None:
        """Register memory to copy to (uint8 on CPU) with the driver, and unregister all other."""
        present = {slot.data_ptr(): slot for slot in slots}
        for address in self._registered.keys() - present.keys():
            torch.cuda.cudart().cudaHostUnregister(address)
            del self._registered[address]
        for address in present.keys() - self._registered.keys() - self._refused:
            slot = present[address]
            code = int(torch.cuda.cudart().cudaHostRegister(address, slot.nbytes, _PORTABLE))
            if code:
                self._say_refused(address, slot.nbytes, code)
            else:
                self._registered[address] = slot  # which keeps it mapped until it is unregistered

    def _say_refused(self, address: int, nbytes: int, code: int) -> None:
        if not self._refused:
            _logger.warning(
                "%d bytes of a snapshot's memory could not be registered with the CUDA driver "
                "(error %d), so that copies from the device are slower: see `ulimit -l`",
                *(nbytes, code),
            )
        self._refused.add(address)
        with suppress(RuntimeError):
            # The driver keeps the error for this thread's next kernel, which is this one.
            torch.ones(1, device=next(iter(self._copying)))


def _recorded(streams: Iterable[torch.cuda.Stream]) -> Mark:
    marks = []
    for stream in streams:
        marks.append(torch.cuda.Event(blocking=True))  # a thread that waits for it sleeps
        marks[-1].record(stream)
    return marks


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
        # Of the cores that each rank of the node has.
        cores = len(os.sched_getaffinity(0)) // config.local_world_size()
        threads = max(1, min(_MOST_THREADS, cores))
        with ThreadPoolExecutor(threads, "holdfast-snapshot-digest") as pool:
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

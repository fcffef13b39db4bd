"""The order of work on devices: what a snapshot's copy waits for, and what waits for the copy.

A device works late, each *stream* in its own order; a *mark* (CUDA events) lets a stream wait for
what others were given before. The trainer's streams change the state, one copy stream reads it::

    trainer's stream   … optimizer step N | mark | forward, backward | wait | optimizer step N + 1
    copy stream                           wait | digests, copies | mark
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from holdfast.digest.tensors import is_on_device

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

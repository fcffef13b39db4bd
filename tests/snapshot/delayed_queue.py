"""A device that is not there: it works late, in any order that its streams and marks allow."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Event, Thread
from typing import Any

import torch

from holdfast.digest import digest
from holdfast.digest.tensors import tensor_bytes
from holdfast.snapshot.client.device_copy import CudaQueue, Mark

PATIENCE_S = 20.0
TRAINER, COPY = "trainer", "copy"


class DelayedQueue(CudaQueue):
    """Two streams over CPU tensors, which a thread works through once it is let go.

    Args:
        first: the stream that the device prefers, wherever its next action need not wait.
        marks: False leaves out the mark behind which a copy begins.
        holds: False lets the trainer's stream run ahead of the copy.
    """

    def __init__(self, first: str, *, marks: bool = True, holds: bool = True) -> None:
        super().__init__()
        self.begun = Event()  # is set once a copy is queued completely
        self.before_copy: Callable[[], object] = lambda: None
        self._marks, self._holds = marks, holds
        # Events are waited for, and everything else is called.
        self._streams: dict[str, list[Any]] = {first: [], TRAINER: [], COPY: []}
        self._changed = Condition()
        self._going = self._ended = False
        self._error: RuntimeError | None = None
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def go(self) -> None:
        """Let the device work through all that it has been given and is given later."""
        with self._changed:
            self._going = True
            self._changed.notify_all()

    def stand_still(self) -> None:
        """Do nothing more until ``go``; what is given meanwhile is queued."""
        with self._changed:
            self._going = False

    def close(self) -> None:
        with self._changed:
            self._going = self._ended = True
            self._changed.notify_all()
        self._thread.join(PATIENCE_S)

    def compute(self, action: Callable[[], object]) -> None:
        """Queue work of the trainer."""
        self._give(TRAINER, action)

    def synchronize(self) -> None:
        """Wait for all that was queued."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not any(self._streams.values()), PATIENCE_S)
        assert idle, self._streams

    def serves(self, tensor: torch.Tensor) -> bool:
        return True

    def mark(self, tensors: Sequence[torch.Tensor]) -> Mark:
        self.begun.clear()
        return self._mark(TRAINER) if self._marks else []

    def hold(self, mark: Mark) -> None:
        if self._holds:
            self._give(TRAINER, *mark)

    @contextmanager
    def following(self, mark: Mark) -> Iterator[None]:
        self._give(COPY, *mark)
        yield
        self.begun.set()

    def run(self, action: Callable[[], object]) -> None:
        self._give(COPY, self.before_copy, action)

    def digests(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[bytes]]:
        found: list[bytes] = []
        for tensor in tensors:
            self._give(COPY, lambda one=tensor: found.append(digest(tensor_bytes(one))))
        return lambda: found

    def marked(self) -> Mark:
        return self._mark(COPY)

    def wait(self, mark: Mark) -> None:
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._error or all(event.is_set() for event in mark), PATIENCE_S
            )
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert reached, "the device was not let go"

    def register(self, slots: Sequence[torch.Tensor]) -> None:
        pass

    def _mark(self, stream: str) -> Mark:
        event = Event()
        self._give(stream, event.set)
        return [event]

    def _give(self, stream: str, *actions: object) -> None:
        with self._changed:
            self._streams[stream] += actions
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._going and (self._next() or self._ended))
                if self._ended:
                    return
                stream = self._next()
                assert stream is not None
            if not isinstance(stream[0], Event):
                try:
                    stream[0]()
                except RuntimeError as error:  # whoever waits for the device learns of it
                    self._error = error
            with self._changed:
                stream.pop(0)
                self._changed.notify_all()

    def _next(self) -> list[Any] | None:
        """The stream whose next action the device takes: it waits for nothing, or no longer."""
        for stream in self._streams.values():
            if stream and (not isinstance(stream[0], Event) or stream[0].is_set()):
                return stream
        return None

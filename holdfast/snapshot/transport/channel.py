"""A connection as the SMP sees it, which never blocks, whatever the other side does."""

import os
import select
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from holdfast.snapshot.transport import frames

Buffer = bytes | memoryview


class Channel:
    """The frames that came in over one connection, and those that still have to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.decoder = frames.Decoder(max_blob_bytes=0)
        self.queued_bytes = 0
        self.outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()

    def queue(
        self, header: Mapping[str, object], blob: Buffer = b"", fds: Sequence[int] = ()
    ) -> None:
        """Add a frame to those to be sent; its ``fds`` are closed after that."""
        for part in (frames.encode_header(header, len(blob), len(fds)), blob):
            if len(part):
                self.outgoing.append((memoryview(part), fds))
                self.queued_bytes += len(part)
            fds = ()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while self.outgoing:
            data, fds = self.outgoing[0]
            try:
                sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            except BlockingIOError:
                return
            _close_all(fds)
            self.queued_bytes -= sent
            self.outgoing.popleft()
            if rest := data[sent:]:
                self.outgoing.appendleft((rest, ()))

    def drain(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, if the other side reads."""
        with suppress(OSError):
            self.flush()
            while self.outgoing and (left_s := deadline - time.monotonic()) > 0:
                select.select([], [self.socket], [], left_s)
                self.flush()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wait until this open connection can be read, or written if needed."""
        if self.socket.fileno() >= 0:
            writing = selectors.EVENT_WRITE if self.outgoing else 0
            selector.modify(self.socket, selectors.EVENT_READ | writing, self)

    def receive(self) -> Iterator[frames.Frame]:
        """Yield the frames that have come in."""
        try:
            # With recv instead of recvmsg the kernel discards descriptors that a client sends.
            data = self.socket.recv(frames.CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("closed by the other side")
        self.decoder.feed(data)
        yield from self.decoder.frames()

    def close(self) -> None:
        """Close the socket and the descriptors of unsent frames."""
        self.socket.close()
        for _, fds in self.outgoing:
            _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

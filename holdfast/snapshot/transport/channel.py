"""A connection as the SMP sees it: never blocking, whatever the other side does."""

import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from holdfast.snapshot.transport import frames

Buffer = bytes | memoryview


class Channel:
    """The frames of one connection that came in so far, and those that have yet to go out."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.decoder = frames.Decoder(max_blob_bytes=0)
        self.queued_bytes = 0
        self.outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()

    def queue(
        self, header: Mapping[str, object], blob: Buffer = b"", fds: Sequence[int] = ()
    ) -> None:
        """Line up a frame; ``fds`` are closed once it is sent."""
        for part in (frames.encode_header(header, len(blob), len(fds)), blob):
            if len(part):
                self.outgoing.append((memoryview(part), fds))
                self.queued_bytes += len(part)
            fds = ()

    def flush(self) -> None:
        """Send what the socket takes now.

        Raises:
            OSError: the other side is gone.
        """
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

    def receive(self) -> Iterator[frames.Frame]:
        """Yield the frames that have come in.

        Raises:
            OSError: the other side is gone. ProtocolViolation: what it sent is no frame.
        """
        try:
            # recv, not recvmsg: the kernel discards descriptors that a client might send.
            data = self.socket.recv(frames.CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("closed by the other side")
        self.decoder.feed(data)
        yield from self.decoder.frames()

    def close(self) -> None:
        """Close the socket and every descriptor still queued."""
        self.socket.close()
        for _, fds in self.outgoing:
            _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

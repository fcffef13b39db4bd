"""A connection as the SMP sees it, which never blocks, whatever the other side does."""

import os
import select
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from holdfast.snapshot.transport.frames import CHUNK_BYTES, MAX_HEADER_BYTES, Decoder, Frame

_LATER = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError
# The most reads of one connection before others have their turn.
_READS = 16


class Channel:
    """The frames that came in over one connection, and those that still have to be sent."""

    def __init__(self, sock: socket.socket, max_header_bytes: int = MAX_HEADER_BYTES):
        sock.setblocking(False)
        self.socket = sock
        self.decoder = Decoder(max_blob_bytes=0, max_header_bytes=max_header_bytes)
        self.queued_bytes = 0
        self.outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self.greeting = isinstance(sock, ssl.SSLSocket)

    def send(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        """Add a frame to those to be sent; its ``fds`` are closed after that."""
        head, blob = frame.prefix(len(fds)) + frame.text, frame.blob
        if len(blob) < CHUNK_BYTES:
            head, blob = head + blob, b""
        self.outgoing.append((memoryview(head), fds))
        if len(blob):
            self.outgoing.append((memoryview(blob), ()))
        self.queued_bytes += len(head) + len(blob)

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while self.outgoing and not self.greeting:
            data, fds = self.outgoing[0]
            try:
                sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            except _LATER:
                return
            _close_all(fds)
            self.queued_bytes -= sent
            self.outgoing[0] = data[sent:], ()
            if sent == len(data):
                self.outgoing.popleft()

    def drain(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, if the other side reads."""
        with suppress(OSError):
            self.flush()
            poller = select.poll()
            poller.register(self.socket, select.POLLOUT)
            while self.outgoing and (left_s := deadline - time.monotonic()) > 0:
                if self.greeting:
                    return
                poller.poll(1000 * left_s)
                self.flush()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wait until this connection can be read, or written if needed."""
        key = selector.get_key(self.socket)
        writing = bool(self.outgoing) and not self.greeting
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        if events != key.events:
            selector.modify(self.socket, events, key.data)

    def receive(self) -> Iterator[Frame]:
        """Yield the frames that have come in."""
        for _ in range(_READS):
            try:
                if isinstance(self.socket, ssl.SSLSocket) and self.greeting:
                    self.socket.do_handshake()
                    self.greeting = False
                # With recv instead of recvmsg the kernel discards descriptors that a client sends.
                if self.decoder.rest:
                    count = self.socket.recv_into(self.decoder.rest)
                    self.decoder.filled(count)
                else:
                    data = self.socket.recv(self.decoder.wanted_bytes)
                    count = len(data)
                    self.decoder.feed(data)
            except _LATER:
                return
            if not count:
                raise ConnectionResetError("closed by the other side")
            yield from self.decoder.frames()

    def close(self) -> None:
        """Close the socket and the descriptors of unsent frames."""
        self.socket.close()
        self.decoder.close()
        for _, fds in self.outgoing:
            _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

"""A connection as the SMP sees it, which never blocks, whatever the other side does."""

import os
import select
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile

from holdfast.snapshot.transport import frames
from holdfast.snapshot.transport.frames import Buffer, Frame

_LATER = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError
# The most reads of one connection before others have their turn.
_READS = 16
# The most pieces that one system call sends.
_PARTS = 16


class Channel:
    """The frames that came in over one connection, and those that still have to be sent."""

    def __init__(self, sock: socket.socket, max_header_bytes: int = frames.MAX_HEADER_BYTES):
        sock.setblocking(False)
        self.socket = sock
        self.decoder = frames.Decoder(max_blob_bytes=0, max_header_bytes=max_header_bytes)
        self.queued_bytes = 0
        self.outgoing: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._writing = False
        self.greeting = isinstance(sock, ssl.SSLSocket)

    def queue(
        self, header: Mapping[str, object], blob: Buffer = b"", fds: Sequence[int] = ()
    ) -> None:
        """Add a frame to those to be sent; its ``fds`` are closed after that."""
        self.send(Frame.of(header, blob), fds)

    def send(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        """Add a frame to those to be sent, as ``queue``."""
        for part in (frame.prefix(len(fds)) + frame.text, frame.blob):
            if len(part):
                self.outgoing.append((memoryview(part), fds))
                self.queued_bytes += len(part)
            fds = ()

    def flush(self) -> None:
        """Send as much as the socket takes now."""
        while self.outgoing and not self.greeting:
            fds = self.outgoing[0][1]
            try:
                sent = self._send_some(fds)
            except _LATER:
                return
            _close_all(fds)
            self.queued_bytes -= sent
            while sent or fds:
                data, _ = self.outgoing.popleft()
                if rest := data[sent:]:
                    self.outgoing.appendleft((rest, ()))
                sent, fds = max(0, sent - len(data)), ()

    def _send_some(self, fds: Sequence[int]) -> int:
        """Send some of what is queued, with these descriptors; return how many bytes."""
        if isinstance(self.socket, ssl.SSLSocket):
            return self.socket.send(self.outgoing[0][0])
        if fds:
            return socket.send_fds(self.socket, [self.outgoing[0][0]], fds)
        parts = takewhile(lambda part: not part[1], islice(self.outgoing, _PARTS))
        return self.socket.sendmsg([data for data, _ in parts])

    def drain(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, if the other side reads."""
        with suppress(OSError):
            self.flush()
            while self.outgoing and (left_s := deadline - time.monotonic()) > 0:
                select.select([], [self.socket], [], left_s)
                self.flush()

    def first_events(self) -> int:
        """Return what a selector waits for at first: TLS begins when the socket is connected."""
        self._writing = self.greeting
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.greeting else 0)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have the selector wait until this open connection can be read, or written if needed."""
        writing = bool(self.outgoing) and not self.greeting
        if writing != self._writing and self.socket.fileno() >= 0:
            self._writing = writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            selector.modify(self.socket, events, selector.get_key(self.socket).data)

    def receive(self) -> Iterator[Frame]:
        """Yield the frames that have come in."""
        for _ in range(_READS):
            try:
                self._greet()
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

    def _greet(self) -> None:
        if self.greeting:
            assert isinstance(self.socket, ssl.SSLSocket)
            self.socket.do_handshake()
            self.greeting = False

    def close(self) -> None:
        """Close the socket and the descriptors of unsent frames."""
        self.socket.close()
        self.decoder.close()
        for _, fds in self.outgoing:
            _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

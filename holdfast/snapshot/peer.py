"""One connection as the SMP sees it: never blocking, whatever the client does."""

import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from holdfast.snapshot import transport


class Peer:
    """One accepted connection: what it sent so far and what it has yet to read."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.socket = sock
        self.rank: int | None = None
        self.reader: int | None = None
        self.decoder = transport.Decoder(max_blob_bytes=0)
        self.outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.stalled_since: float | None = now

    def queue(self, verb: str, fields: dict[str, Any], blob: bytes, fds: Sequence[int]) -> None:
        """Line up a frame; ``fds`` are closed once it is sent."""
        data = transport.encode({"verb": verb, **fields}, blob, len(fds))
        self.outgoing.append((memoryview(data), tuple(fds)))

    def flush(self) -> None:
        """Send what the socket takes now.

        Raises:
            OSError: the peer is gone.
        """
        while self.outgoing:
            data, fds = self.outgoing.popleft()
            try:
                sent = socket.send_fds(self.socket, [data], fds)
            except BlockingIOError:
                self.outgoing.appendleft((data, fds))
                return
            rest = data[sent:]
            _close_all(fds)
            if rest:
                self.outgoing.appendleft((rest, ()))

    def close(self) -> None:
        """Close the socket and every descriptor still queued."""
        self.socket.close()
        for _, fds in self.outgoing:
            _close_all(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

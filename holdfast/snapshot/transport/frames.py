"""Frames (JSON header, optional blob, optional file descriptors) over a run's Unix socket.

The bytes of a frame are: magic, size of the header, size of the blob, number of descriptors,
header, blob. Descriptors travel with the first byte of their frame. Every read is bounded in size
and in time.
"""

import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import config
from holdfast.errors import SmpUnavailable
from holdfast.snapshot.protocol.roster import ProtocolViolation

SOCKET_NAME = "smp.sock"
FAILED = (
    "failed"  # the answer to a request that an SMP cannot handle because of an error of its own
)
MAX_HEADER_BYTES = 64 * 2**10
MAX_BLOB_BYTES = 256 * 2**20
CHUNK_BYTES = 256 * 2**10
_MAX_FDS = 4
_PREFIX = struct.Struct("!4sIIB")
_MAGIC = b"HFS1"
_CREDENTIALS = struct.Struct("3i")


Header = dict[str, Any]  # JSON; "verb" names the message


@dataclass(frozen=True)
class Frame:
    """One message, named by ``verb``; the receiver owns the descriptors ``fds`` and closes them."""

    header: Header
    blob: bytes = b""
    fds: tuple[int, ...] = ()
    verb: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verb", str(self.header.get("verb")))

    def close_fds(self) -> None:
        """Close the descriptors that came with the frame."""
        for fd in self.fds:
            os.close(fd)


def encode(header: Mapping[str, object], blob: bytes = b"", fds: int = 0) -> bytes:
    """Return a frame as bytes; ``fds`` is the number of descriptors that accompany it."""
    return encode_header(header, len(blob), fds) + blob


def encode_header(header: Mapping[str, object], blob_bytes: int, fds: int = 0) -> bytes:
    """Return the bytes of a frame up to its blob, as ``encode``."""
    text = json.dumps(dict(header)).encode()
    if len(text) > MAX_HEADER_BYTES or blob_bytes > MAX_BLOB_BYTES:
        raise ValueError(
            f"a frame of {len(text)} header and {blob_bytes} blob bytes is over the limits "
            f"{MAX_HEADER_BYTES} and {MAX_BLOB_BYTES}: store fewer, larger state entries"
        )
    return _PREFIX.pack(_MAGIC, len(text), blob_bytes, fds) + text


class Decoder:
    """Bytes and descriptors in, frames out; refuses oversized and malformed frames at once."""

    def __init__(self, max_blob_bytes: int = MAX_BLOB_BYTES) -> None:
        self.max_blob_bytes = max_blob_bytes
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    @property
    def pending(self) -> bool:
        """True if part of a frame has arrived."""
        return bool(self._bytes)

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Add bytes and descriptors that were received."""
        self._bytes += data
        self._fds.extend(fds)

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that are complete."""
        while len(self._bytes) >= _PREFIX.size:
            magic, header_size, blob_size, fds = _PREFIX.unpack_from(self._bytes)
            if magic != _MAGIC or header_size > MAX_HEADER_BYTES or blob_size > self.max_blob_bytes:
                raise ProtocolViolation(f"bad frame: {magic!r}, {header_size} + {blob_size} bytes")
            end = _PREFIX.size + header_size + blob_size
            if len(self._bytes) < end:
                return
            if fds > len(self._fds):
                raise ProtocolViolation(f"{fds} descriptors announced, {len(self._fds)} came")
            middle = end - blob_size
            header = _header(bytes(self._bytes[_PREFIX.size : middle]))
            blob = bytes(self._bytes[middle:end])
            del self._bytes[:end]
            yield Frame(header, blob, tuple(self._fds.popleft() for _ in range(fds)))

    def close(self) -> None:
        """Close the descriptors that belong to no complete frame."""
        while self._fds:
            os.close(self._fds.popleft())


def _header(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolViolation(f"the header is a {type(header).__name__}, not an object")
    return header


class Connection:
    """A client's blocking end of a socket, for use by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = Decoder()
        self._ready: deque[Frame] = deque()

    def send(self, header: Mapping[str, object], blob: bytes = b"", *, timeout_s: float) -> None:
        """Send one frame within ``timeout_s`` seconds.

        Raises:
            ConnectionError: the peer is gone.
            TimeoutError: the peer does not read.
        """
        data = encode(header, blob)
        self._check_open()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(data)

    def receive(self, *, timeout_s: float) -> Frame:
        """Return the next frame, within ``timeout_s`` seconds.

        Raises:
            ConnectionError: the peer is gone.
            TimeoutError: no whole frame came in time.
            ProtocolViolation: the received bytes are no frame.
        """
        self._check_open()
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            data, fds, _, _ = socket.recv_fds(
                self._socket, CHUNK_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                raise ConnectionResetError("the SMP closed the connection")
            self._decoder.feed(data, fds)
            self._ready.extend(self._decoder.frames())
            if not self._ready and time.monotonic() > deadline:
                raise TimeoutError(f"no whole frame within {timeout_s:g} s")
        return self._ready.popleft()

    def receive_into(self, out: memoryview, *, timeout_s: float) -> Header:
        """Return the next frame's header, and read its blob, if any, into ``out`` without a copy.

        Raises:
            ConnectionError, TimeoutError: as ``receive``.
            ProtocolViolation: the bytes are no frame, or its blob is not as long as ``out``.
        """
        self._check_open()
        assert not self._ready
        deadline = time.monotonic() + timeout_s
        prefix = bytearray(_PREFIX.size)
        self._fill(memoryview(prefix), deadline)
        magic, header_size, blob_size, _ = _PREFIX.unpack(prefix)
        if magic != _MAGIC or header_size > MAX_HEADER_BYTES or blob_size not in (0, len(out)):
            raise ProtocolViolation(f"bad frame: {magic!r}, {header_size} + {blob_size} bytes")
        text = bytearray(header_size)
        self._fill(memoryview(text), deadline)
        if blob_size:
            self._fill(out, deadline)
        return _header(bytes(text))

    def _fill(self, out: memoryview, deadline: float) -> None:
        while out:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            count = self._socket.recv_into(out)
            if not count:
                raise ConnectionResetError("the SMP closed the connection")
            out = out[count:]

    def _check_open(self) -> None:
        if self._socket.fileno() < 0:
            raise ConnectionAbortedError("this connection was closed on our side")

    def is_closed_by_peer(self) -> bool:
        """Return true if the other side has closed the connection, or its process has ended."""
        with suppress(OSError, ValueError):  # this side closes it at this moment
            poller = select.poll()
            poller.register(self._socket, select.POLLRDHUP)
            return bool(poller.poll(0))
        return False

    def close(self) -> None:
        """Close the socket and the descriptors of frames that were not returned."""
        self._socket.close()
        self._decoder.close()
        while self._ready:
            self._ready.popleft().close_fds()


class SmpConnection:
    """A client's connection to an SMP that raises SmpUnavailable if the SMP does not answer.

    Args:
        connection: the connection that carries the frames.
        advice: why the SMP may not answer and what to do, for the error's message.
    """

    def __init__(self, connection: Connection, advice: str) -> None:
        self.close = connection.close
        self.is_closed_by_peer = connection.is_closed_by_peer
        self._connection, self._advice = connection, advice

    def send(
        self, verb: str, blob: bytes = b"", *, limit_s: float | None = None, **fields: object
    ) -> None:
        """Send a request within ``limit_s`` seconds, by default ``config.timeout_s()``."""
        limit_s = config.timeout_s() if limit_s is None else limit_s
        try:
            self._connection.send({"verb": verb, **fields}, blob, timeout_s=limit_s)
        except TimeoutError as error:
            raise self._silent(verb, limit_s) from error

    def receive(self, limit_s: float | None = None) -> Frame:
        """Return the next frame within ``limit_s`` seconds, by default ``config.timeout_s()``."""
        limit_s = config.timeout_s() if limit_s is None else limit_s
        if (frame := self.poll(limit_s)) is None:
            raise self._silent("the last request", limit_s)
        return frame

    def poll(self, limit_s: float) -> Frame | None:
        """Return the next frame, or None if none comes within ``limit_s`` seconds."""
        try:
            frame = self._connection.receive(timeout_s=limit_s)
        except TimeoutError:
            return None
        if frame.verb == FAILED:
            self.close()
            raise SmpUnavailable(f"the SMP failed: {frame.header.get('reason')}; see its log")
        return frame

    def _silent(self, request: str, limit_s: float) -> SmpUnavailable:
        # The SMP must not count on a client that has stopped waiting: closing tells it so.
        self.close()
        return SmpUnavailable(f"no answer to {request} within {limit_s:g} s: {self._advice}")


@contextmanager
def _address(run_dir: Path) -> Iterator[str]:
    # The path of a Unix socket may have 107 bytes; through a directory descriptor any path fits.
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET_NAME}"
    finally:
        os.close(directory)


def listen(run_dir: Path) -> socket.socket:
    """Listen on the run directory's socket, mode 0600; replace the file of a dead one."""
    (run_dir / SOCKET_NAME).unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        with _address(run_dir) as address:
            sock.bind(address)
    finally:
        os.umask(previous)
    sock.listen(128)
    sock.setblocking(False)
    return sock


def connect(run_dir: Path, *, timeout_s: float) -> Connection | None:
    """Return a connection to the run's SMP; None if no process listens on the socket.

    Raises:
        OSError: the socket exists but may not be used (permissions), or does not answer in time.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        with _address(run_dir) as address:
            sock.connect(address)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError:
        sock.close()
        raise
    return Connection(sock)


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel states it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])

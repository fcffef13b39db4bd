"""Frames (JSON header, optional blob, optional file descriptors) over a run's Unix socket and TCP.

The bytes of a frame are: magic, size of the header, size of the blob, number of descriptors, number
of the frame, its MAC, header, blob. Descriptors travel with the first byte of their frame. Every
read is bounded in size and in time. Frames between nodes are numbered and carry a MAC
(``links``); over the Unix socket both are zero.
"""

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec

from holdfast import config, digest
from holdfast.errors import SmpUnavailable
from holdfast.snapshot.protocol.roster import ProtocolViolation

SOCKET_NAME = "smp.sock"
FAILED = "failed"  # an SMP's answer to a request on which it met an error of its own
REFUSED = "refused_connection"  # what an SMP says before it ends a connection that it cannot serve
MAX_HEADER_BYTES = 64 * 2**10
MAX_BLOB_BYTES = 256 * 2**20
CHUNK_BYTES = 64 * 2**10  # a smaller allocation than those that are mapped anew each time
MAC_BYTES = 16
_HEAD_BYTES = 4096
_KEPT_BYTES = 2 * 2**20
_MAX_FDS = 4
_PREFIX = struct.Struct(f"!4sIIBQ{MAC_BYTES}s")
_MAGIC = b"HFS2"  # the digit is ``messages.WIRE_VERSION``
_NO_MAC = bytes(MAC_BYTES)

Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]  # JSON; "verb" names the message


@dataclass(frozen=True)
class Frame:
    """One message; the receiver owns the descriptors ``fds`` and closes them.

    Attributes:
        text: the header as JSON.
        blob: the bytes that come with it, in any object that is a buffer.
        number: the number of frames that the sender sent before this one.
        mac: proves who sent it, and that nothing of it was changed.
    """

    text: bytes
    blob: Any = b""
    fds: tuple[int, ...] = ()
    number: int = 0
    mac: bytes = _NO_MAC

    @classmethod
    def of(cls, header: Mapping[str, object], blob: Buffer = b"", number: int = 0) -> "Frame":
        """Return the frame with this header.

        Raises:
            ValueError: it is larger than a frame may be, or has text that is not Unicode.
        """
        text = msgspec.json.encode(header)
        if len(text) > MAX_HEADER_BYTES or len(blob) > MAX_BLOB_BYTES:
            raise ValueError(
                f"a frame of {len(text)} header and {len(blob)} blob bytes is over the limits "
                f"{MAX_HEADER_BYTES} and {MAX_BLOB_BYTES}: store fewer, larger state entries"
            )
        return cls(text, blob, number=number)

    @cached_property
    def header(self) -> Header:
        """The fields of the message.

        Raises:
            ProtocolViolation: they are no JSON object.
        """
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise ProtocolViolation(f"the header is not a JSON object: {error}") from error

    @property
    def verb(self) -> str:
        """The name of the message."""
        return str(self.header.get("verb"))

    def prefix(self, fds: int = 0) -> bytes:
        """Return what precedes the header."""
        sizes = len(self.text), len(self.blob), fds, self.number
        return _PREFIX.pack(_MAGIC, *sizes, self.mac)

    def sealed(self, key: bytes) -> "Frame":
        """Return this frame with its MAC under ``key``."""
        object.__setattr__(self, "mac", self._mac(key))
        return self

    def is_sealed(self, key: bytes) -> bool:
        """Return true if the MAC is that of this frame under ``key``."""
        return self.mac == self._mac(key)

    def _mac(self, key: bytes) -> bytes:
        # The blob counts by its digest: a MAC of all its bytes is slower than the network.
        seen = self.prefix()[:-MAC_BYTES], self.text, digest.digest(self.blob)
        return blake2b(b"".join(seen), key=key, digest_size=MAC_BYTES).digest()

    def close_fds(self) -> None:
        """Close the descriptors that came with the frame."""
        for fd in self.fds:
            os.close(fd)


def encode(header: Mapping[str, object], blob: bytes = b"", fds: int = 0) -> bytes:
    """Return a frame as bytes; ``fds`` is the number of descriptors that accompany it."""
    frame = Frame.of(header, blob)
    return frame.prefix(fds) + frame.text + blob


class Decoder:
    """Bytes and descriptors in, frames out; refuses oversized and malformed frames at once.

    The blob of a frame is valid until the next frame is asked for: its memory is used again, or is
    that of ``into``. It is received in place: while ``rest`` is not empty, its bytes are to be
    received into it, and counted by ``filled``; other bytes are handed to ``feed``.
    """

    def __init__(
        self, max_blob_bytes: int = MAX_BLOB_BYTES, max_header_bytes: int = MAX_HEADER_BYTES
    ) -> None:
        self.max_blob_bytes, self.max_header_bytes = max_blob_bytes, max_header_bytes
        self.rest = memoryview(b"")
        self.into: memoryview | None = None
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self._begun: Frame | None = None
        self._kept = bytearray()

    @property
    def wanted_bytes(self) -> int:
        """How much to receive for ``feed``: little if another large blob is likely to follow."""
        return _HEAD_BYTES if len(self._kept) > CHUNK_BYTES else CHUNK_BYTES

    @property
    def pending(self) -> bool:
        """True if part of a frame has arrived."""
        return bool(self._bytes) or self._begun is not None

    def feed(self, data: Buffer, fds: Sequence[int] = ()) -> None:
        """Add bytes and descriptors that were received."""
        self._fds.extend(fds)
        if taken := min(len(data), len(self.rest)):
            self.rest[:taken] = data[:taken]
            self.filled(taken)
            data = data[taken:]
        self._bytes += data

    def filled(self, count: int) -> None:
        """Note that the first ``count`` bytes of ``rest`` were received."""
        self.rest = self.rest[count:]

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that are complete."""
        while self._begun is not None or self._begin():
            if self.rest:
                return
            frame, self._begun = self._begun, None
            assert frame is not None
            yield frame

    def _begin(self) -> bool:
        """Take the next frame up to its blob; return false if not that much has arrived."""
        if len(self._bytes) < _PREFIX.size:
            return False
        magic, header_size, blob_size, fds, number, mac = _PREFIX.unpack_from(self._bytes)
        fits = header_size <= self.max_header_bytes and blob_size <= self.max_blob_bytes
        fits &= self.into is None or blob_size in (0, len(self.into))
        if magic != _MAGIC or not fits:
            raise ProtocolViolation(f"bad frame: {magic!r}, {header_size} + {blob_size} bytes")
        middle = _PREFIX.size + header_size
        if len(self._bytes) < middle:
            return False
        if fds > len(self._fds):
            raise ProtocolViolation(f"{fds} descriptors announced, {len(self._fds)} came")
        text, blob = bytes(self._bytes[_PREFIX.size : middle]), self._room(blob_size)
        taken = self._bytes[middle : middle + blob_size]
        blob[: len(taken)] = taken
        del self._bytes[: middle + len(taken)]
        self.rest = blob[len(taken) :]
        owned = tuple(self._fds.popleft() for _ in range(fds))
        self._begun = Frame(text, blob, owned, number, mac)
        return True

    def _room(self, nbytes: int) -> memoryview:
        """Return memory for a blob; fresh memory costs more than what is received into it."""
        if self.into is not None:
            return self.into[:nbytes]
        if nbytes > _KEPT_BYTES:
            return memoryview(bytearray(nbytes))
        if nbytes > len(self._kept):
            self._kept = bytearray(nbytes)
        return memoryview(self._kept)[:nbytes]

    def close(self) -> None:
        """Close the descriptors that belong to no complete frame."""
        if self._begun is not None:
            self._begun.close_fds()
        while self._fds:
            os.close(self._fds.popleft())


class Connection:
    """A client's blocking end of a socket, for use by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder = Decoder()
        self._ready: deque[Frame] = deque()
        self._sent = self._received = 0
        self._keys: tuple[bytes, bytes] | None = None

    def secure(self, sending: bytes, receiving: bytes) -> None:
        """Give every frame from now on a MAC under one key, and check those that come in."""
        self._keys = sending, receiving

    def send(self, header: Mapping[str, object], blob: bytes = b"", *, timeout_s: float) -> None:
        """Send one frame within ``timeout_s`` seconds.

        Raises:
            ConnectionError: the peer is gone.
            TimeoutError: the peer does not read.
        """
        frame = Frame.of(header, blob, self._sent)
        if self._keys is not None:
            frame = frame.sealed(self._keys[0])
        self._check_open()
        self._socket.settimeout(timeout_s)
        self._socket.sendall(frame.prefix() + frame.text + blob)
        self._sent += 1

    def receive(self, *, timeout_s: float, into: memoryview | None = None) -> Frame:
        """Return the next frame, within ``timeout_s`` seconds.

        Its blob, if it has one, is read ``into`` this memory without a copy, if that is given.

        Raises:
            ConnectionError: the peer is gone.
            TimeoutError: no whole frame came in time.
            ProtocolViolation: the received bytes are no frame, or not the next of this peer, or the
                blob is not as long as ``into``.
        """
        self._check_open()
        assert into is None or not self._ready
        self._decoder.into = into
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            if not self._receive_some():
                raise ConnectionResetError("the SMP closed the connection")
            for frame in self._decoder.frames():
                self._check(frame)
                blob = bytes(frame.blob) if into is None else frame.blob
                self._ready.append(Frame(frame.text, blob, frame.fds))
            if not self._ready and time.monotonic() > deadline:
                raise TimeoutError(f"no whole frame within {timeout_s:g} s")
        return self._ready.popleft()

    def _receive_some(self) -> int:
        if self._decoder.rest:
            count = self._socket.recv_into(self._decoder.rest)
            self._decoder.filled(count)
            return count
        data, fds = b"", list[int]()
        if self._socket.family != socket.AF_UNIX:
            data = self._socket.recv(CHUNK_BYTES)
        else:
            flags = socket.MSG_CMSG_CLOEXEC
            data, fds, *_ = socket.recv_fds(self._socket, CHUNK_BYTES, _MAX_FDS, flags)
        self._decoder.feed(data, fds)
        return len(data)

    def _check(self, frame: Frame) -> None:
        if self._keys and (frame.number != self._received or not frame.is_sealed(self._keys[1])):
            raise ProtocolViolation(f"frame {self._received} was lost or changed on its way")
        self._received += 1

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

    def send(self, verb: str, blob: bytes = b"", /, **fields: object) -> None:
        """Send a request within ``config.timeout_s()`` seconds."""
        try:
            self._connection.send({"verb": verb, **fields}, blob, timeout_s=config.timeout_s())
        except TimeoutError as error:
            raise self._silent(verb, config.timeout_s()) from error

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
        if frame.verb in (FAILED, REFUSED):
            self.close()
            reason = str(frame.header.get("reason"))
            failed = f"the SMP failed: {reason}; see its log"
            raise SmpUnavailable(failed if frame.verb == FAILED else reason)
        return frame

    def _silent(self, request: str, limit_s: float) -> SmpUnavailable:
        # The SMP must not count on a client that has stopped waiting: closing tells it so.
        self.close()
        return SmpUnavailable(f"no answer to {request} within {limit_s:g} s: {self._advice}")

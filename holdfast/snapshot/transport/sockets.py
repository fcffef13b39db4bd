"""The connections of one process over stream sockets, none of which ever blocks it."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from holdfast.snapshot.protocol.roster import ProtocolViolation
from holdfast.snapshot.transport.channel import Channel
from holdfast.snapshot.transport.frames import MAX_HEADER_BYTES, Frame

_MAX_QUEUED_BYTES = 2**30
_BATCH = 64
_PAUSE_S = 0.2
_SHORT = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


class Happenings(Protocol):
    """The receiver of what happens on a transport."""

    def new_number(self) -> int:
        """Return the number of another connection."""

    def accepted(self, connection: int) -> None:
        """Note that somebody connected."""

    def received(self, connection: int, frame: Frame) -> None:
        """Take a frame that came in, after all that were sent before it.

        The memory of its blob is used again after this call.
        """

    def closed(self, connection: int, reason: str) -> None:
        """Note that a connection has ended, or could not be opened; nothing more comes of it."""

    def violated(self, connection: int, reason: str) -> None:
        """Note that what came is no frame, or too large; the connection is still open."""

    def crowded(self) -> None:
        """End a connection, as there are more than the system can serve."""


class _Door:
    """A listening socket in a selector, which accepts in batches.

    Without a free descriptor one connection is accepted with the descriptor that was reserved for
    this, and closed at once, so that its process learns of it. Then nothing is accepted for a
    moment, in which ``crowded`` can end a connection.
    """

    def __init__(self, listener: socket.socket, sockets: "Sockets") -> None:
        self.listener, self._sockets = listener, sockets
        self._paused_until_s = 0.0
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._register()

    def _register(self) -> None:
        self._sockets.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                sock = self.listener.accept()[0]
            except OSError as error:
                if error.errno in _SHORT:
                    self._turn_away()
                return
            self._sockets.take(sock)

    def _turn_away(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        with suppress(OSError):
            self.listener.accept()[0].close()
        self._sockets.told.crowded()
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if not self._paused_until_s:
            self._sockets.selector.unregister(self.listener)
        self._paused_until_s = time.monotonic() + _PAUSE_S

    def tend(self, now: float) -> None:
        if self._paused_until_s and now >= self._paused_until_s:
            self._paused_until_s = 0.0
            self._register()

    def close(self) -> None:
        if not self._paused_until_s:
            self._sockets.selector.unregister(self.listener)
        self.listener.close()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1


class Sockets:
    """Connections by number, over which whole frames move; no method but ``shut`` blocks.

    It knows nothing of what the frames mean: who may connect, numbers and MACs are decided above it
    (``links``). Methods that are given the number of a connection that has ended do nothing.

    Args:
        selector: waits for the sockets; the data of each is a function, which is to be called when
            the socket is ready.
        told: is told what happens, but nothing before a method returns.
    """

    max_header_bytes = MAX_HEADER_BYTES

    def __init__(self, selector: selectors.BaseSelector, told: Happenings) -> None:
        self.selector, self.told = selector, told
        self.doors: dict[str, _Door] = {}
        self.channels: dict[int, Channel] = {}

    def serve(self, name: str, listener: socket.socket) -> None:
        """Accept connections to a socket, in the place of the one that had this name before."""
        try:
            door = _Door(listener, self)
        except BaseException:
            listener.close()
            raise
        if name in self.doors:
            self.doors[name].close()
        self.doors[name] = door

    def take(self, sock: socket.socket) -> None:
        """Take an accepted connection."""
        number = self.told.new_number()
        try:
            self._add(number, self._prepared(sock, server=True))
        except OSError:
            sock.close()
        else:
            self.told.accepted(number)
            self._watch(number)

    def _prepared(self, sock: socket.socket, *, server: bool) -> socket.socket:
        return sock

    def _add(self, number: int, sock: socket.socket) -> None:
        channel = Channel(sock, self.max_header_bytes)
        # TLS begins when the socket is connected.
        writing = selectors.EVENT_WRITE if channel.greeting else 0
        try:
            self.selector.register(sock, selectors.EVENT_READ | writing, partial(self.turn, number))
        except BaseException:
            sock.close()
            raise
        self.channels[number] = channel

    def turn(self, number: int) -> None:
        """Receive and send what is possible now."""
        channel = self.channels.get(number)
        if channel is None:  # closed in an earlier turn of the same round
            return
        try:
            for frame in channel.receive():
                self.told.received(number, frame)
                if number not in self.channels:
                    return
            channel.flush()
        except ProtocolViolation as error:
            self.told.violated(number, str(error))
        except (OSError, MemoryError) as error:
            self.close(number)
            self.told.closed(number, str(error))
        self._watch(number)

    def _watch(self, number: int) -> None:
        if number in self.channels:
            self.channels[number].watch(self.selector)

    def trust(self, connection: int, max_blob_bytes: int) -> None:
        """Receive frames of any size from now on; before that their headers must be small."""
        if connection in self.channels:
            decoder = self.channels[connection].decoder
            decoder.max_header_bytes, decoder.max_blob_bytes = MAX_HEADER_BYTES, max_blob_bytes

    def send(self, connection: int, frame: Frame, fds: Sequence[int] = ()) -> int:
        """Send a frame after those before it; return how many bytes are not sent yet.

        A blob is not copied: its memory stays as it is until it was sent. Over a Unix socket it may
        come with descriptors.

        Raises:
            OSError: the connection is not usable any more, or far too much is left unread.
        """
        if (channel := self.channels.get(connection)) is None:
            return 0
        channel.send(frame, fds)
        if channel.queued_bytes > _MAX_QUEUED_BYTES:
            raise ConnectionAbortedError(f"{channel.queued_bytes} bytes were left unread")
        channel.watch(self.selector)
        return channel.queued_bytes

    def queued_bytes(self, connection: int) -> int:
        """Return how many bytes of a connection are not sent yet."""
        channel = self.channels.get(connection)
        return channel.queued_bytes if channel else 0

    def close(self, connection: int) -> None:
        """End a connection, without ``closed``."""
        if (channel := self.channels.pop(connection, None)) is not None:
            self.selector.unregister(channel.socket)
            channel.close()

    def tend(self, now: float) -> None:
        """Accept again, if descriptors were lacking; called at least once a second."""
        for door in self.doors.values():
            door.tend(now)

    def shut(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, and close everything."""
        while self.doors:
            self.doors.popitem()[1].close()
        for number, channel in list(self.channels.items()):
            channel.drain(deadline)
            self.close(number)

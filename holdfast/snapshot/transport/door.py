"""Accepting connections when there are too many of them, or too few file descriptors."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

_BATCH = 64
_PAUSE_S = 0.2
_SHORT = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


class Door:
    """A listening socket in a selector, which accepts in batches.

    Without a free descriptor one connection is accepted with the descriptor that was reserved for
    this, and closed at once, so that its process learns of it. Then nothing is accepted for a
    moment, in which ``make_room`` can end a connection.

    Args:
        listener: the socket; it belongs to this object now.
        selector: waits for it, with the data ``turn``.
        turn: is called when somebody connects, and calls ``accept``.
        make_room: is called when descriptors are lacking.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        turn: Callable[[], None],
        make_room: Callable[[], None],
    ) -> None:
        self.listener = listener
        self._selector, self._turn, self._make_room = selector, turn, make_room
        self._paused_until_s = 0.0
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        selector.register(listener, selectors.EVENT_READ, turn)

    def accept(self) -> list[socket.socket]:
        """Return the next connections."""
        found: list[socket.socket] = []
        while len(found) < _BATCH:
            try:
                found.append(self.listener.accept()[0])
            except OSError as error:
                if error.errno in _SHORT:
                    self._turn_away()
                break
        return found

    def _turn_away(self) -> None:
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        with suppress(OSError):
            self.listener.accept()[0].close()
        self._make_room()
        with suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if not self._paused_until_s:
            self._selector.unregister(self.listener)
        self._paused_until_s = time.monotonic() + _PAUSE_S

    def tend(self, now: float) -> None:
        """Accept again after a pause."""
        if self._paused_until_s and now >= self._paused_until_s:
            self._paused_until_s = 0.0
            self._selector.register(self.listener, selectors.EVENT_READ, self._turn)

    def close(self) -> None:
        """Close the socket."""
        if not self._paused_until_s:
            self._selector.unregister(self.listener)
        self.listener.close()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1

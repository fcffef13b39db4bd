"""The interface of a transport between nodes: what one over RDMA, UCX or NCCL would implement.

A transport moves whole frames between SMPs and knows nothing of what they mean: who may connect,
numbers and MACs are decided above it (``linking``). ``tcp`` is the one in use. A rank reads from
the memory of other nodes over ``Dial``.
"""

from collections.abc import Callable
from typing import Protocol

from holdfast.snapshot.transport.frames import Connection, Frame

Address = tuple[str, int]


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


class Transport(Protocol):
    """The connections of one SMP; no method blocks.

    It is made with a receiver of ``Happenings``, which is told nothing before a method returns.
    Methods that are given the number of a connection that has ended do nothing.
    """

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept connections to ``host`` from now on; return the address that others connect to.

        ``port`` is used unless it is taken; 0 means any.

        Raises:
            OSError: this node has no such address.
        """

    def open(self, connection: int, address: Address) -> None:
        """Connect to an address, under this number.

        Raises:
            OSError: that cannot be tried.
        """

    def trust(self, connection: int, max_blob_bytes: int) -> None:
        """Receive frames of any size from now on; before that their headers must be small."""

    def send(self, connection: int, frame: Frame) -> int:
        """Send a frame after those before it; return how many bytes are not sent yet.

        A blob is not copied: its memory stays as it is until it was sent.

        Raises:
            OSError: the connection is not usable any more, or far too much is left unread.
        """

    def close(self, connection: int) -> None:
        """End a connection, without ``closed``."""


Dial = Callable[[Address, float], Connection]
"""Connects a rank to an SMP within so many seconds; raises OSError if that fails."""

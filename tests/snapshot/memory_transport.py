"""A transport within one process: frames in queues, as another implementation of the contract."""

from collections import deque
from collections.abc import Callable

from holdfast.snapshot.transport.frames import Frame
from holdfast.snapshot.transport.sockets import Happenings
from holdfast.snapshot.transport.tcp import Address

_SMALL_BYTES = 4096


class MemoryNetwork:
    """The addresses at which somebody listens, and what is still to be told."""

    def __init__(self) -> None:
        self.listening: dict[Address, MemoryTransport] = {}
        self.queue: deque[Callable[[], None]] = deque()

    def turn(self) -> None:
        """Tell one thing that happened."""
        if self.queue:
            self.queue.popleft()()


class MemoryTransport:
    """The connections of one SMP, with the methods of ``TcpTransport``."""

    def __init__(self, network: MemoryNetwork, told: Happenings) -> None:
        self._network, self._told = network, told
        self._other: dict[int, tuple[MemoryTransport, int]] = {}
        self._limit: dict[int, int] = {}
        self._unread: dict[int, int] = {}

    def listen(self, host: str, port: int = 0) -> Address:
        if host not in ("127.0.0.1", "::1"):
            raise OSError(f"no address {host}")
        taken = self._network.listening
        for address, transport in taken.items():
            if transport is self and address[0] == host:
                return address
        while not port or (host, port) in taken:
            port = max((number for _, number in taken), default=0) + 1
        taken[host, port] = self
        return host, port

    def open(self, connection: int, address: Address) -> None:
        other = self._network.listening.get(address)
        if other is None:
            self._later(lambda: self._told.closed(connection, "nobody listens"))
            return
        number = other._told.new_number()
        self._join(connection, other, number)
        other._join(number, self, connection)
        self._later(lambda: other._told.accepted(number))

    def _join(self, connection: int, other: "MemoryTransport", number: int) -> None:
        self._other[connection] = other, number
        self._limit[connection] = 0
        self._unread[connection] = 0

    def trust(self, connection: int, max_blob_bytes: int) -> None:
        self._limit[connection] = max(max_blob_bytes, 1)

    def send(self, connection: int, frame: Frame) -> int:
        if connection not in self._other:
            return 0
        self._unread[connection] += len(frame.blob)
        other, number = self._other[connection]
        self._later(lambda: other._take(number, frame))
        return self._unread[connection]

    def _take(self, connection: int, frame: Frame) -> None:
        if connection not in self._other:
            return
        sender, number = self._other[connection]
        sender._unread[number] -= len(frame.blob)
        limit = self._limit[connection]
        if len(frame.blob) > limit or (not limit and len(frame.text) > _SMALL_BYTES):
            self._told.violated(connection, "the frame is too large")
        else:
            self._told.received(connection, Frame(frame.text, bytes(frame.blob)))

    def queued_bytes(self, connection: int) -> int:
        return self._unread.get(connection, 0)

    def tend(self, now: float) -> None:
        pass

    def shut(self, deadline: float) -> None:
        for connection in list(self._other):
            self.close(connection)

    def close(self, connection: int) -> None:
        other, number = self._other.pop(connection, (None, 0))
        if other is not None:
            self._later(lambda: other._lose(number))

    def _lose(self, connection: int) -> None:
        if self._other.pop(connection, None) is not None:
            self._told.closed(connection, "closed by the other side")

    def _later(self, step: Callable[[], None]) -> None:
        self._network.queue.append(step)

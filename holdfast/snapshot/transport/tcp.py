"""The transport over TCP, with IPv4 or IPv6, encrypted by TLS if the user gives certificates."""

import errno
import selectors
import socket
import ssl
from functools import partial

from holdfast import config
from holdfast.snapshot.protocol.roster import ProtocolViolation
from holdfast.snapshot.transport import tls
from holdfast.snapshot.transport.channel import Channel
from holdfast.snapshot.transport.contract import Address, Happenings
from holdfast.snapshot.transport.door import Door
from holdfast.snapshot.transport.frames import MAX_HEADER_BYTES, Connection, Frame
from holdfast.snapshot.transport.local import BACKLOG

_MAX_QUEUED_BYTES = 2**30
_MAX_GREETING_BYTES = 4096  # of a header, before the proofs were given


class TcpTransport:
    """The TCP connections of one SMP, as ``contract.Transport`` describes.

    Args:
        selector: waits for the sockets; the data of each is a function, which is to be called when
            the socket is ready.
        told: is told what happens.
    """

    def __init__(self, selector: selectors.BaseSelector, told: Happenings) -> None:
        self._selector, self._told = selector, told
        self._door: Door | None = None
        self._channels: dict[int, Channel] = {}

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept connections; see the contract."""
        if self._door is not None and self._door.listener.getsockname()[0] != host:
            self.stop_listening()
        if self._door is None:
            listener = _listener(host, port)
            self._door = Door(listener, self._selector, self._accept, self._told.crowded)
        found, taken = self._door.listener.getsockname()[:2]
        return str(found), int(taken)

    def _accept(self) -> None:
        assert self._door is not None
        for sock in self._door.accept():
            number = self._told.new_number()
            try:
                self._add(number, tls.accepting(sock))
            except OSError:
                sock.close()
            else:
                self._told.accepted(number)
                self._watch(number)

    def open(self, connection: int, address: Address) -> None:
        """Connect; see the contract."""
        sock = socket.socket(_family(address[0]), socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock = tls.connecting(sock)
            if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                raise OSError(code, f"cannot connect to {address}")
            self._add(connection, sock)
        except (OSError, ValueError) as error:
            sock.close()
            raise OSError(str(error)) from error

    def _add(self, number: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience_ms = round(config.timeout_s() * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        channel = Channel(sock, _MAX_GREETING_BYTES)
        self._selector.register(sock, channel.first_events(), partial(self._turn, number))
        self._channels[number] = channel

    def _turn(self, number: int) -> None:
        channel = self._channels.get(number)
        if channel is None:  # closed in an earlier turn of the same round
            return
        try:
            for frame in channel.receive():
                self._told.received(number, frame)
                if number not in self._channels:
                    return
            channel.flush()
        except ProtocolViolation as error:
            self._told.violated(number, str(error))
        except (OSError, MemoryError) as error:
            self._fail(number, str(error))
        self._watch(number)

    def _fail(self, number: int, reason: str) -> None:
        self.close(number)
        self._told.closed(number, reason)

    def _watch(self, number: int) -> None:
        if number in self._channels:
            self._channels[number].watch(self._selector)

    def trust(self, connection: int, max_blob_bytes: int) -> None:
        """Receive frames of any size; see the contract."""
        if connection in self._channels:
            decoder = self._channels[connection].decoder
            decoder.max_header_bytes, decoder.max_blob_bytes = MAX_HEADER_BYTES, max_blob_bytes

    def send(self, connection: int, frame: Frame) -> int:
        """Queue a frame; see the contract."""
        channel = self._channels.get(connection)
        if channel is None:
            return 0
        channel.send(frame)
        if channel.queued_bytes > _MAX_QUEUED_BYTES:
            raise ConnectionAbortedError(f"{channel.queued_bytes} bytes were left unread")
        self._watch(connection)
        return channel.queued_bytes

    def queued_bytes(self, connection: int) -> int:
        """Return how many bytes of a connection are not sent yet."""
        channel = self._channels.get(connection)
        return channel.queued_bytes if channel else 0

    def close(self, connection: int) -> None:
        """End a connection; see the contract."""
        channel = self._channels.pop(connection, None)
        if channel is not None:
            self._selector.unregister(channel.socket)
            channel.close()

    def drain(self, connection: int, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, if the other side reads."""
        if connection in self._channels:
            self._channels[connection].drain(deadline)

    def tend(self, now: float) -> None:
        """Accept again, if descriptors were lacking."""
        if self._door is not None:
            self._door.tend(now)

    def stop_listening(self) -> None:
        """Accept nothing any more."""
        if self._door is not None:
            self._door.close()
            self._door = None


def dial(address: Address, patience_s: float) -> Connection:
    """Connect a rank to an SMP, as ``contract.Dial`` describes."""
    sock = tls.connecting(socket.socket(_family(address[0]), socket.SOCK_STREAM))
    try:
        sock.settimeout(patience_s)
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listener(host: str, port: int) -> socket.socket:
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        # Lets the successor of a process that died use its port at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except ValueError as error:
        sock.close()
        raise OSError(errno.EINVAL, str(error)) from error
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE and port:
            return _listener(host, 0)
        raise
    sock.setblocking(False)
    return sock

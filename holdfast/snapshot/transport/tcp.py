"""The transport over TCP, with IPv4 or IPv6, encrypted by TLS if the user gives certificates."""

import errno
import socket
import ssl

from holdfast import config
from holdfast.snapshot.transport import tls
from holdfast.snapshot.transport.frames import Connection
from holdfast.snapshot.transport.local import BACKLOG
from holdfast.snapshot.transport.sockets import Sockets

Address = tuple[str, int]


class TcpTransport(Sockets):
    """The connections of one SMP to those of other nodes.

    A transport over RDMA, UCX or NCCL would have the same methods.
    """

    max_header_bytes = 4096  # before the proofs were given

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept connections to ``host`` from now on; return the address that others connect to.

        ``port`` is used unless it is taken; 0 means any.

        Raises:
            OSError: this node has no such address.
        """
        door = self.doors.get("tcp")
        if door is None or door.listener.getsockname()[0] != host:
            self.serve("tcp", _listener(host, port))
        found, taken = self.doors["tcp"].listener.getsockname()[:2]
        return str(found), int(taken)

    def open(self, connection: int, address: Address) -> None:
        """Connect to an address, under this number.

        Raises:
            OSError: that cannot be tried.
        """
        sock = socket.socket(_family(address[0]), socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock = self._prepared(sock, server=False)
            if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                raise OSError(code, f"cannot connect to {address}")
            self._add(connection, sock)
        except (OSError, ValueError) as error:
            sock.close()
            raise OSError(str(error)) from error

    def _prepared(self, sock: socket.socket, *, server: bool) -> socket.socket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience_ms = round(config.timeout_s() * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        return tls.wrapped(sock, server=server)


def dial(address: Address, patience_s: float) -> Connection:
    """Connect a rank to an SMP within so many seconds; raise OSError if that fails."""
    sock = tls.wrapped(socket.socket(_family(address[0]), socket.SOCK_STREAM), server=False)
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

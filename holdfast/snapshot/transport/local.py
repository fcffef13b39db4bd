"""The run directory's Unix socket, where an SMP serves the processes of its own node."""

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.snapshot.transport.frames import SOCKET_NAME, Connection

BACKLOG = 4096
_RETRY_S = 0.02
_CREDENTIALS = struct.Struct("3i")


@contextmanager
def address(run_dir: Path, name: str = SOCKET_NAME) -> Iterator[str]:
    """Provide a path of at most 107 bytes for a Unix socket: one through a directory descriptor."""
    directory = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{name}"
    finally:
        os.close(directory)


def listen(run_dir: Path) -> socket.socket:
    """Listen on the run directory's socket, mode 0600; replace the file of a dead one."""
    (run_dir / SOCKET_NAME).unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        with address(run_dir) as path:
            sock.bind(path)
    finally:
        os.umask(previous)
    return _listening(sock)


def listen_without_file(run_dir: Path) -> socket.socket | None:
    """Listen on a socket that has no file, for the time after the file was removed.

    Return None if its name is taken. Processes of other users can connect to it, too.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(run_dir))
    except OSError:
        sock.close()
        return None
    return _listening(sock)


def _listening(sock: socket.socket) -> socket.socket:
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def _name(run_dir: Path) -> str:
    """Return the name of the run's socket without a file (abstract, in Linux's terms)."""
    status = os.stat(run_dir)
    return f"\0holdfast-{status.st_dev:x}-{status.st_ino:x}"


def connect(run_dir: Path, *, timeout_s: float) -> Connection | None:
    """Return a connection to the run's SMP; None if no process listens on the socket.

    If the socket's file was removed, the SMP is found by its other socket.

    Raises:
        OSError: the socket exists but may not be used (permissions), or does not answer in time.
    """
    with address(run_dir) as path:
        sock = _connected(path, timeout_s)
    if sock is None:
        sock = _connected(_name(run_dir), timeout_s)
        if sock is not None and peer_uid(sock) != os.geteuid():
            sock.close()
            sock = None
    return Connection(sock) if sock is not None else None


def _connected(path: str, timeout_s: float) -> socket.socket | None:
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(path)
            return sock
        except OSError as error:
            sock.close()
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                return None
            # More processes may wait to be accepted than the kernel lets wait: all try again.
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.5, 1.5) * _RETRY_S)


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel states it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])

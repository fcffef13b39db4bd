"""The standby process of a host: it has imported torch and holdfast, and forks ranks on demand.

README.md says which rules it keeps, and why.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

from holdfast.launch import rank
from holdfast.launch.client import READY

PRELOADED = (
    *("torch", "torch._dynamo", "torch.nn.parallel", "torch.profiler._cupti_monitor"),
    *("numpy", "numpy.random", "multiprocessing.spawn", "holdfast.guard"),
    *("holdfast.protection", "holdfast.snapshot.client.snapshots", "holdfast.optimizers"),
)
_REQUEST_LIMIT_S = 10.0
_MOST_BYTES = 16 * 2**20
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send a signal when the parent ends; end now if it is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def preload(names: Iterable[str]) -> None:
    """Import modules without starting threads; those that are missing or fail are left to ranks."""
    rank.STARTED_WITH.clear()
    rank.STARTED_WITH.update(os.environ)
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"  # numpy's OpenBLAS starts its threads when it is loaded
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
    os.environ.pop(_BLAS_THREADS)
    if before is not None:
        os.environ[_BLAS_THREADS] = before
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, all of this memory


def unsafe() -> str | None:
    """Return why this process must not be forked; None if it may be."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{threads} threads run in it after its imports"
    with os.scandir("/proc/self/fd") as found:
        opened = [os.readlink(entry.path) for entry in found if entry.is_symlink()]
    cuda = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    if cuda or any(path.startswith(_DEVICES) for path in opened):
        return "its imports opened an accelerator"
    return None


def serve(path: str, parent: int, names: Iterable[str]) -> None:
    """Import modules, and fork a rank for each client that connects to the socket ``path``.

    This returns only in a rank, when its program has ended, or raises SystemExit there.
    """
    end_with_parent(parent, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: _end(path))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # of a terminal
        signal.signal(number, signal.SIG_IGN)
    listener = _listen(path)
    preload(names)
    why = unsafe()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects what has ended
    while True:
        connection, _ = listener.accept()
        server = os.getpid()
        # No signal may be lost before a forked process has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if os.fork() == 0:
            listener.close()
            end_with_parent(server, signal.SIGKILL)
            rank.starter = parent
            _attend(connection, why)
            return
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
        connection.close()


def _end(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    os._exit(0)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mask = os.umask(0o177)
    with suppress(FileNotFoundError):
        os.unlink(path)
    listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    os.umask(mask)
    os.close(folder)
    listener.listen(1024)
    return listener


def _attend(connection: socket.socket, why: str | None) -> None:
    """Fork the rank that a client asks for, and tell it how that ended; kill it if it is gone.

    Only the rank returns.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        request, descriptors = _read(connection)
    except (OSError, ValueError, TypeError):  # the client sees it closed, and starts the rank
        os._exit(0)
    why = why or request.obstacle()
    own = os.getpid()
    pid = os.fork() if why is None else 0
    if why is None and pid == 0:
        connection.close()
        end_with_parent(own, signal.SIGKILL)
        rank.become(request, descriptors)
        rank.run(request)
        return
    for descriptor in (0, 1, 2, *descriptors):  # a pipe of the rank is to end with the rank
        os.close(descriptor)
    with suppress(OSError):
        connection.sendall(struct.pack("!i", pid) + (why or "").encode())
    if pid:
        ended = os.pidfd_open(pid)
        if ended not in select.select([connection.fileno(), ended], [], [])[0]:
            for victim in (pid, -pid):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
        with suppress(OSError):
            connection.sendall(struct.pack("!i", os.waitpid(pid, 0)[1]))
    os._exit(0)


def _read(connection: socket.socket) -> tuple[rank.Request, list[int]]:
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", peer)[1] != os.geteuid():
        raise ValueError("a client of another user")
    connection.settimeout(_REQUEST_LIMIT_S)
    connection.sendall(READY)
    head, descriptors, *_ = socket.recv_fds(connection, 4, 3)
    size = struct.unpack("!I", head)[0] if len(head) == 4 else 0
    if not 0 < size <= _MOST_BYTES or len(descriptors) != 3:
        raise ValueError(f"a request of {size} bytes with {len(descriptors)} descriptors")
    blob = connection.recv(size, socket.MSG_WAITALL)
    connection.settimeout(None)
    return rank.Request(**json.loads(blob)), descriptors


def main() -> None:
    """Serve as a program: arguments are the socket, the parent's process id, and more modules."""
    path, parent, *modules = sys.argv[1:]
    if sys.path[:1] == [""]:  # the directory is no place for modules of a script elsewhere
        del sys.path[0]
    serve(path, int(parent), (*PRELOADED, *modules))

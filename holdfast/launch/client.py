"""The process that torchrun starts in place of a rank, which the standby process forks for it.

It runs as ``python -I -S`` and imports little, so that it takes a few hundredths of a second. It
passes its arguments, environment and descriptors 0 to 2 on, relays signals to the rank, and ends as
the rank does. If the standby process cannot serve, it becomes the rank in the ordinary way.
"""

import array
import contextlib
import errno
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

READY = b"."
# How long the standby process may take for its imports; the ordinary start follows.
START_LIMIT_S = 60.0
_POLL_S = 0.02
# torchrun sends these to the whole process group of a rank; the others reach the rank alone.
_GROUP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_RELAYED = (*_GROUP, signal.SIGUSR1, signal.SIGUSR2)


def main(path: str, words: Sequence[str]) -> NoReturn:
    """Be the rank that ``python *words`` would be, with the standby process at ``path``."""
    ignored = [number for number in _RELAYED if signal.getsignal(number) is signal.SIG_IGN]
    try:
        connection = _connect(path)
        pid = _ask(connection, words, ignored)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        text = f"rank {os.environ.get('RANK', '?')} starts without the standby process: {why}"
        print(f"holdfast run: {text}", file=sys.stderr, flush=True)
        os.execv(sys.executable, [sys.executable, *words])
    for number in set(_RELAYED).difference(ignored):
        signal.signal(number, lambda received, _: _relay(pid, received))
    said = connection.recv(4, socket.MSG_WAITALL)
    _end(struct.unpack("!i", said)[0] if len(said) == 4 else signal.SIGKILL)


def _connect(path: str) -> socket.socket:
    """Connect to the standby process, and wait until it has imported everything."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The path of a Unix socket may have 107 bytes; through a directory descriptor any path fits.
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    limit_s = time.monotonic() + START_LIMIT_S
    while code := connection.connect_ex(f"/proc/self/fd/{folder}/{os.path.basename(path)}"):
        if code != errno.ENOENT or time.monotonic() > limit_s:
            raise OSError(code, os.strerror(code))
        time.sleep(_POLL_S)  # the process has only just been started
    os.close(folder)
    connection.settimeout(START_LIMIT_S)
    if connection.recv(1) != READY:
        raise ValueError("it ended during its imports")
    connection.settimeout(None)
    return connection


def _ask(connection: socket.socket, words: Sequence[str], ignored: Sequence[int]) -> int:
    """Have a rank forked; return its process id, or raise ValueError with the reason."""
    rank: dict[str, object] = {"words": list(words), "folder": os.getcwd()}
    rank |= {"environment": dict(os.environ), "cores": sorted(os.sched_getaffinity(0))}
    rank["ignored"] = list(ignored)
    blob = json.dumps(rank).encode()
    head, descriptors = struct.pack("!I", len(blob)), array.array("i", (0, 1, 2))
    connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(blob)
    said = connection.recv(4, socket.MSG_WAITALL)
    pid = int(struct.unpack("!i", said)[0]) if len(said) == 4 else 0
    if pid <= 0:
        raise ValueError(connection.recv(4096, socket.MSG_WAITALL).decode() or "it ended")
    return pid


def _relay(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        # Before it has become the leader of a group, there is nobody else in it.
        os.kill(-pid if number in _GROUP and os.getpgid(pid) == pid else pid, number)


def _end(status: int) -> NoReturn:
    """End with the exit code of a wait status, or by its signal, without a core of our own."""
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))

"""A process that starts the SMPs of a run directory, so that they outlive what starts a trainer.

Slurm and Kubernetes end a trainer by killing everything in its cgroup, and with it an SMP that the
trainer has started. If a host serves the run directory from another cgroup (a sidecar container, a
step or a unit of its own), the trainer asks it to start the SMP there.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from holdfast.errors import ConfigError
from holdfast.snapshot.transport import local

SOCKET_NAME = "smp-host.sock"
_LONGEST_BYTES = 2**16
_POLL_S = 1.0


def spawn(arguments: Sequence[str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start the process that starts an SMP, in a session of its own; it ends once that listens."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.snapshot.node.smp", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def ask(run_dir: Path, arguments: Sequence[str], timeout_s: float) -> int | None:
    """Have the host of a run directory start an SMP; with no arguments, ask whether it is there.

    Returns:
        The exit code of the process that starts the SMP; None if no host answers.
    """
    try:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
            local.address(run_dir, SOCKET_NAME) as address,
        ):
            sock.settimeout(timeout_s)
            sock.connect(address)
            sock.send(json.dumps(list(arguments)).encode())
            return int(sock.recv(_LONGEST_BYTES) or b"1")
    except TimeoutError:
        return 1  # it may start one yet
    except OSError:
        return None


def serve(run_dir: Path, log: Path, idle: Callable[[], bool]) -> None:
    """Start SMPs on demand until SIGTERM or SIGINT, or until ``idle``, asked each second, is true.

    Raises:
        ConfigError: another host serves the directory, or it cannot be written.
    """
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda found, _: stopped.append(found))
    if ask(run_dir, [], _POLL_S) is not None:
        raise ConfigError(f"another process hosts the SMPs of {run_dir}: end it")
    path = run_dir / SOCKET_NAME
    try:
        path.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
            local.address(run_dir, SOCKET_NAME) as address,
        ):
            sock.bind(address)
            path.chmod(0o600)
            sock.listen()
            while not stopped and not idle():
                if select.select([sock], [], [], _POLL_S)[0]:
                    _answer(sock.accept()[0], log)
                # The SMPs that ended are its children if it is the first process of a namespace.
                with suppress(ChildProcessError):
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot use run_dir {run_dir}: {error}; choose another") from error


def _answer(peer: socket.socket, log: Path) -> None:
    with peer, suppress(OSError, ValueError):
        peer.settimeout(_POLL_S)
        arguments = json.loads(peer.recv(_LONGEST_BYTES))
        code = 0
        if arguments:
            with open(log, "ab") as file:
                code = spawn([str(each) for each in arguments], file).wait()
        peer.send(str(code).encode())

"""Hosts as Linux namespaces of network, host name and process ids, joined by a bridge; needs root.

The bridge is in a namespace of its own, so that this machine's network is not touched and no
address can clash. A namespace lives as long as its first process, which ends with the process that
made it, even if that is killed. The kernel then kills all its processes, and nothing is left
behind.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from holdfast.errors import ConfigError, HoldfastError
from holdfast_lab.trainer.process_groups import start_session

TOOLS = ("unshare", "nsenter", "ip")
LIMIT_S = 10.0
_NETWORK, _BRIDGE, _INTERFACE = "10.77", "switch", "eth0"
# Without a fixed address a bridge takes the lowest one of its ports. It then changes when a host
# ends, and packets to the gateway are lost for minutes, until the hosts look up its address again.
_BRIDGE_MAC = "02:00:0a:4d:ff:01"
# The first process of a namespace becomes the parent of orphans. If it ignores SIGCHLD, the kernel
# removes them when they end.
_FIRST = 'echo "$0" > /proc/sys/kernel/hostname && ip link set lo up && trap "" CHLD && echo up'
# Where a process finds the folder of the namespaces that it is to enter.
VARIABLE = "HOLDFAST_NAMESPACES"
_CLONE_NEWNET = 0x40000000
_KINDS = {"net": _CLONE_NEWNET, "uts": 0x04000000, "pid_for_children": 0x20000000}
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def obstacle() -> str:
    """Return the reason why namespaces cannot be made on this machine; empty if they can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (util-linux, iproute2)"
    if os.geteuid() != 0:
        return "that takes root"
    try:
        Switch().close()
    except ConfigError as error:
        return str(error)
    return ""


class _Namespace:
    def __init__(self, name: str) -> None:
        command = ["unshare", "--net", "--uts", "--pid", "--fork", "sh", "-c"]
        self._keeper = subprocess.Popen(
            [*command, f"{_FIRST} && exec cat", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"up\n":
            said = self._keeper.communicate(timeout=LIMIT_S)[1].decode(errors="replace")
            raise ConfigError(f"no namespaces can be made here: {said.strip()}")

    @property
    def pid(self) -> int:
        """Number of a process in the network namespace, as this process sees it."""
        return self._keeper.pid

    @property
    def folder(self) -> Path:
        """Where the kernel shows the namespaces."""
        return Path(f"/proc/{self.pid}/ns")

    def entering(self, command: Sequence[str], *, as_process: bool) -> list[str]:
        """Return the command line that runs a command in this host's namespaces.

        With ``as_process`` it also gets a process number of the host.
        """
        own = self.folder
        words = ["nsenter", f"--net={own}/net", f"--uts={own}/uts"]
        words += [f"--pid={own}/pid_for_children"] if as_process else []
        return [*words, "--", *command]

    def ip(self, *lines: str) -> None:
        """Configure the network with iproute2's commands."""
        done = subprocess.run(
            self.entering(["ip", "-batch", "-"], as_process=False),
            input="\n".join(lines),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise ConfigError(f"ip failed at {'; '.join(lines)}: {done.stderr.strip()}")

    def end(self) -> None:
        """End the first process and, by that, all processes at once; wait until they are gone."""
        streams = (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr)
        for stream in streams:
            assert stream is not None
            stream.close()
        try:
            self._keeper.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise HoldfastError(
                f"processes in the namespaces of {self.pid} do not end after SIGKILL: see `ps`"
            ) from error


class NamespaceMachine:
    """An emulated host: its namespaces and its virtual cable to the switch."""

    interface = _INTERFACE

    def __init__(self, switch: _Namespace, name: str, number: int) -> None:
        self.address = f"{_NETWORK}.{number // 250}.{number % 250 + 2}"
        self._switch, self._cable = switch, f"h{number}"
        self._namespace = _Namespace(name)
        try:
            self._connect()
        except ConfigError:
            self._namespace.end()
            raise

    def _connect(self) -> None:
        other_end = f"peer name {_INTERFACE} netns {self._namespace.pid}"
        self._switch.ip(
            f"link add {self._cable} type veth {other_end}",
            f"link set {self._cable} master {_BRIDGE} up",
        )
        self._namespace.ip(
            f"addr add {self.address}/16 dev {_INTERFACE}", f"link set {_INTERFACE} up"
        )

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host and return a local process that ends with its exit code."""
        return start_session(self._namespace.entering(command, as_process=True), env, log)

    def ask(
        self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a process outside that has one forked, which enters the host by ``enter``."""
        return start_session(command, {**env, VARIABLE: str(self._namespace.folder)}, log)

    def end(self) -> None:
        """Kill every process of the host and take its network away."""
        self._namespace.end()

    def link(self, *, up: bool) -> None:
        """Disconnect the host from the network, or connect it again."""
        self._switch.ip(f"link set {self._cable} {'up' if up else 'down'}")


class Switch:
    """The bridge between the hosts, in which this process can serve them at ``gateway``."""

    kind = "network namespaces"
    gateway = f"{_NETWORK}.255.1"

    def __init__(self) -> None:
        self._namespace = _Namespace(_BRIDGE)
        self._numbers = itertools.count()
        try:
            self._namespace.ip(
                f"link add {_BRIDGE} address {_BRIDGE_MAC} type bridge",
                f"addr add {self.gateway}/16 dev {_BRIDGE}",
                f"link set {_BRIDGE} up",
            )
        except ConfigError:
            self._namespace.end()
            raise

    def make(self, name: str) -> NamespaceMachine:
        """Make a new host with an unused address."""
        return NamespaceMachine(self._namespace, name, next(self._numbers))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function whose sockets belong to the gateway, whichever thread uses them."""
        results: list[T] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                _join(self._namespace.folder / "net", _CLONE_NEWNET)
                results.append(function())
            except BaseException as error:  # raised again in the calling thread
                errors.append(error)

        thread = threading.Thread(target=inside)  # each thread can have a namespace of its own
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """Remove the network bridge."""
        self._namespace.end()


def enter() -> None:
    """Go on as a process of the host that the environment names, if it names one.

    It is a child of the process that called, which ends as the child does.
    """
    folder = os.environ.pop(VARIABLE, None)
    if folder is None:
        return
    for name, kind in _KINDS.items():
        _join(Path(folder) / name, kind)
    if (pid := os.fork()) == 0:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _join(path: Path, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _libc.setns(descriptor, kind):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(descriptor)

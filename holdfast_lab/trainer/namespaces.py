"""Hosts as network, host name and process-id namespaces, wired to one bridge. Linux, as root.

The bridge stands in a namespace of its own, so that nothing of this machine's network is touched
and no address can clash. Every namespace lives as long as its first process, which ends when the
process that made it does, however that ends: the kernel then kills what runs in it, and nothing
has a name that could be left behind.
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

TOOLS = ("unshare", "nsenter", "ip")
LIMIT_S = 10.0
_NETWORK, _BRIDGE, _INTERFACE = "10.77", "switch", "eth0"
# Left to itself a bridge takes the lowest of its ports' addresses: another one when a host goes,
# and what the others then send to the gateway is lost for minutes, until they ask for it anew.
_BRIDGE_MAC = "02:00:0a:4d:ff:01"
# Whoever ignores SIGCHLD need not reap what is left to it, as every first process must.
_FIRST = 'echo "$0" > /proc/sys/kernel/hostname && ip link set lo up && trap "" CHLD && echo up'
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def obstacle() -> str:
    """Return why namespaces cannot be made on this machine; empty if they can."""
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
        """A process in the network namespace, as this process knows it."""
        return self._keeper.pid

    def entering(self, command: Sequence[str], *, as_process: bool) -> list[str]:
        """Return the command line that runs a command in this host's namespaces.

        Args:
            command: The command and its arguments.
            as_process: Whether it is a process of the host, with the host's process numbers.
        """
        own = f"/proc/{self.pid}/ns"
        enter = ["nsenter", f"--net={own}/net", f"--uts={own}/uts"]
        enter += [f"--pid={own}/pid_for_children"] if as_process else []
        return [*enter, "--", *command]

    def ip(self, *lines: str) -> None:
        """Configure the network with iproute2's commands.

        Raises:
            ConfigError: they fail, with the reason.
        """
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
        """End its first process and so, at once and together, every other; waits for all.

        Raises:
            HoldfastError: one of them does not end within ``LIMIT_S``.
        """
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
        return subprocess.Popen(
            self._namespace.entering(command, as_process=True),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(env),
            start_new_session=True,
        )

    def end(self) -> None:
        """Kill every process of the host and take its network away."""
        self._namespace.end()

    def link(self, *, up: bool) -> None:
        """Disconnect the host from the network, or connect it again."""
        self._switch.ip(f"link set {self._cable} {'up' if up else 'down'}")


class Switch:
    """The bridge between the hosts; at ``gateway`` this process can serve all of them.

    Raises:
        ConfigError: namespaces cannot be made here, with the reason.
    """

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
        """Call a function whose sockets are then those of the gateway, whoever uses them."""
        results: list[T] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                _join_network(Path(f"/proc/{self._namespace.pid}/ns/net"))
                results.append(function())
            except BaseException as error:  # raised where it is waited for
                errors.append(error)

        thread = threading.Thread(target=inside)  # a namespace is a thread's, not a process's
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """Remove the network bridge."""
        self._namespace.end()


def _join_network(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(descriptor)

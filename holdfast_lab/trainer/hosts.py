"""Emulated hosts on one machine, for demos and tests; each can be killed whole and replaced.

with hosts(3, folder) as cluster:
    trainer = cluster[0].run(["torchrun", …], log=folder / "torchrun.log")
    cluster[1].kill()  # every process, daemons included
    cluster[1].replace().run(…)
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from holdfast import config
from holdfast.errors import ConfigError, HoldfastError
from holdfast_lab.trainer.namespaces import NamespaceMachine, Switch, obstacle
from holdfast_lab.trainer.process_groups import Loopback, ProcessGroup

KINDS = (Switch.kind, Loopback.kind)
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
MOST = 64
LIMIT_S = 10.0

T = TypeVar("T")


class Host:
    """A host; its replacement is another host with another name and address.

    Attributes:
        name: ``host-<index>``, with a ``b`` appended for every life before this one.
        address: at which the other hosts reach it; none had it before.
        interface: its network interface.
        run_dir: its own directory, empty at first; ``HOLDFAST_RUN_DIR`` of its processes.
        alive: False once it was killed.
    """

    def __init__(self, cluster: "Cluster", index: int, life: int) -> None:
        self.index, self.life = index, life
        self.name = f"host-{index}" + "b" * life
        self.run_dir = cluster.folder / self.name
        try:
            self.run_dir.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.run_dir}: {error.strerror}") from error
        self._cluster = cluster
        self._machine: NamespaceMachine | ProcessGroup = cluster.wiring.make(self.name)
        self._started: list[subprocess.Popen[bytes]] = []
        self.address, self.interface = self._machine.address, self._machine.interface
        self.alive = True

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host.

        Args:
            command: program and arguments.
            env: added to this process's environment and the host's run directory, address and
                interface.
            log: file to which its output is appended.

        Raises:
            HoldfastError: the host was killed.
        """
        if not self.alive:
            raise HoldfastError(f"{self.name} was killed: start {command[0]} on its replacement")
        own = {
            config.RUN_DIR_VARIABLE: str(self.run_dir),
            config.ADDRESS_VARIABLE: self.address,
            INTERFACE_VARIABLE: self.interface,
        }
        with log.open("ab") as file:
            process = self._machine.start(command, {**os.environ, **own, **(env or {})}, file)
        self._started.append(process)
        return process

    def kill(self) -> None:
        """SIGKILL every process of the host at once, and wait until they are gone.

        The others see its connections closed. After ``link(up=False)`` they see nothing at all, as
        when the power fails.
        """
        if self.alive:
            self.alive = False
            self._machine.end()
            for process in self._started:
                process.wait(LIMIT_S)

    def link(self, *, up: bool) -> None:
        """Cut the host off from the others, or connect it again; its processes run on.

        Raises:
            ConfigError: the hosts are process groups, which have no network of their own.
        """
        self._machine.link(up=up)

    def replace(self) -> "Host":
        """Start a new host in this one's place, which is killed first if it is still alive."""
        return self._cluster.replace(self)


class Cluster:
    """The hosts, made of ``kind``; this process serves them at the address ``gateway``."""

    def __init__(self, wiring: Switch | Loopback, folder: Path) -> None:
        self.wiring, self.folder = wiring, folder
        self.kind, self.gateway = wiring.kind, wiring.gateway
        self._hosts: list[Host] = []

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self) -> Host:
        """Add a host."""
        self._hosts.append(Host(self, len(self), 0))
        return self._hosts[-1]

    def replace(self, host: Host) -> Host:
        """Replace a lost host by a new one, as ``Host.replace`` does."""
        host.kill()
        self._hosts[host.index] = Host(self, host.index, host.life + 1)
        return self._hosts[host.index]

    def call(self, function: Callable[[], T]) -> T:
        """Call a function so that the sockets it makes are reached by all hosts at ``gateway``."""
        return self.wiring.call(function)


def kind_here() -> tuple[str, str]:
    """Return the kind of hosts that this machine allows, and why they are no network namespaces."""
    reason = obstacle()
    return (Loopback.kind, reason) if reason else (Switch.kind, "")


@contextmanager
def hosts(count: int, folder: Path, *, kind: str | None = None) -> Iterator[Cluster]:
    """Make hosts on this machine; with the block all of them and whatever runs on them ends.

    With root, ``unshare``, ``nsenter`` and ``ip`` they are namespaces: network, host name and
    process ids of their own, which end with this process even if it is killed. Else they are
    process groups with addresses 127.0.0.2 and up, which a killed process leaves to whoever makes
    hosts next.

    Args:
        count: how many, ``MOST`` at most.
        folder: where each has its own run directory; none of them may exist.
        kind: one of ``KINDS``; by default what this machine allows (see ``kind_here``).

    Raises:
        ConfigError: the count is out of range, or this machine does not allow the kind.
    """
    if not 1 <= count <= MOST:
        raise ConfigError(f"{count} hosts cannot be made: at least 1, at most {MOST}")
    chosen = kind or kind_here()[0]
    if chosen not in KINDS:
        raise ConfigError(f"kind = {kind!r} is unknown; valid: {', '.join(KINDS)}")
    with ExitStack() as stack:
        wiring = Switch() if chosen == Switch.kind else Loopback()
        stack.callback(wiring.close)
        cluster = Cluster(wiring, folder)
        stack.callback(_kill_all, cluster)
        for _ in range(count):
            cluster.add()
        yield cluster


def _kill_all(cluster: Cluster) -> None:
    with ExitStack() as stack:
        for host in cluster:
            stack.callback(host.kill)

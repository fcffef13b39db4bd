"""Emulated hosts on one machine, for demos and tests; each can be killed and replaced.

    with hosts(3, folder) as cluster:
        trainer = cluster[0].run(["torchrun", …], log=folder / "torchrun.log")
        cluster[1].kill()  # every process, daemons included
        cluster[1].replace().run(…)

``hosts`` describes the two kinds of emulation.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from holdfast import config
from holdfast.errors import ConfigError, HoldfastError
from holdfast.launch.service import Standby
from holdfast_lab.trainer.namespaces import NamespaceMachine, Switch, obstacle
from holdfast_lab.trainer.process_groups import Loopback, ProcessGroup

KINDS = (Switch.kind, Loopback.kind)
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
MOST = 64
LIMIT_S = 10.0

T = TypeVar("T")


class Host:
    """An emulated host. Its replacement is another host with another name and address.

    Attributes:
        name: ``host-<index>``, with a ``b`` appended for each host that this one replaces.
        address: Address at which other hosts reach it; no earlier host had it.
        interface: Name of its network interface.
        run_dir: Directory of its own, empty at first; ``HOLDFAST_RUN_DIR`` of its processes.
        alive: True until the host is killed.
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
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path,
        source: Standby | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host, with its output appended to the file ``log``.

        Its environment is this process's, the host's run directory, address and interface, and
        ``env``. With ``source`` the command is a Python module, and its process, which has to call
        ``namespaces.enter`` first, is forked from ``source``, if the host is a namespace.

        Raises:
            HoldfastError: The host was killed.
        """
        if not self.alive:
            raise HoldfastError(f"{self.name} was killed: start {command[0]} on its replacement")
        own = {
            config.RUN_DIR_VARIABLE: str(self.run_dir),
            config.ADDRESS_VARIABLE: self.address,
            INTERFACE_VARIABLE: self.interface,
        }
        start = self._machine.start
        if source is not None and isinstance(self._machine, NamespaceMachine):
            start, command = self._machine.ask, [command[0], *source.arguments(command[1:])]
        with log.open("ab") as file:
            process = start(command, {**os.environ, **own, **(env or {})}, file)
        self._started.append(process)
        return process

    def kill(self) -> None:
        """End every process of the host at once with SIGKILL, and wait until they are gone.

        Other hosts see its connections closed. After ``link(up=False)`` they see nothing at all, as
        after a power failure.
        """
        if self.alive:
            self.alive = False
            self._machine.end()
            for process in self._started:
                process.wait(LIMIT_S)

    def link(self, *, up: bool) -> None:
        """Cut the host off from the others, or connect it again; its processes keep running.

        Raises:
            ConfigError: The hosts are process groups, which have no network of their own.
        """
        self._machine.link(up=up)

    def reserve(self) -> "Host":
        """Make the host that will replace this one, unless it is made already."""
        return self._cluster.reserve(self)

    def replace(self) -> "Host":
        """Start a new host in this one's place, which is killed first if it is still alive."""
        return self._cluster.replace(self)


class Cluster:
    """The hosts of one ``kind``; this process serves them at the address ``gateway``."""

    def __init__(self, wiring: Switch | Loopback, folder: Path) -> None:
        self.wiring, self.folder = wiring, folder
        self.kind, self.gateway = wiring.kind, wiring.gateway
        self._hosts: list[Host] = []
        self.reserves: dict[int, Host] = {}

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
        self._hosts[host.index] = self.reserve(host)
        return self.reserves.pop(host.index)

    def reserve(self, host: Host) -> Host:
        """Return the host that will replace another one, as ``Host.reserve`` does."""
        if host.index not in self.reserves:
            self.reserves[host.index] = Host(self, host.index, host.life + 1)
        return self.reserves[host.index]

    def call(self, function: Callable[[], T]) -> T:
        """Call a function such that all hosts reach the sockets that it makes, at ``gateway``."""
        return self.wiring.call(function)


def kind_here() -> tuple[str, str]:
    """Return the kind of hosts that this machine allows, and the reason if it is process groups."""
    reason = obstacle()
    return (Loopback.kind, reason) if reason else (Switch.kind, "")


@contextmanager
def hosts(count: int, folder: Path, *, kind: str | None = None) -> Iterator[Cluster]:
    """Make emulated hosts; when the context ends, they and all their processes end.

    With root, ``unshare``, ``nsenter`` and ``ip``, hosts are namespaces with a network, a host name
    and process ids of their own, which end with this process even if it is killed. Otherwise they
    are process groups with addresses from 127.0.0.2; what a killed process leaves running is ended
    when hosts are made the next time.

    Args:
        count: Number of hosts, ``MOST`` at most.
        folder: Folder of the hosts' run directories, none of which may exist.
        kind: One of ``KINDS``; by default the kind that ``kind_here`` returns.

    Raises:
        ConfigError: The count is out of range, or this machine does not allow the kind.
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
        for host in (*cluster, *cluster.reserves.values()):
            stack.callback(host.kill)

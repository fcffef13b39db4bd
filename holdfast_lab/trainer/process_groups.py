"""Hosts as groups of processes with loopback addresses, where namespaces cannot be made.

Every process that is started on such a host, also as a daemon, inherits an environment variable
that names the host and its owner. By it the processes of a host are found and killed together. What
a killed owner left running is killed when hosts are made the next time.
"""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

from holdfast.errors import ConfigError, HoldfastError

VARIABLE = "HOLDFAST_HOST"
LIMIT_S = 10.0

T = TypeVar("T")


def kill_marked(chosen: Callable[[str], bool]) -> None:
    """Kill the processes whose mark ``chosen`` accepts, and repeat until none is left."""
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid, mark in _marked() if chosen(mark) and _kill(pid, mark)]:
        if time.monotonic() > deadline:
            raise HoldfastError(f"processes {left} do not end after SIGKILL; end them by hand")
        time.sleep(0.01)


def kill_orphans() -> None:
    """Kill the processes of emulated hosts whose owning process has ended."""
    kill_marked(lambda mark: _born(mark.partition(".")[0]) != mark.split(".")[1])


def _marked() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (mark := _mark_of(int(name))):
            yield int(name), mark


def _mark_of(pid: int) -> str:
    """Return a process's inherited mark; empty if there is none or it cannot be read."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, mark = entry.partition(b"=")
            if name == VARIABLE.encode() and mark.count(b".") == 2:
                return mark.decode()
    return ""


def _kill(pid: int, mark: str) -> bool:
    """Kill the process if it still has this mark; return False if it does not."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _mark_of(pid) != mark:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _born(pid: str) -> str:
    """Return the start time of a process in ticks since boot; empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def start_session(
    command: Sequence[str], env: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with its output written to a log."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(env),
        start_new_session=True,
    )


class ProcessGroup:
    """An emulated host: the processes that were started on it."""

    interface = "lo"

    def __init__(self, number: int) -> None:
        self.address = f"127.0.{number // 250}.{number % 250 + 2}"
        owner = os.getpid()
        self._mark = f"{owner}.{_born(str(owner))}.{number}"

    def start(
        self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host."""
        return start_session(command, {**env, VARIABLE: self._mark}, log)

    def end(self) -> None:
        """Kill every process of the host."""
        kill_marked(lambda mark: mark == self._mark)

    def link(self, *, up: bool) -> None:
        """Refuse to disconnect a host, because the loopback has no cable."""
        raise ConfigError(f"link(up={up}) needs hosts with a network of their own: run as root")


class Loopback:
    """The network of the hosts: this machine's loopback interface."""

    kind = "process groups"
    gateway = "127.0.0.1"
    _numbers = itertools.count()  # shared by all clusters, whose marks must differ

    def __init__(self) -> None:
        kill_orphans()

    def make(self, name: str) -> ProcessGroup:
        """Make a new host with an unused address."""
        return ProcessGroup(next(self._numbers))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in this process, whose network all hosts share."""
        return function()

    def close(self) -> None:
        """Do nothing, as there is nothing to remove."""

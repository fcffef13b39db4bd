"""The address at which the other nodes reach this one."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from holdfast import config
from holdfast.errors import ConfigError

_GET_IPV4 = 0x8915  # SIOCGIFADDR
_IPV6_TABLE = Path("/proc/net/if_inet6")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GLOBAL = "00"  # the scope of an IPv6 address that is valid everywhere


class Place(NamedTuple):
    """A node's host address, and the network stack that it is in.

    Processes of one stack reach each other over its loopback address, others do not.
    """

    host: str
    stack: str


def own_address() -> str:
    """Return the address of this node for other nodes.

    It is ``HOLDFAST_ADDRESS``, else that of the interface ``HOLDFAST_INTERFACE``, else the one from
    which ``MASTER_ADDR`` is reached; IPv4 or IPv6.

    Raises:
        ConfigError: there is no such interface, it has no address, or MASTER_ADDR has no route.
    """
    if given := config.address():
        return given
    if name := config.interface():
        return _of_interface(name)
    master = config.master_address()
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            # A connected UDP socket sends nothing; the kernel only chooses the own address for it.
            sock.connect(address)
            return str(sock.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"this node's address cannot be derived from MASTER_ADDR={master!r} ({error}): set "
            f"{config.ADDRESS_VARIABLE} to the address at which the other nodes reach it, or "
            f"{config.INTERFACE_VARIABLE} to the network interface"
        ) from error


def own_place(host: str) -> Place:
    """Return where a node is that other nodes reach at ``host``."""
    stack = socket.gethostname()
    with suppress(OSError):
        stack = f"{_BOOT.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return Place(host, stack)


def check(places: Sequence[Place]) -> None:
    """Refuse a loopback address that other nodes would look for in vain.

    Raises:
        ConfigError: a node of several would be reached at an address of its own loopback device.
    """
    alone = len({place.stack for place in places}) == 1
    for node, place in enumerate(() if alone else places):
        loopback = place.host == "localhost"
        with suppress(ValueError):
            loopback = ipaddress.ip_address(place.host.split("%")[0]).is_loopback
        if loopback:
            raise ConfigError(
                f"node {node} would be reached at {place.host}, which is loopback and leads every "
                "other node to itself (Debian writes 127.0.1.1 to /etc/hosts): set "
                f"{config.ADDRESS_VARIABLE} or {config.INTERFACE_VARIABLE} on that node"
            )


def _of_interface(name: str) -> str:
    if name not in (names := [found for _, found in socket.if_nameindex()]):
        raise ConfigError(
            f"{config.INTERFACE_VARIABLE}={name!r}: this node has the interfaces {', '.join(names)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, suppress(OSError):
        answer = fcntl.ioctl(sock, _GET_IPV4, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in _IPV6_TABLE.read_text().splitlines():
            digits, _, _, scope, _, device = line.split()
            if device == name and (scope == _GLOBAL or name == "lo"):
                return str(ipaddress.IPv6Address(int(digits, 16)))
    raise ConfigError(f"{config.INTERFACE_VARIABLE}={name!r}: this interface has no address")

"""The address of a node for others: given, of an interface, of a route; loopback; the rate."""

import fcntl
import selectors
import socket
from collections.abc import Callable
from functools import partial

import pytest

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.snapshot.node import addresses
from holdfast.snapshot.node.addresses import Place
from holdfast.snapshot.transport.links import Links, TokenBucket
from holdfast.snapshot.transport.tcp import TcpTransport

Set = Callable[[str, str], None]


@pytest.fixture
def set_(monkeypatch: pytest.MonkeyPatch) -> Set:
    for name in (config.ADDRESS_VARIABLE, config.INTERFACE_VARIABLE, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch.setenv


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({config.ADDRESS_VARIABLE: "10.1.2.3", config.INTERFACE_VARIABLE: "lo"}, "10.1.2.3"),
        ({config.INTERFACE_VARIABLE: "lo", "MASTER_ADDR": "nowhere"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.5"}, "127.0.0.1"),
        ({"MASTER_ADDR": "::1"}, "::1"),
        ({}, "127.0.0.1"),
    ],
)
def test_the_address_is_given_or_that_of_the_interface_or_of_the_route(
    set_: Set, variables: dict[str, str], address: str
) -> None:
    for name, value in variables.items():
        set_(name, value)
    found = addresses.own_address()
    assert found == address or (address.startswith("127.") and found.startswith("127."))


def test_an_interface_with_ipv6_alone_has_an_address(
    set_: Set, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_ipv4(*_: object) -> bytes:
        raise OSError

    monkeypatch.setattr(fcntl, "ioctl", without_ipv4)
    set_(config.INTERFACE_VARIABLE, "lo")
    assert addresses.own_address() == "::1"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (config.INTERFACE_VARIABLE, "ib77", "interfaces .*lo"),
        ("MASTER_ADDR", "no.such.host.invalid", "HOLDFAST_INTERFACE to the network interface"),
    ],
)
def test_an_address_that_cannot_be_found_is_an_error(
    set_: Set, name: str, value: str, message: str
) -> None:
    set_(name, value)
    with pytest.raises(ConfigError, match=message):
        addresses.own_address()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback_is_refused_between_hosts_and_only_there(host: str) -> None:
    own = addresses.own_place(host)
    addresses.check([own])
    addresses.check([own, addresses.own_place(host)])
    addresses.check([Place("10.0.0.1", "one"), Place("fe80::1%eth0", "another")])
    with pytest.raises(ConfigError, match=r"node 1 .* loopback .*HOLDFAST_INTERFACE"):
        addresses.check([Place("10.0.0.1", "another host"), own])


def test_a_rate_is_kept_in_the_mean_and_a_pause_saves_up_a_quarter_of_a_second() -> None:
    bucket, sent, now = TokenBucket(1000.0), 0, 0.0
    while now < 10.0:
        if (wait_s := bucket.wait_s(now)) > 0:
            now += wait_s
        bucket.take(100)
        sent += 100
    assert 10_000 <= sent <= 10_000 + 250 + 200
    sent = 0
    while not bucket.wait_s(now + 60.0):
        bucket.take(100)
        sent += 100
    assert sent <= 250 + 100
    unlimited = TokenBucket(0.0)
    unlimited.take(10**12)
    assert unlimited.wait_s(0.0) == 0.0


def test_a_rate_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.PARITY_RATE_VARIABLE, "1 GB")
    with pytest.raises(ConfigError, match="HOLDFAST_PARITY_BYTES_S='1 GB' is not a positive"):
        config.parity_bytes_s()


def test_the_stack_is_that_of_the_network_namespace() -> None:
    assert addresses.own_place("x").stack != socket.gethostname()
    assert addresses.own_place("x") == addresses.own_place("x")


def test_no_node_has_room_for_parities_while_the_rate_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(config.PARITY_RATE_VARIABLE, "1000")
    told: list[object] = []
    tcp = partial(TcpTransport, selectors.DefaultSelector())
    links = Links(tcp, told.append, lambda *_: ({}, b""), told.append, lambda: "")
    monkeypatch.setattr(links, "outlets", lambda: {1: 7})
    assert links.nodes_with_capacity(100.0) == (1,)
    links.send_parity(1, {}, bytes(750))
    assert links.nodes_with_capacity(100.0) == ()
    assert links.wait_s(100.0) == pytest.approx(0.5)
    assert links.nodes_with_capacity(100.6) == (1,)
    assert links.wait_s(100.6) is None

"""Every transport keeps the contract: order, whole frames, limits, ends of connections."""

import selectors
import socket
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from memory_transport import MemoryNetwork, MemoryTransport
from snapshot_tls import certificate
from snapshot_waits import PATIENCE_S, until

from holdfast import config
from holdfast.errors import ConfigError
from holdfast.snapshot.transport import tls
from holdfast.snapshot.transport.frames import Connection, Frame
from holdfast.snapshot.transport.tcp import TcpTransport, dial

BLOB_BYTES = 5 * 2**20 + 3


class Told:
    """What one side was told, in order."""

    def __init__(self) -> None:
        self.new_number = count(1).__next__
        self.said: list[tuple[str, int, object]] = []
        self.frames: dict[int, list[Frame]] = {}

    def accepted(self, connection: int) -> None:
        self.said.append(("accepted", connection, None))

    def received(self, connection: int, frame: Frame) -> None:
        # The memory of a blob is used again.
        kept = Frame(frame.text, bytes(frame.blob))
        self.frames.setdefault(connection, []).append(kept)

    def closed(self, connection: int, reason: str) -> None:
        self.said.append(("closed", connection, reason))

    def violated(self, connection: int, reason: str) -> None:
        self.said.append(("violated", connection, reason))

    def crowded(self) -> None:
        self.said.append(("crowded", 0, None))

    def numbers(self, what: str) -> list[int]:
        return [number for said, number, _ in self.said if said == what]


class Pair:
    """Two transports of a kind, the first of which listens; ``turn`` lets something happen."""

    def __init__(self, make: Callable[[Told], Any], turn: Callable[[], None]) -> None:
        self.told = Told(), Told()
        self.sides = make(self.told[0]), make(self.told[1])
        self.turn = turn

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def reached() -> bool:
            self.turn()
            return condition()

        until(reached, what)

    def connect(self, host: str = "127.0.0.1") -> tuple[int, int]:
        """The numbers of one connection on both sides; the first accepted it."""
        known = len(self.told[0].numbers("accepted"))
        mine = self.told[1].new_number()
        self.sides[1].open(mine, self.sides[0].listen(host))
        self.until(lambda: len(self.told[0].numbers("accepted")) > known, "it is accepted")
        return self.told[0].numbers("accepted")[-1], mine


def tcp() -> tuple[Callable[[Told], Any], Callable[[], None], Callable[[], None]]:
    selector = selectors.DefaultSelector()

    def turn() -> None:
        for key, _ in selector.select(0.01):
            if key.fileobj.fileno() >= 0:  # type: ignore[union-attr]
                key.data()

    made: list[TcpTransport] = []

    def make(told: Told) -> TcpTransport:
        made.append(TcpTransport(selector, told))
        return made[-1]

    def close() -> None:
        for transport in made:
            transport.shut(0.0)
        selector.close()

    return make, turn, close


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["memory", "tcp", "tls"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "memory":
        network = MemoryNetwork()
        yield Pair(lambda told: MemoryTransport(network, told), network.turn)
        return
    if request.param == "tls":
        files = request.getfixturevalue("certificates")
        for name, file in zip(config.TLS_VARIABLES, files, strict=True):
            monkeypatch.setenv(name, file)
    make, turn, close = tcp()
    yield Pair(make, turn)
    close()


def test_frames_arrive_whole_in_order_and_with_their_bytes(pair: Pair) -> None:
    mine, theirs = pair.connect()
    pair.sides[0].trust(mine, 2 * BLOB_BYTES)
    blob = bytes(range(251)) * (BLOB_BYTES // 251)
    for number in range(5):
        left = pair.sides[1].send(theirs, Frame.of({"verb": "x", "number": number}, blob))
        assert left >= 0
        pair.sides[1].send(theirs, Frame.of({"verb": "small", "number": number}))
    pair.until(lambda: len(pair.told[0].frames.get(mine, ())) == 10, "all arrive")
    found = pair.told[0].frames[mine]
    assert [frame.header["number"] for frame in found] == [n for n in range(5) for _ in "ab"]
    assert all(frame.blob == (blob if frame.verb == "x" else b"") for frame in found)
    assert pair.sides[1].send(theirs, Frame.of({"verb": "y"})) < BLOB_BYTES


def test_both_sides_can_send(pair: Pair) -> None:
    mine, theirs = pair.connect()
    pair.sides[0].send(mine, Frame.of({"verb": "hello"}))
    pair.until(lambda: theirs in pair.told[1].frames, "it arrives")
    pair.sides[1].send(theirs, Frame.of({"verb": "answer"}))
    pair.until(lambda: mine in pair.told[0].frames, "the answer arrives")


@pytest.mark.parametrize("frame", [Frame.of({"x": "y" * 5000}), Frame.of({}, b"z")])
def test_before_trust_only_small_frames_without_bytes_are_taken(pair: Pair, frame: Frame) -> None:
    mine, theirs = pair.connect()
    pair.sides[1].send(theirs, frame)
    pair.until(lambda: pair.told[0].numbers("violated") == [mine], "it is refused")
    assert mine not in pair.told[0].frames
    mine, theirs = pair.connect()
    pair.sides[0].trust(mine, 1)
    pair.sides[1].send(theirs, frame)
    pair.until(lambda: mine in pair.told[0].frames, "the same is taken")


def test_the_other_side_learns_of_the_end_and_this_one_is_told_nothing(pair: Pair) -> None:
    mine, theirs = pair.connect()
    pair.sides[0].close(mine)
    pair.until(lambda: pair.told[1].numbers("closed") == [theirs], "the other learns of it")
    assert pair.told[0].numbers("closed") == []
    assert pair.sides[1].send(theirs, Frame.of({})) == 0
    pair.sides[1].trust(theirs, 1)
    pair.sides[1].close(theirs)


def test_an_address_where_nobody_listens_is_told_or_raised(pair: Pair) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        pair.sides[1].open(7, taken.getsockname())
        pair.until(lambda: pair.told[1].numbers("closed") == [7], "the failure is told")
    with pytest.raises(OSError, match="address"):
        pair.sides[0].listen("203.0.113.1")


def test_ipv6(pair: Pair) -> None:
    mine, theirs = pair.connect("::1")
    pair.sides[1].send(theirs, Frame.of({"verb": "x"}))
    pair.until(lambda: mine in pair.told[0].frames, "it arrives")


def test_a_taken_port_is_replaced_by_another(pair: Pair) -> None:
    first = pair.sides[0].listen("127.0.0.1")
    second = pair.sides[1].listen("127.0.0.1", first[1])
    assert second[1] != first[1]
    assert pair.sides[0].listen("127.0.0.1") == first


def test_without_a_certificate_of_the_authority_nobody_gets_in(
    certificates: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in zip(config.TLS_VARIABLES, certificates, strict=True):
        monkeypatch.setenv(name, file)
    make, turn, close = tcp()
    pair = Pair(make, turn)
    address = pair.sides[0].listen("127.0.0.1")
    with socket.create_connection(address, PATIENCE_S) as plain:
        plain.sendall(b"HFS2" + bytes(100))
        pair.until(lambda: pair.told[0].numbers("closed") != [], "it is ended")
    assert pair.told[0].frames == {}
    close()


def test_certificates_that_cannot_be_used_are_an_error_before_anything_starts(
    certificates: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TLS_CERT", certificates[0])
    with pytest.raises(ConfigError, match="set all of"):
        tls.check()
    monkeypatch.setenv("HOLDFAST_TLS_KEY", certificates[0])
    monkeypatch.setenv("HOLDFAST_TLS_CA", certificates[2])
    with pytest.raises(ConfigError, match="cannot be used"):
        tls.check()


def test_a_rank_dials_and_its_frames_are_checked() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        rank = dial(listener.getsockname()[:2], PATIENCE_S)
        accepted = Connection(listener.accept()[0])
        keys = b"a" * 32, b"b" * 32
        rank.secure(*keys)
        accepted.secure(*keys[::-1])
        rank.send({"verb": "x"}, b"bytes", timeout_s=PATIENCE_S)
        assert accepted.receive(timeout_s=PATIENCE_S).blob == b"bytes"
        out = bytearray(5)
        accepted.send({"verb": "y"}, b"other", timeout_s=PATIENCE_S)
        assert rank.receive(timeout_s=PATIENCE_S, into=memoryview(out)).header == {"verb": "y"}
        assert out == b"other"
        accepted.secure(keys[0], keys[0])
        accepted.send({"verb": "y"}, b"other", timeout_s=PATIENCE_S)
        with pytest.raises(ValueError, match="lost or changed"):
            rank.receive(timeout_s=PATIENCE_S, into=memoryview(out))
        rank.close()
        accepted.close()

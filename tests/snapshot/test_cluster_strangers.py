"""Whoever connects to an SMP's port without being of the run: refused, counted, no harm done."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from snapshot_nodes import roster_of
from snapshot_tls import certificate
from snapshot_waits import PATIENCE_S, kill, until

from holdfast import config
from holdfast.snapshot.node import launch
from holdfast.snapshot.node.session import SmpSession
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.transport import frames, handshake
from holdfast.snapshot.transport.remote import Remote

pytestmark = [pytest.mark.processes, pytest.mark.representative, pytest.mark.timeout(120)]

TIMEOUT_S = 10.0
CROWD = 600
CROWD_BYTES = 64 * 2**20


class Node:
    """An SMP process, and its only rank."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self.run_dir = run_dir
        self.session = SmpSession(launch.SmpSettings(run_dir, 1, 1, 60.0), 0)
        said = self.session.listen(host)
        self.address = said.host, said.port

    def status(self) -> dict[str, Any]:
        found = launch.smp_status(self.run_dir)
        assert found is not None
        return found

    @property
    def refused(self) -> int:
        return int(self.status()["refused"])

    def linked(self) -> bool:
        """Whether links to the others stand, and they are heard on their own."""
        status = self.status()
        return status["cluster"]["offline"] == [] and "OFFLINE" not in status["peers"].values()

    def close(self) -> None:
        self.session.close()
        launch.stop_smp(self.run_dir)


class Pair:
    """Two nodes that protect each other."""

    def __init__(self, directory: Path, host: str = "127.0.0.1") -> None:
        self.nodes = [Node(directory / f"node-{node}", host) for node in range(2)]
        addresses, self.secret = [node.address for node in self.nodes], os.urandom(32).hex()
        self.rosters = [roster_of(n, addresses, epoch=2, secret=self.secret) for n in range(2)]
        for node, roster in zip(self.nodes, self.rosters, strict=True):
            node.session.join(roster)

    def linked(self) -> bool:
        return all(node.linked() for node in self.nodes)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(TIMEOUT_S))
    pair = Pair(tmp_path)
    until(pair.linked, "the links stand")
    yield pair
    for node in pair.nodes:
        node.close()


class Stranger:
    """A connection to an SMP, and the challenge that came."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, PATIENCE_S)
        self.frames = frames.Connection(self.socket)
        self.nonce = str(self.read()["nonce"])

    def read(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next frame; ConnectionError if there is none."""
        return self.frames.receive(timeout_s=timeout_s).header

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, secret: str, role: str = "rank", epoch: int = 2) -> dict[str, Any]:
        frame: dict[str, Any] = handshake.claim(secret, role, 0, epoch, self.nonce)[0]
        return frame

    def is_refused(self) -> bool:
        """Whether the SMP ends the connection without another word."""
        with self.socket:
            try:
                self.read()
            except ConnectionError:
                return True
            return False


def replayed(stranger: Stranger, pair: Pair) -> bytes:
    """An answer that was right on another connection."""
    former = Stranger(pair.nodes[0].address)
    answer = frames.encode(former.answer(pair.secret))
    former.send(answer)
    assert former.read()["verb"] == "accepted"
    former.socket.close()
    return answer


# By name, what a stranger sends to a pair of nodes.
ATTACKS: dict[str, Callable[[Stranger, Pair], bytes]] = {
    "garbage": lambda stranger, pair: bytes(range(256)) * 4,
    "half a frame": lambda stranger, pair: frames.encode(stranger.answer(pair.secret))[:-1],
    "nothing": lambda stranger, pair: b"",
    "a blob": lambda stranger, pair: frames.encode(stranger.answer(pair.secret), b"unasked"),
    "no proof": lambda *_: frames.encode({"verb": "answer", "proof": ["ü"] * 3, "node": {}}),
    "another secret": lambda stranger, pair: frames.encode(stranger.answer("00" * 32)),
    "an older epoch": lambda stranger, pair: frames.encode(stranger.answer(pair.secret, epoch=1)),
    "another role": lambda stranger, pair: frames.encode(
        stranger.answer(pair.secret, role="persister")
    ),
    "another port": lambda stranger, pair: frames.encode(
        stranger.answer(pair.secret, role="peer") | {"port": 9}
    ),
    "a proof that was good once": replayed,
}


def serves(pair: Pair) -> bool:
    """Whether a rank of the run is answered by node 0."""
    remote = Remote(pair.rosters[1], 0)
    held = remote.pin(Stamp(2, 0))
    remote.close()
    return not held


def test_strangers_are_refused_and_counted_and_nothing_else_is_disturbed(pair: Pair) -> None:
    node = pair.nodes[0]
    pids = [node.status()["pid"] for node in pair.nodes]
    for count, (name, attack) in enumerate(ATTACKS.items(), start=1):
        stranger = Stranger(node.address)
        stranger.send(attack(stranger, pair))
        assert stranger.is_refused(), name
        until(lambda c=count: node.refused == c, f"{name} is counted")
        assert serves(pair)
        assert node.refused == count
    assert pair.linked()
    assert [node.status()["pid"] for node in pair.nodes] == pids


def test_a_frame_that_trickles_in_is_not_waited_for(pair: Pair) -> None:
    node = pair.nodes[0]
    stranger = Stranger(node.address)
    right = frames.encode(stranger.answer(pair.secret))
    sent = 0

    def refused() -> bool:
        nonlocal sent
        try:
            stranger.send(right[sent : sent + 1])
            sent += 1
            stranger.read(TIMEOUT_S / 100)
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return False

    until(refused, "it is refused")
    assert sent < len(right) - 1
    stranger.socket.close()
    assert node.refused == 1
    assert serves(pair)


def test_a_crowd_of_strangers_keeps_nobody_out_and_takes_little_memory(pair: Pair) -> None:
    node = pair.nodes[0]
    process = psutil.Process(node.status()["pid"])
    before = process.memory_info().rss
    crowd = [Stranger(node.address) for _ in range(CROWD)]
    try:
        for stranger in crowd[-128:]:
            # As much as a header may have, and never all of it.
            stranger.send(frames._PREFIX.pack(b"HFS2", 4096, 0, 0, 0, b"") + bytes(4000))
        assert serves(pair)
        assert node.refused >= CROWD - 1024
        assert process.num_fds() < 1024 + 50
        assert process.memory_info().rss - before < CROWD_BYTES
    finally:
        for stranger in crowd:
            stranger.socket.close()
    until(lambda: node.refused == CROWD, "all are counted")
    assert pair.linked()


def test_nodes_with_certificates_link_over_ipv6_and_serve_nobody_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.TIMEOUT_VARIABLE, str(TIMEOUT_S))
    with monkeypatch.context() as encrypted:
        for name, file in zip(config.TLS_VARIABLES, certificate(tmp_path), strict=True):
            encrypted.setenv(name, file)
        pair = Pair(tmp_path, "::1")
        try:
            until(pair.linked, "the links stand")
            assert serves(pair)
            assert pair.nodes[0].status()["encrypted"]
            for name in config.TLS_VARIABLES:
                encrypted.delenv(name)
            with pytest.raises(ConnectionError):
                Remote(pair.rosters[1], 0, patience_s=2.0).pin(Stamp(2, 0))
            assert pair.linked()
        finally:
            for node in pair.nodes:
                node.close()


@pytest.mark.parametrize("taken", [False, True])
def test_an_smp_that_took_the_place_of_a_lost_one_is_found(pair: Pair, taken: bool) -> None:
    node = pair.nodes[1]
    pid = node.status()["pid"]
    kill(pid)
    with socket.socket() as squatter:
        if taken:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            squatter.bind(node.address)
            squatter.listen()
        node.session.reconnect()
        said = node.session.listen(*node.address)
        node.session.join(pair.rosters[1])
        assert (said.port != node.address[1]) == taken
        until(pair.linked, "the links stand anew")
    assert _roster(pair.nodes[0])["addresses"]["1"] == ["127.0.0.1", said.port]


def _roster(node: Node) -> dict[str, Any]:
    """What an SMP tells its persister of the run."""
    connection = launch.connect(node.run_dir)
    connection.send("roster")
    found: dict[str, Any] = connection.receive().header["roster"]
    connection.close()
    return found

"""Links as a pure state machine: proofs, numbers, MACs, silence, another SMP in a node's place."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from snapshot_nodes import roster_of

from holdfast import config
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.transport import handshake, links
from holdfast.snapshot.transport.frames import Frame
from holdfast.snapshot.transport.links import Links

SECRET = "5e" * 32


class Wire:
    """The transport of one node: what it sends waits in a queue of all nodes."""

    def __init__(self, wires: "Wires", node: int, told: Links) -> None:
        self.wires, self.node, self.told = wires, node, told
        self.sent: list[tuple[int, Frame]] = []
        self.ended: list[int] = []

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        return host, port

    def open(self, connection: int, address: tuple[str, int]) -> None:
        self.wires.open(self.node, connection, address[1] - 100)

    def trust(self, connection: int, max_blob_bytes: int) -> None:
        pass

    def send(self, connection: int, frame: Frame) -> int:
        self.sent.append((connection, frame))
        if (self.node, connection) in self.wires.others:
            self.wires.queue.append((self.wires.others[self.node, connection], frame))
        return 0

    def queued_bytes(self, connection: int) -> int:
        return 0

    def close(self, connection: int) -> None:
        self.ended.append(connection)
        self.wires.close(self.node, connection)

    def tend(self, now: float) -> None:
        pass

    def shut(self, deadline: float) -> None:
        pass


class Wires:
    """Nodes with :class:`Links` each, and the frames between them, in order."""

    def __init__(self, nodes: int = 2) -> None:
        self.now, self.nodes = 0.0, nodes
        self.draw = random.Random(0)
        self.others: dict[tuple[int, int], tuple[int, int]] = {}  # both ends of each connection
        self.queue: deque[tuple[tuple[int, int], Frame]] = deque()
        self.events: list[list[m.Event]] = [[] for _ in range(nodes)]
        self.served: list[Any] = []
        self.left: list[int] = []
        self.deaf: set[int] = set()
        self.links = [self.new(node) for node in range(nodes)]
        for node in range(nodes):
            self.join(node)

    def new(self, node: int) -> Links:
        def serve(_: int, request: object) -> tuple[dict[str, object], bytes]:
            self.served.append(request)
            return {"verb": "gone"}, b""

        wire: Any = partial(Wire, self, node)
        told = self.events[node].append, serve, self.left.append, lambda: "CLEAN"
        given: Any = {"random": lambda: f"{self.draw.getrandbits(64):016x}"}
        return Links(wire, *told, 4, clock=lambda: self.now, **given)

    def join(self, node: int, epoch: int = 1, secret: str = SECRET) -> None:
        addresses = [("10.0.0.1", 100 + number) for number in range(self.nodes)]
        self.links[node].listen(*addresses[node])
        self.links[node].connect(roster_of(node, addresses, epoch=epoch, secret=secret))

    def open(self, node: int, connection: int, other: int) -> None:
        if other in self.deaf:
            self.links[node].closed(connection, "refused")
            return
        number = self.links[other].new_number()
        self.others[node, connection] = other, number
        self.others[other, number] = node, connection
        self.links[other].accepted(number)

    def close(self, node: int, connection: int) -> None:
        other = self.others.pop((node, connection), None)
        if other is not None:
            self.others.pop(other, None)
            self.links[other[0]].closed(other[1], "closed by the other side")

    def deliver(self, change: Callable[[int, Frame], list[Frame]] = lambda _, f: [f]) -> None:
        """Deliver all frames; ``change`` says what becomes of one to a node."""
        while self.queue:
            (node, connection), frame = self.queue.popleft()
            for sent in change(node, frame):
                self.links[node].received(connection, sent)

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        for node in range(self.nodes):
            self.links[node].tend()
        self.deliver()

    def link(self) -> "Wires":
        for _ in range(3):
            self.tick()
        assert all(len(one.outlets()) == self.nodes - 1 for one in self.links)
        return self

    def says(self, node: int, step: int, other: int = 1) -> None:
        self.links[node].send(other, "wrote", {"epoch": 1, "step": step})

    def steps(self, node: int) -> list[int]:
        return [event.step for event in self.events[node] if isinstance(event, m.PeerWrote)]

    def count(self, node: int, kind: type[m.Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events[node])

    def stranger(self) -> tuple[int, str]:
        """The number of a process that connects to node 0, and the nonce that it is sent."""
        wire: Any = self.links[0].transport
        number = self.links[0].new_number()
        self.links[0].accepted(number)
        assert wire.sent[-1][0] == number
        return number, wire.sent[-1][1].header["nonce"]

    def ended(self) -> list[int]:
        """The connections that node 0 has ended."""
        wire: Any = self.links[0].transport
        return wire.ended  # type: ignore[no-any-return]


def test_nodes_link_and_messages_arrive_in_order() -> None:
    wires = Wires(3).link()
    for step in range(5):
        wires.says(0, step)
    wires.deliver()
    assert wires.steps(1) == list(range(5))
    assert wires.steps(2) == []
    wires.tick()
    assert wires.links[0].states() == {1: "CLEAN", 2: "CLEAN"}
    assert [one.refused for one in wires.links] == [0, 0, 0]


def lost(frame: Frame) -> list[Frame]:
    return []


def repeated(frame: Frame) -> list[Frame]:
    return [frame, frame]


def changed(frame: Frame) -> list[Frame]:
    return [replace(frame, text=frame.text.replace(b'"step":2', b'"step":7'))]


def forged(frame: Frame) -> list[Frame]:
    return [Frame(frame.text, frame.blob, number=frame.number)]


@pytest.mark.parametrize("fault", [lost, repeated, changed, forged])
def test_a_frame_that_is_lost_repeated_or_changed_costs_the_link(
    fault: Callable[[Frame], list[Frame]],
) -> None:
    wires = Wires().link()
    linked, before = wires.count(0, m.PeerLinked), wires.links[1].refused
    for step in range(4):
        wires.says(0, step)
    wires.deliver(lambda node, frame: fault(frame) if b'"step":2' in frame.text else [frame])
    # What was right before the fault counts, and nothing after it on this link.
    assert wires.steps(1) == ([0, 1, 2] if fault is repeated else [0, 1])
    assert wires.count(0, m.PeerUnlinked) == 1
    assert wires.links[1].refused == before + 1
    wires.tick()
    assert wires.count(0, m.PeerLinked) == linked + 1
    wires.says(0, 9)
    wires.deliver()
    assert wires.steps(1)[-1] == 9


def test_without_numbers_the_hole_would_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "_check", lambda *_: None)
    wires = Wires().link()
    for step in range(4):
        wires.says(0, step)
    wires.deliver(lambda node, frame: [] if b'"step":2' in frame.text else [frame])
    assert wires.steps(1) == [0, 1, 3]
    assert wires.count(0, m.PeerUnlinked) == 0


def test_a_changed_blob_costs_the_link() -> None:
    wires = Wires().link()
    fields = {"rank": 0, "epoch": 1, "step": 1, "digest": "d"}
    wires.links[0].send(1, "mirror", fields, b"manifest")
    wires.deliver(lambda _, frame: [replace(frame, blob=b"manifesT") if frame.blob else frame])
    assert wires.count(1, m.PeerMirror) == 0
    assert "changed on its way" in wires.links[1].last_refusal


def strange(wires: Wires, **changes: Any) -> int:
    """Let somebody answer the challenge of node 0; return the number of the connection."""
    number, nonce = wires.stranger()
    secret, role = changes.pop("secret", SECRET), changes.pop("role", "peer")
    node, epoch = changes.pop("node", 1), changes.pop("epoch", 1)
    answer, _ = handshake.claim(secret, role, node, epoch, nonce)
    wires.links[0].received(number, Frame.of(answer | changes))
    return number


@pytest.mark.parametrize(
    "changes",
    [
        {"secret": "00" * 32},
        {"epoch": 2},
        {"node": 99},
        {"node": 0},
        {"role": "king"},
        {"port": 9},
        {"port": None},
        {"node": -1},
        {"proof": "ü"},
        {"nonce": []},
        {"more": 1},
        {"instance": "x" * 65},
    ],
)
def test_who_does_not_prove_to_be_another_node_of_the_run_is_refused(changes: Any) -> None:
    wires = Wires()
    number = strange(wires, **changes)
    assert wires.ended() == [number]
    assert wires.links[0].refused == 1
    strange(wires)
    assert wires.ended() == [number]
    assert wires.links[0].refused == 1


def test_a_rank_is_served_and_its_pins_end_with_it() -> None:
    wires = Wires()
    number, nonce = wires.stranger()
    answer, pledge = handshake.claim(SECRET, "rank", 1, 1, nonce)
    wires.links[0].received(number, Frame.of(answer))
    asked = Frame.of({"verb": "pin", "epoch": 1, "step": 3}, number=1)
    wires.links[0].received(number, asked.sealed(pledge.from_connecting))
    assert [served.stamp for served in wires.served] == [Stamp(1, 3)]
    wires.links[0].closed(number, "gone")
    assert wires.left == [number]
    assert wires.links[0].refused == 0


def test_more_strangers_than_can_be_held_replace_the_oldest() -> None:
    wires = Wires()
    alone = [wires.stranger()[0] for _ in range(6)]
    assert wires.ended() == alone[:2]
    wires.links[0].crowded()
    assert wires.ended() == alone[:3]
    assert "no file descriptor is free: raise the limit (ulimit -n)" in wires.links[0].last_refusal
    wires.now += config.timeout_s()
    wires.links[0].tend()
    assert wires.ended() == alone
    assert wires.links[0].refused == 6


def test_silence_is_noticed_and_its_end_as_well() -> None:
    wires = Wires().link()
    before = wires.count(0, m.PeerUnlinked)
    for _ in range(8):
        wires.now += 1.0
        wires.links[0].tend()
    assert wires.links[0].states()[1] == links.OFFLINE
    assert wires.count(0, m.PeerUnlinked) == before + 1
    wires.tick()
    assert wires.links[0].states()[1] == "CLEAN"


def test_another_smp_in_a_nodes_place_is_noticed_at_its_new_port() -> None:
    wires = Wires().link()
    for connection in [key for key in wires.others if key[0] == 1]:
        wires.close(*connection)
    wires.links[1] = wires.new(1)
    wires.join(1)
    wires.tick()
    assert wires.count(0, m.PeerReplaced) == 1
    assert wires.links[0].outlets()


def test_a_new_epoch_begins_with_new_links_and_old_ones_do_not_count() -> None:
    wires = Wires().link()
    wires.says(0, 1)
    wires.join(1, epoch=2, secret="6f" * 32)
    wires.deliver()
    assert wires.steps(1) == []
    wires.tick()
    assert not wires.links[1].outlets()
    wires.join(0, epoch=2, secret="6f" * 32)
    wires.link()
    wires.says(0, 5)
    wires.deliver()
    assert wires.steps(1) == [5]


def test_a_node_that_cannot_be_reached_is_tried_again_with_growing_pauses() -> None:
    wires = Wires()
    wires.deaf = {1}
    tries = 0
    opened = wires.open

    def counted(node: int, connection: int, other: int) -> None:
        nonlocal tries
        tries += node == 0
        opened(node, connection, other)

    wires.open = counted  # type: ignore[method-assign]
    for _ in range(200):
        wires.tick(0.1)
    assert 10 < tries < 25

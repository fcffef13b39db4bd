"""The links between the SMPs of several nodes as a pure state machine: no socket, no clock.

A process around it moves the frames (``links``, or a simulator). It makes one :class:`Linking` and
tells it everything that happens, with the time in seconds on one clock::

    join(roster, port, now)           an epoch began; ``port`` is where this node listens
    accepted(connection, now)         somebody connected; ``connection`` is from ``new_number()``
    received(connection, frame, now)  a frame came in
    closed(connection, reason)        a connection has ended, or could not be opened
    violated(connection, reason)      what came is no frame, or not what a holdfast process sends
    tick(now)                         time has passed; at least once a second
    send(node, verb, fields, blob)    the state machine of the node has a message for another node
    answer(connection, header, blob)  the answer to a :class:`Serve`

Each returns instructions, to be carried out in order, before anything else is told: :class:`Open`,
:class:`Send`, :class:`Trust`, :class:`Close` for the connections, :class:`Deliver` and
:class:`Serve` for the node.

An SMP sends over the links that it opened, and receives over those that others opened to it.

**Guarantees**: a connection counts only after both sides have proved that they know the run's
secret. Frames are numbered and carry a MAC: a link that lost, repeated or changed a frame is
dropped, and the nodes send each other again what was missed (``PeerLinked``). A frame that does
not fit its schema costs its connection and is counted in ``refused``.

**Not covered**: without TLS (``tcp``) the frames can be read on the way, and somebody who can
change them could replace a blob by another with the same digest, which is not a cryptographic one.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import ProtocolViolation, Roster
from holdfast.snapshot.transport import handshake, requests
from holdfast.snapshot.transport.frames import MAX_BLOB_BYTES, Buffer, Frame
from holdfast.snapshot.transport.handshake import Accepted, Challenge, Claim, Handshake, Pledge

_PING_S = 1.0
# The share of the timeout for a connection and its proof, before the next attempt.
_SHARE_OF_PATIENCE = 0.1
# A node without a message for this long is shown as offline; its links wait longer.
SILENCE_S = 5.0
OFFLINE = "OFFLINE"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MAX_LINKS = 8192


@dataclass(frozen=True)
class Open:
    """Connect to an address; tell ``closed`` if that fails."""

    connection: int
    address: tuple[str, int]


@dataclass(frozen=True)
class Send:
    """Send a frame, after those before it."""

    connection: int
    frame: Frame


@dataclass(frozen=True)
class Trust:
    """Accept frames of ordinary size: the other side has proved that it belongs to the run."""

    connection: int
    max_blob_bytes: int


@dataclass(frozen=True)
class Close:
    """End a connection, of which nothing more is told; ``reason`` is empty if it is usual."""

    connection: int
    reason: str


@dataclass(frozen=True)
class Deliver:
    """Hand an event to the state machine of the node."""

    event: m.Event


@dataclass(frozen=True)
class Serve:
    """Answer a request of a rank with ``answer``."""

    connection: int
    request: requests.FromReadingRank


@dataclass(frozen=True)
class Left:
    """A rank whose requests were served has disconnected."""

    connection: int


Instruction = Open | Send | Trust | Close | Deliver | Serve | Left


@dataclass(eq=False)
class _Link:
    """One connection to or from another node.

    Attributes:
        node: the other node; for a connection that was accepted, None until it is known.
        outlet: true if this node opened it.
        role: ``peer`` or ``rank``; empty until both sides have given their proofs.
    """

    number: int
    opened_s: float
    node: int | None = None
    outlet: bool = False
    role: str = ""
    nonce: str = ""
    pledge: Pledge | None = None
    sent: int = 0
    received: int = 0

    def keys(self) -> tuple[bytes, bytes] | None:
        """Return the keys for sending and receiving, once the proofs are given."""
        if not self.role or self.pledge is None:
            return None
        keys = self.pledge.from_connecting, self.pledge.from_accepting
        return keys if self.outlet else keys[::-1]


class Linking:
    """The connections of one SMP.

    Args:
        state: returns the state of this node, which is sent to the others.
        timeout_s: the longest that holdfast waits for a peer.
        max_strangers: the most connections without a proof; one more replaces the oldest.
        random: returns random hex digits; a simulator gives a seeded one.
    """

    def __init__(
        self,
        state: Callable[[], str],
        timeout_s: float,
        max_strangers: int = 1024,
        random: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.refused = 0
        self.last_refusal = ""
        self.roster: Roster | None = None
        self.new_number = count(1).__next__
        self._state, self._random = state, random
        self._patience_s = _SHARE_OF_PATIENCE * timeout_s
        self._max_strangers = max_strangers
        self._out: list[Instruction] = []
        self._links: dict[int, _Link] = {}
        self._outlets: dict[int, _Link] = {}
        self._port = 0
        self._heard_s: dict[int, float] = {}
        self._said: dict[int, str] = {}  # the other nodes' states
        self._quiet: set[int] = set()
        self._retry: dict[int, tuple[float, float]] = {}  # time of next attempt, later pause
        self._pinged_s = 0.0
        self._instance = random()
        self._instances: dict[int, str] = {}

    def join(self, roster: Roster, port: int, now: float) -> list[Instruction]:
        """Keep links to the nodes of this roster from now on, and to no others."""
        for link in list(self._links.values()):
            self._end(link, "")
        self.roster, self._port = roster, port
        self._heard_s = dict.fromkeys(roster.peers, now)
        self._said.clear()
        self._quiet.clear()
        self._instances.clear()
        self._retry = dict.fromkeys(roster.peers, (now, _FIRST_PAUSE_S))
        return self._taken()

    def outlets(self) -> dict[int, int]:
        """Return the connection over which messages go to each node that is linked."""
        return {node: link.number for node, link in self._outlets.items() if link.role}

    def states(self) -> dict[int, str]:
        """Return the last known states of the other nodes; OFFLINE for nodes that send nothing."""
        return self._said | dict.fromkeys(self._quiet, OFFLINE)

    def send(
        self, node: int, verb: str, fields: Mapping[str, object], blob: Buffer = b""
    ) -> list[Instruction]:
        """Send a message to a node's SMP; without a link to it do nothing.

        A node receives all that it has missed when its link is established.
        """
        link = self._outlets.get(node)
        if link is not None and link.role:
            self._send(link, {"verb": verb, **fields}, blob)
        return self._taken()

    def answer(
        self, connection: int, header: Mapping[str, object], blob: Buffer
    ) -> list[Instruction]:
        """Answer a rank."""
        if connection in self._links:
            self._send(self._links[connection], header, blob)
        return self._taken()

    def accepted(self, connection: int, now: float) -> list[Instruction]:
        """Take an accepted connection, and send it a challenge."""
        if len(self._links) >= _MAX_LINKS or self.roster is None:
            self._refuse("no run has begun here" if self.roster is None else "too many links")
            return [Close(connection, "")]
        if len(self._strangers()) >= self._max_strangers:
            self._end(self._strangers()[0], "there are too many connections without a proof")
        link = _Link(connection, now, nonce=self._random())
        self._links[connection] = link
        self._send(link, {"verb": "challenge", "nonce": link.nonce})
        return self._taken()

    def received(self, connection: int, frame: Frame, now: float) -> list[Instruction]:
        """Handle a frame."""
        link = self._links.get(connection)
        if link is None:
            return []
        try:
            self._check(link, frame)
            self._take(link, frame, now)
        except ProtocolViolation as error:
            return self.violated(connection, str(error))
        return self._taken()

    def closed(self, connection: int, reason: str) -> list[Instruction]:
        """Note that a connection has ended, or could not be opened."""
        link = self._links.get(connection)
        if link is not None:
            self._end(link, reason, told=True)
        return self._taken()

    def violated(self, connection: int, reason: str) -> list[Instruction]:
        """End a connection over which something came that no holdfast process sends."""
        link = self._links.get(connection)
        if link is not None:
            if link.role:
                self._refuse(reason)
            self._end(link, reason)
        return self._taken()

    def crowded(self) -> list[Instruction]:
        """End the oldest connection without a proof, as there are no file descriptors left."""
        for link in self._strangers()[:1]:
            self._end(link, "no file descriptor is free: raise the limit (ulimit -n)")
        return self._taken()

    def tick(self, now: float) -> list[Instruction]:
        """Connect to nodes without a link, send pings, and drop links that do not answer."""
        for link in list(self._links.values()):
            if link.outlet and link.role and now - link.opened_s > SILENCE_S:
                self._retry[link.node or 0] = (now, _FIRST_PAUSE_S)
            if not link.role and now - link.opened_s > self._patience_s:
                self._end(link, f"no proof within {self._patience_s:g} s")
        if self.roster is None:
            return self._taken()
        for node in self.roster.peers:
            at, pause_s = self._retry[node]
            if node not in self._outlets and now >= at:
                self._retry[node] = (now + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S))
                self._open(node, now)
        if now - self._pinged_s >= _PING_S:
            self._pinged_s = now
            for link in self._outlets.values():
                if link.role:
                    self._send(link, {"verb": "ping", "state": self._state()})
            for node in self.roster.peers:
                if now - self._heard_s[node] > SILENCE_S and node not in self._quiet:
                    self._quiet.add(node)
                    self._out.append(Deliver(m.PeerUnlinked(node)))
        return self._taken()

    def close(self) -> list[Instruction]:
        """End all connections."""
        for link in list(self._links.values()):
            self._end(link, "")
        return self._taken()

    def _strangers(self) -> list[_Link]:
        return [link for link in self._links.values() if not link.role and not link.outlet]

    def _taken(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _open(self, node: int, now: float) -> None:
        assert self.roster is not None
        link = _Link(self.new_number(), now, node, outlet=True)
        self._links[link.number] = self._outlets[node] = link
        self._out.append(Open(link.number, self.roster.addresses[node]))

    def _send(self, link: _Link, header: Mapping[str, object], blob: Buffer = b"") -> None:
        frame, keys = Frame.of(header, blob, link.sent), link.keys()
        link.sent += 1
        self._out.append(Send(link.number, frame.sealed(keys[0]) if keys else frame))

    def _check(self, link: _Link, frame: Frame) -> None:
        if frame.number != link.received:
            raise ProtocolViolation(f"frame {frame.number} came where {link.received} was due")
        keys = link.keys()
        if keys is not None and not frame.is_sealed(keys[1]):
            raise ProtocolViolation(f"frame {frame.number} was changed on its way")
        link.received += 1

    def _take(self, link: _Link, frame: Frame, now: float) -> None:
        if link.role == "rank":
            request = m.parse(requests.FromReadingRank, frame.header, frame.blob)
            self._out.append(Serve(link.number, request))
        elif link.role and not link.outlet and link.node is not None:
            self._hear(link.node, now)
            event = m.parse(m.FromPeer, frame.header, frame.blob, link.node)
            if isinstance(event, requests.Ping):
                self._said[link.node] = event.state
            else:
                self._out.append(Deliver(event))
        elif link.role:
            raise ProtocolViolation(f"node {link.node} sent {frame.verb!r:.60} over this link")
        else:
            self._greet(link, m.parse(Handshake, frame.header, frame.blob), now)

    def _greet(self, link: _Link, said: Handshake, now: float) -> None:
        match said:
            case Challenge() if link.outlet and link.pledge is None:
                self._prove(link, said)
            case Accepted() if link.outlet and link.pledge is not None:
                if not handshake.same(link.pledge.accepted, said.proof):
                    raise ProtocolViolation(f"node {link.node} did not prove that it is of the run")
                link.role = "peer"
                assert link.node is not None
                self._out.append(Deliver(m.PeerLinked(link.node)))
            case Claim() if not link.outlet:
                self._admit(link, said, now)
            case _:
                raise ProtocolViolation(f"{type(said).__name__} came at the wrong time")

    def _prove(self, link: _Link, challenge: Challenge) -> None:
        """Answer a challenge."""
        assert self.roster is not None
        answer, link.pledge = handshake.claim(
            self.roster.secret,
            "peer",
            self.roster.node,
            self.roster.epoch,
            challenge.nonce,
            port=self._port,
            instance=self._instance,
            nonce=self._random(),
        )
        self._send(link, answer)

    def _admit(self, link: _Link, claim: Claim, now: float) -> None:
        """Check the proof of a process that connected, and return a proof."""
        assert self.roster is not None
        pledge = handshake.pledge(self.roster.secret, link.nonce, claim)
        if not handshake.same(pledge.connects, claim.proof) or claim.epoch != self.roster.epoch:
            raise ProtocolViolation("its proof is wrong, or of another epoch")
        peer = claim.role == "peer"
        if peer and claim.node not in self.roster.peers:
            raise ProtocolViolation(f"node {claim.node} is no other node of this run")
        self._send(link, {"verb": "accepted", "proof": pledge.accepted})
        link.role, link.node, link.pledge = claim.role, claim.node, pledge
        self._out.append(Trust(link.number, MAX_BLOB_BYTES if peer else 0))
        if peer:
            self._meet(link, claim.node, claim.instance)
            self._hear(claim.node, now)
            self._move(claim.node, claim.port, now)

    def _hear(self, node: int, now: float) -> None:
        self._heard_s[node] = now
        if node in self._quiet:
            self._quiet.discard(node)
            if node in self._outlets and self._outlets[node].role:
                self._out.append(Deliver(m.PeerLinked(node)))

    def _meet(self, link: _Link, node: int, instance: str) -> None:
        """Drop the links of a lost SMP, whose messages do not count for its successor."""
        known = self._instances.setdefault(node, instance)
        if known == instance:
            return
        self._instances[node] = instance
        for other in list(self._links.values()):
            if (
                other is not link
                and not other.outlet
                and (other.role, other.node) == ("peer", node)
            ):
                self._end(other, "another SMP took its place")
        self._out.append(Deliver(m.PeerReplaced(node)))

    def _move(self, node: int, port: int, now: float) -> None:
        """Note the port of an SMP that replaced a lost one."""
        assert self.roster is not None
        host, known = self.roster.addresses[node]
        if port != known:
            addresses = {**self.roster.addresses, node: (host, port)}
            self.roster = replace(self.roster, addresses=addresses)
        if node not in self._outlets:
            # A node that could connect to this one can be reached, too.
            self._retry[node] = (now, _FIRST_PAUSE_S)

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        self.last_refusal = reason

    def _end(self, link: _Link, reason: str, *, told: bool = False) -> None:
        """Forget a connection; without a ``reason`` it ends as it should."""
        del self._links[link.number]
        if not told:
            self._out.append(Close(link.number, reason))
        if not link.outlet:
            if reason and not link.role:
                self._refuse(reason)
            if link.role == "rank":
                self._out.append(Left(link.number))
        elif link.node is not None and self._outlets.get(link.node) is link:
            del self._outlets[link.node]
            if link.role and reason:
                self._out.append(Deliver(m.PeerUnlinked(link.node)))

"""The links between the SMPs of several nodes, decided without a socket: a transport moves frames.

An SMP sends over the links that it opened, and receives over those that others opened to it. What
is decided is done in order once the decision is complete, and what follows from it after that.

**Guarantees**: a connection counts only after both sides have proved that they know the run's
secret. Frames are numbered and carry a MAC: a link that lost, repeated or changed a frame is
dropped, and the nodes send each other again what was missed (``PeerLinked``). A frame that does
not fit its schema costs its connection and is counted in ``refused``.

**Not covered**: without TLS (``tcp``) the frames can be read on the way, and somebody who can
change them could replace a blob by another with the same digest, which is not a cryptographic one.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hmac import compare_digest
from itertools import count
from typing import Any

from holdfast import config
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import InvariantError, ProtocolViolation, Roster
from holdfast.snapshot.transport import handshake, requests
from holdfast.snapshot.transport.frames import MAX_BLOB_BYTES, Buffer, Frame
from holdfast.snapshot.transport.handshake import Accepted, Challenge, Claim, Handshake, Pledge
from holdfast.snapshot.transport.log import log
from holdfast.snapshot.transport.sockets import Happenings
from holdfast.snapshot.transport.tcp import Address, TcpTransport

Serve = Callable[[int, requests.FromReadingRank], tuple[dict[str, object], Buffer]]

_PING_S = 1.0
# The share of the timeout for a connection and its proof, before the next attempt.
_SHARE_OF_PATIENCE = 0.1
# A node without a message for this long is shown as offline; its links wait longer.
SILENCE_S = 5.0
OFFLINE = "OFFLINE"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MAX_LINKS = 8192
# Background transfers over a link wait until less than this is queued.
_ROOM_BYTES = 4 * 2**20
_BURST_S = 0.25


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


class TokenBucket:
    """Allows ``bytes_s`` bytes a second in the mean; without a limit (0) any number.

    What is allowed and not used adds up for a quarter of a second.
    """

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._left = _BURST_S * bytes_s
        self._seen_s = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long to wait before more may be sent, in seconds."""
        if not self._bytes_s:
            return 0.0
        self._left = min(
            _BURST_S * self._bytes_s, self._left + self._bytes_s * (now - self._seen_s)
        )
        self._seen_s = now
        return max(0.0, -self._left / self._bytes_s)

    def take(self, nbytes: int) -> None:
        """Count bytes that are sent."""
        self._left -= nbytes


class Links:
    """All connections of one SMP to other nodes; it receives the ``Happenings`` of its transport.

    Args:
        transport: makes the transport, which tells this object what happens.
        handle: receives the events that other nodes send.
        serve: returns the answer to a request of an authenticated rank, a header and bytes; it is
            given the number of the connection.
        gone: is called when the connection of such a rank has ended.
        state: returns the state of this node, which is sent to the others.
        max_strangers: the most connections without a proof; one more replaces the oldest.
        clock: returns the time in seconds; a simulator gives another one.
        random: returns random hex digits; a simulator gives a seeded one.

    Attributes:
        roster: the nodes that take part in the run.
        address: where other nodes reach this one.
        refused: the number of connections that were refused, or ended because of what came.
        last_refusal: the reason of the last refusal.
    """

    def __init__(
        self,
        transport: Callable[[Happenings], TcpTransport],
        handle: Callable[[m.Event], object],
        serve: Serve,
        gone: Callable[[int], None],
        state: Callable[[], str],
        max_strangers: int = 1024,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.refused, self.last_refusal = 0, ""
        self.roster: Roster | None = None
        self.address: Address | None = None
        self.new_number = count(1).__next__
        self.transport = transport(self)
        self._handle, self._serve, self._gone, self._state = handle, serve, gone, state
        self._max_strangers, self._clock, self._random = max_strangers, clock, random
        self._patience_s = _SHARE_OF_PATIENCE * config.timeout_s()
        self._bucket = TokenBucket(config.parity_bytes_s())
        self._todo: deque[Callable[[], object]] = deque()
        self._busy = False
        self._links: dict[int, _Link] = {}
        self._outlets: dict[int, _Link] = {}
        self._heard_s: dict[int, float] = {}
        self._said: dict[int, str] = {}  # the other nodes' states
        self._quiet: set[int] = set()
        self._retry: dict[int, tuple[float, float]] = {}  # time of next attempt, later pause
        self._pinged_s = 0.0
        self._instance = random()
        self._instances: dict[int, str] = {}

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept connections to ``host``, as ``TcpTransport.listen``."""
        if (address := self.transport.listen(host, port)) != self.address:
            log(f"other nodes reach this one at {address[0]}, port {address[1]}")
        self.address = address
        return address

    def connect(self, roster: Roster) -> None:
        """Keep links to the nodes of this roster from now on, and to no others."""
        self._end_all()
        now = self._clock()
        self.roster = roster
        self._heard_s = dict.fromkeys(roster.peers, now)
        self._said, self._quiet, self._instances = {}, set(), {}
        self._retry = dict.fromkeys(roster.peers, (now, _FIRST_PAUSE_S))
        self._carry_out()

    def outlets(self) -> dict[int, int]:
        """Return the connection over which messages go to each node that is linked."""
        return {node: link.number for node, link in self._outlets.items() if link.role}

    def nodes_with_capacity(self, now: float) -> tuple[int, ...]:
        """Return the nodes whose link has little left to send; none while the rate is used up."""
        if self._bucket.wait_s(now) > 0:
            return ()
        queued = self.transport.queued_bytes
        return tuple(node for node, link in self.outlets().items() if queued(link) < _ROOM_BYTES)

    def wait_s(self, now: float) -> float | None:
        """Return how long no parity may be sent, None if one may."""
        return self._bucket.wait_s(now) or None

    def states(self) -> dict[int, str]:
        """Return the last known states of the other nodes; OFFLINE for nodes that send nothing."""
        return self._said | dict.fromkeys(self._quiet, OFFLINE)

    def send(self, node: int, verb: str, fields: Mapping[str, object], blob: Buffer = b"") -> None:
        """Send a message to a node's SMP; without a link to it do nothing.

        A node receives all that it has missed when its link is established.
        """
        if (link := self._outlets.get(node)) is not None and link.role:
            self._send(link, {"verb": verb, **fields}, blob)
        self._carry_out()

    def send_parity(self, node: int, fields: Mapping[str, object], blob: Buffer) -> None:
        """Send a chunk of a block for a parity, which counts for the rate."""
        self._bucket.take(len(blob))
        self.send(node, "chunk", fields, blob)

    def accepted(self, connection: int) -> None:
        """Take an accepted connection, and send it a challenge."""
        if len(self._links) >= _MAX_LINKS or self.roster is None:
            self._refuse("no run has begun here" if self.roster is None else "too many links")
            self.transport.close(connection)
            return
        if len(self._strangers()) >= self._max_strangers:
            self._end(self._strangers()[0], "there are too many connections without a proof")
        link = _Link(connection, self._clock(), nonce=self._random())
        self._links[connection] = link
        self._send(link, {"verb": "challenge", "nonce": link.nonce})
        self._carry_out()

    def received(self, connection: int, frame: Frame) -> None:
        """Handle a frame."""
        if (link := self._links.get(connection)) is None:
            return
        try:
            self._check(link, frame)
            self._take(link, frame)
            self._carry_out()
        except (ProtocolViolation, InvariantError) as error:
            if isinstance(error, InvariantError):
                log(str(error))
            self.violated(connection, str(error))

    def closed(self, connection: int, reason: str) -> None:
        """Note that a connection has ended, or could not be opened."""
        if (link := self._links.get(connection)) is not None:
            self._end(link, reason, told=True)
        self._carry_out()

    def violated(self, connection: int, reason: str) -> None:
        """End a connection over which something came that no holdfast process sends."""
        if (link := self._links.get(connection)) is not None:
            if link.role:
                self._refuse(reason)
            self._end(link, reason)
        self._carry_out()

    def crowded(self) -> None:
        """End the oldest connection without a proof, as there are no file descriptors left."""
        for link in self._strangers()[:1]:
            self._end(link, "no file descriptor is free: raise the limit (ulimit -n)")
        self._carry_out()

    def tend(self) -> None:
        """Connect to nodes without a link, send pings, and drop links that do not answer."""
        now = self._clock()
        self.transport.tend(now)
        for link in list(self._links.values()):
            if link.outlet and link.role and now - link.opened_s > SILENCE_S:
                self._retry[link.node or 0] = (now, _FIRST_PAUSE_S)
            if not link.role and now - link.opened_s > self._patience_s:
                self._end(link, f"no proof within {self._patience_s:g} s")
        if self.roster is not None:
            self._open_missing(self.roster, now)
            if now - self._pinged_s >= _PING_S:
                self._ping(self.roster, now)
        self._carry_out()

    def _open_missing(self, roster: Roster, now: float) -> None:
        for node in roster.peers:
            at, pause_s = self._retry[node]
            if node not in self._outlets and now >= at:
                self._retry[node] = (now + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S))
                link = _Link(self.new_number(), now, node, outlet=True)
                self._links[link.number] = self._outlets[node] = link
                self._try(self.transport.open, link.number, roster.addresses[node])

    def _ping(self, roster: Roster, now: float) -> None:
        self._pinged_s = now
        for link in self._outlets.values():
            if link.role:
                self._send(link, {"verb": "ping", "state": self._state()})
        for node in roster.peers:
            if now - self._heard_s[node] > SILENCE_S and node not in self._quiet:
                self._quiet.add(node)
                self._deliver(m.PeerUnlinked(node))

    def close(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, and close everything."""
        for link in self._strangers():
            self._end(link, "")
        self._carry_out()
        self.transport.shut(deadline)
        self._end_all()
        self._carry_out()

    def _end_all(self) -> None:
        for link in list(self._links.values()):
            self._end(link, "")

    def _strangers(self) -> list[_Link]:
        return [link for link in self._links.values() if not link.role and not link.outlet]

    def _carry_out(self) -> None:
        """Do what was decided, in order, unless a caller of this caller does so already."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._todo:
                self._todo.popleft()()
        finally:
            self._busy = False

    def _deliver(self, event: m.Event) -> None:
        self._todo.append(partial(self._handle, event))

    def _try(self, step: Callable[[int, Any], object], connection: int, what: object) -> None:
        """Have something done that may end the connection."""

        def attempt() -> None:
            try:
                step(connection, what)
            except OSError as error:
                self.transport.close(connection)
                self.closed(connection, str(error))

        self._todo.append(attempt)

    def _send(self, link: _Link, header: Mapping[str, object], blob: Buffer = b"") -> None:
        frame, keys = Frame.of(header, blob, link.sent), link.keys()
        link.sent += 1
        self._try(self.transport.send, link.number, frame.sealed(keys[0]) if keys else frame)

    def _check(self, link: _Link, frame: Frame) -> None:
        if frame.number != link.received:
            raise ProtocolViolation(f"frame {frame.number} came where {link.received} was due")
        keys = link.keys()
        if keys is not None and not frame.is_sealed(keys[1]):
            raise ProtocolViolation(f"frame {frame.number} was changed on its way")
        link.received += 1

    def _take(self, link: _Link, frame: Frame) -> None:
        if link.role == "rank":
            request = m.parse(requests.FromReadingRank, frame.header, frame.blob)
            self._todo.append(partial(self._answer, link, request))
        elif link.role and not link.outlet and link.node is not None:
            self._hear(link.node)
            event = m.parse(m.FromPeer, frame.header, frame.blob, link.node)
            if isinstance(event, requests.Ping):
                self._said[link.node] = event.state
            else:
                self._deliver(event)
        elif link.role:
            raise ProtocolViolation(f"node {link.node} sent {frame.verb!r:.60} over this link")
        else:
            self._greet(link, m.parse(Handshake, frame.header, frame.blob))

    def _answer(self, link: _Link, request: requests.FromReadingRank) -> None:
        answer = self._serve(link.number, request)
        if link.number in self._links:
            self._send(link, *answer)

    def _greet(self, link: _Link, said: Handshake) -> None:
        match said:
            case Challenge() if link.outlet and link.pledge is None:
                self._prove(link, said)
            case Accepted() if link.outlet and link.pledge is not None:
                if not compare_digest(link.pledge.accepted, said.proof):
                    raise ProtocolViolation(f"node {link.node} did not prove that it is of the run")
                link.role = "peer"
                assert link.node is not None
                self._deliver(m.PeerLinked(link.node))
            case Claim() if not link.outlet:
                self._admit(link, said)
            case _:
                raise ProtocolViolation(f"{type(said).__name__} came at the wrong time")

    def _prove(self, link: _Link, challenge: Challenge) -> None:
        assert self.roster is not None
        run, port = self.roster, self.address[1] if self.address else 0
        own = run.node, run.epoch, challenge.nonce, port, self._instance, self._random()
        answer, link.pledge = handshake.claim(run.secret, "peer", *own)
        self._send(link, answer)

    def _admit(self, link: _Link, claim: Claim) -> None:
        """Check the proof of a process that connected, and return a proof."""
        assert self.roster is not None
        pledge = handshake.pledge(self.roster.secret, link.nonce, claim)
        if not compare_digest(pledge.connects, claim.proof) or claim.epoch != self.roster.epoch:
            raise ProtocolViolation("its proof is wrong, or of another epoch")
        peer = claim.role == "peer"
        if peer and claim.node not in self.roster.peers:
            raise ProtocolViolation(f"node {claim.node} is no other node of this run")
        self._send(link, {"verb": "accepted", "proof": pledge.accepted})
        link.role, link.node, link.pledge = claim.role, claim.node, pledge
        limit = MAX_BLOB_BYTES if peer else 0
        self._todo.append(partial(self.transport.trust, link.number, limit))
        if peer:
            self._meet(link, claim.node, claim.instance)
            self._hear(claim.node)
            self._move(claim.node, claim.port)

    def _hear(self, node: int) -> None:
        self._heard_s[node] = self._clock()
        if node in self._quiet:
            self._quiet.discard(node)
            if node in self._outlets and self._outlets[node].role:
                self._deliver(m.PeerLinked(node))

    def _meet(self, link: _Link, node: int, instance: str) -> None:
        """Drop the links of a lost SMP, whose messages do not count for its successor."""
        if self._instances.setdefault(node, instance) == instance:
            return
        self._instances[node] = instance
        assert self.roster is not None
        for other in list(self._links.values()):
            inlet = not other.outlet and (other.role, other.node) == ("peer", node)
            if inlet and other is not link:
                self._end(other, "another SMP took its place")
        self._deliver(m.PeerReplaced(node, self.roster.epoch))

    def _move(self, node: int, port: int) -> None:
        """Note the port of an SMP that replaced a lost one."""
        assert self.roster is not None
        host, known = self.roster.addresses[node]
        if port != known:
            addresses = {**self.roster.addresses, node: (host, port)}
            self.roster = replace(self.roster, addresses=addresses)
        if node not in self._outlets:
            # A node that could connect to this one can be reached, too.
            self._retry[node] = (self._clock(), _FIRST_PAUSE_S)

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        self.last_refusal = reason

    def _end(self, link: _Link, reason: str, *, told: bool = False) -> None:
        """Forget a connection; without a ``reason`` it ends as it should."""
        del self._links[link.number]
        if not told:
            self._todo.append(partial(self.transport.close, link.number))
            if reason:
                log(f"connection {link.number} of another node ended: {reason}")
        if not link.outlet:
            if reason and not link.role:
                self._refuse(reason)
            if link.role == "rank":
                self._todo.append(partial(self._gone, link.number))
        elif link.node is not None and self._outlets.get(link.node) is link:
            del self._outlets[link.node]
            if link.role and reason:
                self._deliver(m.PeerUnlinked(link.node))

"""Authenticated TCP links between the SMPs of several nodes, and reads by ranks of any node.

Both sides of a connection prove that they know the run's secret (HMAC-SHA256 over fresh nonces of
both sides). Connections without a proof are refused and counted. The messages are not encrypted,
and a network that changes packets is not defended against: digests protect the contents.

An SMP sends over the links that it opened, and receives over those that others opened to it.
"""

import errno
import hashlib
import hmac
import secrets
import selectors
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from holdfast import config
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import InvariantError, Roster
from holdfast.snapshot.transport import frames
from holdfast.snapshot.transport.channel import Buffer, Channel

Serve = Callable[["Link", Mapping[str, object]], tuple[dict[str, object], Buffer]]

_PING_S = 1.0
# The share of the timeout for a connection and its proof, before the next attempt.
_SHARE_OF_PATIENCE = 0.1
# A node without a message for this long is shown as offline; its links wait longer.
SILENCE_S = 5.0
OFFLINE = "OFFLINE"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_MAX_LINKS = 4096
# The most connections without a proof; one more replaces the oldest of them.
_MAX_STRANGERS = 256
_MAX_QUEUED_BYTES = 2**30
# Background transfers over a link wait until less than this is queued.
_ROOM_BYTES = 4 * 2**20


def proof(secret: str, *words: object) -> str:
    """Return an HMAC of these words, which only a process with the secret can compute."""
    text = "\n".join(map(str, words)).encode()
    return hmac.new(bytes.fromhex(secret), text, hashlib.sha256).hexdigest()


def challenge_answer(
    roster_secret: str,
    role: str,
    node: int,
    epoch: int,
    nonce: str,
    *,
    port: int = 0,
    instance: str = "",
) -> tuple[dict[str, object], str]:
    """Return the frame that answers a challenge, and the proof that the other side must return.

    An SMP states the ``port`` on which it listens, and its ``instance``, which distinguishes it
    from an SMP whose place it took.
    """
    own = secrets.token_hex(16)
    stated = {"role": role, "node": node, "epoch": epoch, "port": port, "instance": instance}
    words = (*stated.values(), nonce, own)
    owed = proof(roster_secret, "accepted", *words)
    fields = {"verb": "answer", **stated, "nonce": own}
    return fields | {"proof": proof(roster_secret, "connects", *words)}, owed


class Link(Channel):
    """One TCP connection to or from the SMP of another node, or from a rank.

    Attributes:
        node: the other node; for a link that this SMP did not open, None until it is known.
        outlet: true if this SMP opened the link.
        role: ``peer`` or ``rank``; empty until both sides have given their proofs.
        opened_s: the time of the connection, on the monotonic clock.
    """

    def __init__(self, sock: socket.socket, now: float, node: int | None = None) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience_ms = round(config.timeout_s() * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        self.node, self.outlet = node, node is not None
        self.role = self.nonce = self.owed = ""
        self.opened_s = now

    def queue(
        self, header: Mapping[str, object], blob: Buffer = b"", fds: Sequence[int] = ()
    ) -> None:
        """Add a frame to those to be sent."""
        super().queue(header, blob, fds)
        if self.queued_bytes > _MAX_QUEUED_BYTES:
            raise ConnectionAbortedError(f"{self.queued_bytes} bytes were left unread")


class Links:
    """All TCP connections of one SMP.

    Args:
        selector: waits for the sockets; the data of each is its ``Link``, or this object.
        handle: receives the events that other nodes send.
        serve: returns the answer to a read of an authenticated rank, a header and bytes.
        gone: is called when the link of such a rank has ended.
        state: returns the state of this node, which is sent to the others.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handle: Callable[[m.Event], None],
        serve: Serve,
        gone: Callable[["Link"], None],
        state: Callable[[], str],
    ) -> None:
        self.refused = 0
        self.roster: Roster | None = None
        self._selector, self._handle = selector, handle
        self._serve, self._gone, self._state = serve, gone, state
        self._listener: socket.socket | None = None
        self._outlets: dict[int, Link] = {}
        self._inlets: list[Link] = []
        self._heard_s: dict[int, float] = {}
        self._said: dict[int, str] = {}  # the other nodes' states
        self._quiet: set[int] = set()
        self._retry: dict[int, tuple[float, float]] = {}  # time of next attempt, later pause
        self._pinged_s = 0.0
        self._instance = secrets.token_hex(8)
        self._instances: dict[int, str] = {}

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Accept connections to ``host`` from now on; return the address that others connect to.

        ``port`` is used unless it is taken; 0 means any.

        Raises:
            OSError: this node has no such address.
        """
        if self._listener is not None and self._listener.getsockname()[0] != host:
            self._close_listener()
        if self._listener is None:
            self._listener = _listener(host, port)
            self._selector.register(self._listener, selectors.EVENT_READ, self)
        name: tuple[str, int] = self._listener.getsockname()
        return name

    def connect(self, roster: Roster, now: float) -> None:
        """Keep links to the nodes of this roster, and to no others."""
        for link in [*self._outlets.values(), *self._inlets]:
            self._drop(link, "a new epoch began", quiet=True)
        self.roster = roster
        self._heard_s = dict.fromkeys(roster.peers, now)
        self._said.clear()
        self._quiet.clear()
        self._instances.clear()
        self._retry = dict.fromkeys(roster.peers, (now, _FIRST_PAUSE_S))

    def nodes_with_capacity(self) -> tuple[int, ...]:
        """Return the nodes whose link has little left to send."""
        links = self._outlets.items()
        return tuple(n for n, link in links if link.role and link.queued_bytes < _ROOM_BYTES)

    def send(self, node: int, verb: str, fields: Mapping[str, object], blob: Buffer) -> None:
        """Send a message to a node's SMP; without a link to it do nothing.

        A node receives all that it has missed when its link is established.
        """
        link = self._outlets.get(node)
        if link is not None and link.role:
            self._queue(link, {"verb": verb, **fields}, blob)

    def states(self) -> dict[int, str]:
        """Return the last known states of the other nodes; OFFLINE for nodes that send nothing."""
        return self._said | dict.fromkeys(self._quiet, OFFLINE)

    def accept(self, now: float) -> None:
        """Accept a connection and send it a challenge."""
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._inlets) >= _MAX_LINKS or self.roster is None:
            self.refused += 1
            sock.close()
            return
        strangers = [link for link in self._inlets if not link.role]
        if len(strangers) >= _MAX_STRANGERS:
            self._drop(strangers[0], "there are too many connections without a proof")
        link = Link(sock, now)
        link.nonce = secrets.token_hex(16)
        self._inlets.append(link)
        self._selector.register(sock, selectors.EVENT_READ, link)
        self._queue(link, {"verb": "challenge", "nonce": link.nonce})

    def ready(self, link: Link, now: float) -> None:
        """Read from and write to a link whose socket is ready."""
        try:
            for frame in link.receive():
                self._take(link, frame, now)
            link.flush()
        except (OSError, ValueError, KeyError, TypeError, InvariantError) as error:
            if isinstance(error, InvariantError):
                print(error, file=sys.stderr, flush=True)
            self._drop(link, str(error))
            return
        link.watch(self._selector)

    def _take(self, link: Link, frame: frames.Frame, now: float) -> None:
        if link.role == "peer" and link.node is not None:
            self._hear(link.node, now)
            if frame.verb == "ping":
                self._said[link.node] = str(frame.header["state"])
            elif not link.outlet:
                self._handle(m.parse(m.FromPeer, frame.header, frame.blob, link.node))
        elif link.role == "rank":
            link.queue(*self._serve(link, frame.header))
        elif link.outlet:
            self._prove(link, frame)
        else:
            self._admit(link, frame, now)

    def _hear(self, node: int, now: float) -> None:
        self._heard_s[node] = now
        if node in self._quiet:
            self._quiet.discard(node)
            if node in self._outlets and self._outlets[node].role:
                self._handle(m.PeerLinked(node))

    def _prove(self, link: Link, frame: frames.Frame) -> None:
        """Handle a frame of the handshake on the connecting side."""
        assert self.roster is not None
        assert self._listener is not None
        assert link.node is not None
        if frame.verb == "challenge" and not link.owed:
            me, epoch, nonce = self.roster.node, self.roster.epoch, str(frame.header["nonce"])
            secret, port = self.roster.secret, self._listener.getsockname()[1]
            answer, link.owed = challenge_answer(
                secret, "peer", me, epoch, nonce, port=port, instance=self._instance
            )
            link.queue(answer)
        elif frame.verb == "accepted" and hmac.compare_digest(
            link.owed, str(frame.header["proof"])
        ):
            link.role = "peer"
            self._handle(m.PeerLinked(link.node))
        else:
            raise m.ProtocolViolation(f"node {link.node} answered {frame.verb!r}")

    def _admit(self, link: Link, frame: frames.Frame, now: float) -> None:
        """Check the proof of a process that connected, and return a proof."""
        assert self.roster is not None
        header = frame.header
        names = ("role", "node", "epoch", "port", "instance")
        words = tuple(header.get(name) for name in names)
        words = (*words, link.nonce, header.get("nonce"))
        expected = proof(self.roster.secret, "connects", *words)
        known = hmac.compare_digest(expected, str(header.get("proof")))
        if not known or words[2] != self.roster.epoch or words[0] not in ("peer", "rank"):
            raise m.ProtocolViolation("its proof is wrong, or of another epoch")
        link.role, link.node = str(words[0]), int(header["node"])
        link.decoder.max_blob_bytes = frames.MAX_BLOB_BYTES if link.role == "peer" else 0
        if link.role == "peer":
            self._meet(link, str(header["instance"]))
            self._hear(link.node, now)
            self._move(link.node, int(header["port"]), now)
        link.queue({"verb": "accepted", "proof": proof(self.roster.secret, "accepted", *words)})

    def _meet(self, link: Link, instance: str) -> None:
        """Drop the links of a lost SMP, whose messages do not count for its successor."""
        assert link.node is not None
        known = self._instances.setdefault(link.node, instance)
        if known == instance:
            return
        self._instances[link.node] = instance
        for other in list(self._inlets):
            if other is not link and (other.role, other.node) == ("peer", link.node):
                self._drop(other, "another SMP took its place")
        self._handle(m.PeerReplaced(link.node))

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

    def tend(self, now: float) -> None:
        """Connect to nodes without a link, send pings, and drop links that do not answer."""
        patience_s = _SHARE_OF_PATIENCE * config.timeout_s()
        for link in [*self._inlets, *self._outlets.values()]:
            if link.outlet and link.role and now - link.opened_s > SILENCE_S:
                self._retry[link.node or 0] = (now, _FIRST_PAUSE_S)
            if not link.role and now - link.opened_s > patience_s:
                self._drop(link, f"no proof within {patience_s:g} s")
        if self.roster is None:
            return
        for node in self.roster.peers:
            at, pause_s = self._retry[node]
            if node not in self._outlets and now >= at:
                self._retry[node] = (now + pause_s, min(2 * pause_s, _LONGEST_PAUSE_S))
                self._open(node, self.roster.addresses[node], now)
        if now - self._pinged_s >= _PING_S:
            self._pinged_s = now
            for node in list(self._outlets):
                self.send(node, "ping", {"state": self._state()}, b"")
            for node in self.roster.peers:
                if now - self._heard_s[node] > SILENCE_S and node not in self._quiet:
                    self._quiet.add(node)
                    self._handle(m.PeerUnlinked(node))

    def _open(self, node: int, address: tuple[str, int], now: float) -> None:
        link = Link(socket.socket(socket.AF_INET, socket.SOCK_STREAM), now, node)
        link.socket.connect_ex(address)
        self._outlets[node] = link
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _queue(self, link: Link, header: Mapping[str, object], blob: Buffer = b"") -> None:
        try:
            link.queue(header, blob)
        except OSError as error:
            self._drop(link, str(error))
            return
        link.watch(self._selector)

    def _drop(self, link: Link, reason: str, *, quiet: bool = False) -> None:
        if link.socket.fileno() < 0:
            return
        self._selector.unregister(link.socket)
        link.close()
        if not link.outlet:
            self._inlets.remove(link)
            self.refused += not link.role and not quiet
            self._gone(link)
        elif link.node is not None and self._outlets.get(link.node) is link:
            del self._outlets[link.node]
            if link.role and not quiet:
                print(f"link to node {link.node} lost: {reason}", file=sys.stderr, flush=True)
                self._handle(m.PeerUnlinked(link.node))

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def close(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, and close everything."""
        for link in self._outlets.values():
            if link.role:
                link.drain(deadline)
        for link in [*self._outlets.values(), *self._inlets]:
            self._drop(link, "", quiet=True)
        self._close_listener()


def _listener(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Lets the successor of a process that died use its port at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE and port:
            return _listener(host, 0)
        raise
    sock.setblocking(False)
    return sock

"""The links of one SMP: ``linking`` decides, a transport moves the frames."""

import selectors
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from holdfast import config
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import InvariantError, ProtocolViolation, Roster
from holdfast.snapshot.transport import linking
from holdfast.snapshot.transport.contract import Address
from holdfast.snapshot.transport.frames import Buffer, Frame
from holdfast.snapshot.transport.log import log
from holdfast.snapshot.transport.rate import TokenBucket
from holdfast.snapshot.transport.requests import FromReadingRank
from holdfast.snapshot.transport.tcp import TcpTransport

Serve = Callable[[int, FromReadingRank], tuple[dict[str, object], Buffer]]

# Background transfers over a link wait until less than this is queued.
_ROOM_BYTES = 4 * 2**20


class Links:
    """All connections of one SMP to other nodes.

    Args:
        selector: waits for the sockets; the data of each is a function to be called then.
        handle: receives the events that other nodes send.
        serve: returns the answer to a request of an authenticated rank, a header and bytes; it is
            given the number of the connection.
        gone: is called when the connection of such a rank has ended.
        state: returns the state of this node, which is sent to the others.
        max_strangers: the most connections without a proof.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handle: Callable[[m.Event], None],
        serve: Serve,
        gone: Callable[[int], None],
        state: Callable[[], str],
        max_strangers: int = 1024,
    ) -> None:
        self.transport = TcpTransport(selector, self)
        self._linking = linking.Linking(state, config.timeout_s(), max_strangers)
        self._handle, self._serve, self._gone = handle, serve, gone
        self._bucket = TokenBucket(config.parity_bytes_s())
        self.address: Address | None = None
        self.new_number = self._linking.new_number

    @property
    def roster(self) -> Roster | None:
        """The nodes that take part in the run."""
        return self._linking.roster

    @property
    def refused(self) -> int:
        """The number of connections that were refused, or ended because of what came."""
        return self._linking.refused

    @property
    def last_refusal(self) -> str:
        """The reason of the last refusal."""
        return self._linking.last_refusal

    def listen(self, host: str, port: int = 0) -> Address:
        """Accept connections to ``host``, as ``Transport.listen``."""
        if (address := self.transport.listen(host, port)) != self.address:
            log(f"other nodes reach this one at {address[0]}, port {address[1]}")
        self.address = address
        return address

    def connect(self, roster: Roster, now: float) -> None:
        """Keep links to the nodes of this roster, and to no others."""
        port = self.address[1] if self.address else 0
        self._do(self._linking.join(roster, port, now))

    def nodes_with_capacity(self, now: float) -> tuple[int, ...]:
        """Return the nodes whose link has little left to send; none while the rate is used up."""
        if self._bucket.wait_s(now) > 0:
            return ()
        links, queued = self._linking.outlets().items(), self.transport.queued_bytes
        return tuple(node for node, link in links if queued(link) < _ROOM_BYTES)

    def wait_s(self, now: float) -> float | None:
        """Return how long no parity may be sent, None if one may."""
        return self._bucket.wait_s(now) or None

    def send(self, node: int, verb: str, fields: Mapping[str, object], blob: Buffer) -> None:
        """Send a message to a node's SMP; without a link to it do nothing."""
        self._do(self._linking.send(node, verb, fields, blob))

    def send_parity(self, node: int, fields: Mapping[str, object], blob: Buffer) -> None:
        """Send a chunk of a block for a parity, which counts for the rate."""
        self._bucket.take(len(blob))
        self.send(node, "chunk", fields, blob)

    def states(self) -> dict[int, str]:
        """Return the last known states of the other nodes; OFFLINE for nodes that send nothing."""
        return self._linking.states()

    def accepted(self, connection: int) -> None:
        """Take an accepted connection; see ``Happenings``."""
        self._do(self._linking.accepted(connection, time.monotonic()))

    def received(self, connection: int, frame: Frame) -> None:
        """Handle a frame; see ``Happenings``."""
        try:
            self._do(self._linking.received(connection, frame, time.monotonic()))
        except (ProtocolViolation, InvariantError) as error:
            if isinstance(error, InvariantError):
                log(str(error))
            self.violated(connection, str(error))

    def closed(self, connection: int, reason: str) -> None:
        """Note that a connection has ended; see ``Happenings``."""
        self._do(self._linking.closed(connection, reason))

    def violated(self, connection: int, reason: str) -> None:
        """End a connection over which something wrong came; see ``Happenings``."""
        self._do(self._linking.violated(connection, reason))

    def tend(self, now: float) -> None:
        """Connect to nodes without a link, send pings, and drop links that do not answer."""
        self.transport.tend(now)
        self._do(self._linking.tick(now))

    def crowded(self) -> None:
        """Make room for others; see ``Happenings``."""
        self._do(self._linking.crowded())

    def close(self, deadline: float) -> None:
        """Send what is queued, by ``deadline`` on the monotonic clock, and close everything."""
        for connection in self._linking.outlets().values():
            self.transport.drain(connection, deadline)
        self._do(self._linking.close())
        self.transport.stop_listening()

    def _do(self, instructions: Iterable[linking.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case linking.Open(connection, address):
                    self._try(self.transport.open, connection, address)
                case linking.Send(connection, frame):
                    self._try(self.transport.send, connection, frame)
                case linking.Trust(connection, max_blob_bytes):
                    self.transport.trust(connection, max_blob_bytes)
                case linking.Close(connection, reason):
                    self.transport.close(connection)
                    if reason:
                        log(f"connection {connection} of another node ended: {reason}")
                case linking.Deliver(event):
                    self._handle(event)
                case linking.Serve(connection, request):
                    answer = self._serve(connection, request)
                    self._do(self._linking.answer(connection, *answer))
                case linking.Left(connection):
                    self._gone(connection)

    def _try(self, step: Callable[[int, Any], object], connection: int, what: object) -> None:
        try:
            step(connection, what)
        except OSError as error:
            self.transport.close(connection)
            self.closed(connection, str(error))

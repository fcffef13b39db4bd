"""A rank's access to the SMP of any node over TCP: manifests, and bytes of slots."""

import random
import time
from collections.abc import Mapping
from hmac import compare_digest

from holdfast import config
from holdfast.errors import SnapshotLost
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Kind, ProtocolViolation, Roster, Stamp
from holdfast.snapshot.transport import handshake
from holdfast.snapshot.transport.frames import Connection, Frame
from holdfast.snapshot.transport.handshake import Accepted, Challenge, Handshake
from holdfast.snapshot.transport.tcp import dial

_FIRST_PAUSE_S = 0.1


class Remote:
    """A connection to one node's SMP, made at the first request, for use by one thread at a time.

    A request raises ConnectionError if the node cannot be reached, or does not answer in time.

    Attributes:
        failure: the last reason why the node could not be read; empty if it always could.

    Args:
        roster: states where the nodes are, and has the secret that proves that this rank belongs to
            the run.
        node: the node whose SMP is asked.
        patience_s: how long each answer may take, in seconds; by default ``config.timeout_s()``.
        attempts: how often a request is made if the connection is refused or lost. Pauses between
            them grow, and differ from rank to rank, as all ranks may have met the same refusal.
    """

    def __init__(
        self,
        roster: Roster,
        node: int,
        patience_s: float | None = None,
        *,
        attempts: int = 1,
    ) -> None:
        self.node, self.failure = node, ""
        self._roster, self._attempts = roster, attempts
        self._patience_s = config.timeout_s() if patience_s is None else patience_s
        self._connection: Connection | None = None

    def manifest(self, rank: int, stamp: Stamp) -> tuple[bytes, str] | None:
        """Return a rank's manifest of a step and its digest, from its slot or a mirror, or None."""
        frame = self._ask({"verb": "manifest", "rank": rank, **stamp._asdict()})
        return (frame.blob, str(frame.header["digest"])) if frame.verb == "manifest" else None

    def pin(self, stamp: Stamp) -> bool:
        """Have the node keep a step until this connection ends; return false if it is not held."""
        return self._ask({"verb": "pin", **stamp._asdict()}).verb == "pinned"

    def parities(self, rank: int, stamp: Stamp) -> dict[int, bytes]:
        """Return the digests of the parities in a rank's slot that its SMP computed, by stripe."""
        frame = self._ask({"verb": "parities", "rank": rank, **stamp._asdict()})
        found, start = {}, 0
        for stripe, nbytes in frame.header.get("stripes", ()):
            found[int(stripe)] = frame.blob[start : start + nbytes]
            start += nbytes
        return found

    def read(self, rank: int, stamp: Stamp, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of a rank's slot, from ``offset`` on.

        Raises:
            SnapshotLost: the node does not hold the step any more.
        """
        asked = {"verb": "read", "rank": rank, **stamp._asdict()}
        answer = self._ask({**asked, "offset": offset, "nbytes": len(out)}, out)
        if answer.verb != "bytes":
            raise SnapshotLost(f"node {self.node} no longer holds step {stamp.step} of rank {rank}")

    def _ask(self, header: Mapping[str, object], out: memoryview | None = None) -> Frame:
        """Return the answer to a request; its blob goes into ``out``, if that is given."""
        pause_s, left, limit_s = _FIRST_PAUSE_S, self._attempts, self._patience_s
        while True:
            try:
                if self._connection is None:
                    self._connection = self._connected()
                self._connection.send(header, timeout_s=limit_s)
                return self._connection.receive(timeout_s=limit_s, into=out)
            except (OSError, ProtocolViolation) as error:
                self.close()
                left -= 1
                # A node that was silent for the whole of its time is not asked again.
                if not left or isinstance(error, TimeoutError | ProtocolViolation):
                    self.failure = f"node {self.node} cannot be read: {error}"
                    raise ConnectionError(self.failure) from error
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s *= 2

    def _connected(self) -> Connection:
        limit_s, roster = self._patience_s, self._roster
        connection = dial(roster.addresses[self.node], limit_s)
        try:
            challenge = _said(connection.receive(timeout_s=limit_s), Challenge)
            own = roster.node, roster.epoch, challenge.nonce
            answer, pledge = handshake.claim(roster.secret, "rank", *own)
            connection.send(answer, timeout_s=limit_s)
            accepted = _said(connection.receive(timeout_s=limit_s), Accepted)
            if not compare_digest(pledge.accepted, accepted.proof):
                raise ProtocolViolation("it did not prove that it belongs to this run")
            connection.secure(pledge.from_connecting, pledge.from_accepting)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _said(frame: Frame, kind: type[Kind]) -> Kind:
    said = m.parse(Handshake, frame.header, frame.blob)
    if not isinstance(said, kind):
        raise ProtocolViolation(f"it sent {frame.verb!r:.60} in the handshake")
    return said

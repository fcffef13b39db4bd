"""A rank's view of what the SMP of any node holds: manifests, and bytes of slots, over TCP."""

import hmac
import socket
from collections.abc import Mapping

from holdfast import config
from holdfast.errors import SnapshotLost
from holdfast.snapshot.protocol.roster import ProtocolViolation, Roster, Stamp
from holdfast.snapshot.transport import links
from holdfast.snapshot.transport.frames import Connection, Frame


class Remote:
    """A connection to one node's SMP, made when it is first needed; not for two threads at once.

    Args:
        roster: says where the nodes are, and proves that this rank is of the run.
        node: whose SMP.
        patience_s: how long each of its answers may take, in seconds; by default the one timeout.
    """

    def __init__(self, roster: Roster, node: int, patience_s: float | None = None) -> None:
        self.node = node
        self._patience_s = config.timeout_s() if patience_s is None else patience_s
        self._roster = roster
        self._connection: Connection | None = None

    def manifest(self, rank: int, stamp: Stamp) -> tuple[bytes, str] | None:
        """Return a rank's manifest of a step, from its slot or a mirror, and its digest; or None.

        Raises:
            ConnectionError: the node cannot be reached, or not in time.
        """
        frame = self._ask({"verb": "manifest", "rank": rank, **stamp._asdict()})
        return (frame.blob, str(frame.header["digest"])) if frame.verb == "manifest" else None

    def pin(self, stamp: Stamp) -> bool:
        """Let the node keep a step until this connection ends; whether it still holds it.

        Raises:
            ConnectionError: as ``manifest``.
        """
        return self._ask({"verb": "pin", **stamp._asdict()}).verb == "pinned"

    def parities(self, rank: int, stamp: Stamp) -> dict[int, bytes]:
        """Return the digests of the parities in a rank's slot that its SMP computed, by stripe.

        Raises:
            ConnectionError: as ``manifest``.
        """
        frame = self._ask({"verb": "parities", "rank": rank, **stamp._asdict()})
        found, start = {}, 0
        for stripe, nbytes in frame.header.get("stripes", ()):
            found[int(stripe)] = frame.blob[start : start + nbytes]
            start += nbytes
        return found

    def read(self, rank: int, stamp: Stamp, offset: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of a rank's slot, from ``offset`` on.

        Raises:
            SnapshotLost: the node does not hold the step. ConnectionError: as ``manifest``.
        """
        asked = {"verb": "read", "rank": rank, **stamp._asdict()}
        answer = self._ask({**asked, "offset": offset, "nbytes": len(out)}, out)
        if answer.verb != "bytes":
            raise SnapshotLost(f"node {self.node} holds step {stamp.step} of rank {rank} no more")

    def _ask(self, header: Mapping[str, object], out: memoryview | None = None) -> Frame:
        """Return the answer to a request; its blob goes into ``out``, if that is given."""
        limit_s = self._patience_s
        try:
            if self._connection is None:
                self._connection = self._connected()
            self._connection.send(header, timeout_s=limit_s)
            if out is not None:
                return Frame(self._connection.receive_into(out, timeout_s=limit_s))
            return self._connection.receive(timeout_s=limit_s)
        except (OSError, ProtocolViolation) as error:
            self.close()
            raise ConnectionError(f"node {self.node} cannot be read: {error}") from error

    def _connected(self) -> Connection:
        address = self._roster.addresses[self.node]
        connection = Connection(socket.create_connection(address, self._patience_s))
        try:
            self._prove(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prove(self, connection: Connection) -> None:
        limit_s = self._patience_s
        nonce = str(connection.receive(timeout_s=limit_s).header.get("nonce"))
        secret, me, epoch = self._roster.secret, self._roster.node, self._roster.epoch
        answer, owed = links.challenge_answer(secret, "rank", me, epoch, nonce)
        connection.send(answer, timeout_s=limit_s)
        accepted = connection.receive(timeout_s=limit_s)
        if not hmac.compare_digest(owed, str(accepted.header.get("proof"))):
            raise ProtocolViolation("it did not prove that it belongs to this run")

    def close(self) -> None:
        """Disconnect; a later call connects anew."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

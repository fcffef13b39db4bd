"""The answers of an SMP to ranks of any node that read from its memory."""

from collections.abc import Callable

from holdfast.snapshot.node.memory import SlotMemory
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.transport import requests
from holdfast.snapshot.transport.frames import MAX_BLOB_BYTES, Buffer

Answer = tuple[dict[str, object], Buffer]
_GONE: Answer = {"verb": "gone"}, b""


class SlotReads:
    """Answers requests for bytes of slots, manifests and digests of parities.

    Args:
        protocol: knows what is held.
        memory: has the bytes.
        handle: is given the events of pinned steps.
        new_holder: returns the number of another reader.
    """

    def __init__(
        self,
        protocol: Protocol,
        memory: SlotMemory,
        handle: Callable[[m.Event], object],
        new_holder: Callable[[], int],
    ) -> None:
        self._protocol, self._memory = protocol, memory
        self._handle, self._new_holder = handle, new_holder
        self._holders: dict[int, int] = {}

    def answer(self, connection: int, asked: requests.FromReadingRank) -> Answer:
        """Return the header and the bytes that answer a request."""
        match asked:
            case requests.PinStep():
                return {"verb": "pinned" if self._pin(connection, asked) else "gone"}, b""
            case requests.ReadManifest():
                return self._manifest(asked)
            case requests.ReadParities():
                return self._parities(asked)
            case requests.ReadSlot():
                return self._bytes(asked)
        raise m.ProtocolViolation(f"{type(asked).__name__} is no request")

    def gone(self, connection: int) -> None:
        """Release what a connection has pinned, because it has ended."""
        holder = self._holders.pop(connection, None)
        if holder is not None:
            self._handle(m.Gone(holder))

    def _pin(self, connection: int, asked: requests.PinStep) -> bool:
        if connection not in self._holders:
            self._holders[connection] = self._new_holder()
        self._handle(m.Pin(self._holders[connection], asked.epoch, asked.step))
        return self._protocol.leases.holds(self._holders[connection])

    def _manifest(self, asked: requests.ReadManifest) -> Answer:
        found = self._protocol.node.find(asked.rank, *asked.stamp)
        if found is not None:
            return {"verb": "manifest", "digest": found[2].digest}, found[2].manifest
        cluster = self._protocol.cluster_commit.cluster
        digest, blob = (cluster.mirrors if cluster else {}).get(
            (asked.rank, asked.stamp), ("", b"")
        )
        return ({"verb": "manifest", "digest": digest}, blob) if digest else _GONE

    def _parities(self, asked: requests.ReadParities) -> Answer:
        found = self._protocol.node.find(asked.rank, *asked.stamp)
        if found is None or not found[2].receiver or not found[2].receiver.complete:
            return _GONE
        digests = found[2].receiver.by_stripe()
        stripes = [[stripe, len(digest)] for stripe, digest in digests.items()]
        return {"verb": "parities", "stripes": stripes}, b"".join(digests.values())

    def _bytes(self, asked: requests.ReadSlot) -> Answer:
        found = self._protocol.node.find(asked.rank, *asked.stamp)
        if found is None:
            return _GONE
        index, number, slot = found
        view = self._memory.view(index, number)
        end = asked.offset + asked.nbytes
        if end > min(len(view), slot.capacity, asked.offset + MAX_BLOB_BYTES):
            raise m.ProtocolViolation(
                f"{asked.nbytes} bytes at {asked.offset} of a slot of {len(view)}"
            )
        return {"verb": "bytes"}, view[asked.offset : end]

"""The snapshot management process: owns the slot memory of one node and outlives the trainer.

``python -m holdfast.snapshot.node.smp --run-dir DIR --world-size N --keep K --linger-s S`` forks a
daemon and returns at once. The daemon ends when all ranks have finished, when a client asks it to
stop, when no trainer was connected for ``linger-s`` seconds, or when its run directory was removed.
"""

import argparse
import os
import select
import selectors
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast import config
from holdfast.snapshot.node import supervisor
from holdfast.snapshot.node.memory import NotEnoughMemory, SlotMemory, accumulate, digest_of
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.transport import frames
from holdfast.snapshot.transport.channel import Buffer, Channel
from holdfast.snapshot.transport.links import Link, Links

_POLL_S = 0.5
_FAREWELL_S = 2.0
_MAX_PEERS = 256
_MAX_QUEUED = 1024
_SHOWN_CHARACTERS = 1000


class Peer(Channel):
    """A connection to the SMP's Unix socket: of a local rank, of a reader, or of neither yet."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        super().__init__(sock)
        self.rank: int | None = None
        self.reader: int | None = None
        self.stalled_since: float | None = now


class Server:
    """Carries out the decisions of :class:`Protocol` with sockets, memory and time.

    Args:
        run_dir: the directory with the socket; the server ends when it is removed.
        protocol: makes the decisions, with the clock ``time.monotonic``.
        owner_uid: the only user id that is served; connections of others are refused and counted.
    """

    def __init__(self, run_dir: Path, protocol: Protocol, owner_uid: int) -> None:
        self.run_dir, self.protocol, self.owner_uid = run_dir, protocol, owner_uid
        self.memory = SlotMemory()
        self.supervisor = supervisor.Supervisor(run_dir)
        self.refused = self.failures = 0
        self.stopping = ""
        self._busy = False
        self._started_s = time.monotonic()
        self._patience_s = config.timeout_s()
        self._peers: dict[int, Peer] = {}
        self._readers_seen = 0
        self._listener = frames.listen(run_dir)
        self._inode = os.stat(run_dir).st_ino
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._holders: dict[Link, int] = {}
        self.links = Links(
            self._selector, self._handle, self._read_for, self._unpin, protocol.state
        )

    def run(self) -> str:
        """Serve until there is a reason to stop, and return the reason."""
        try:
            while not self.stopping:
                for key, _ in self._selector.select(0 if self._busy else _POLL_S):
                    self._turn(key.data)
                self._work()
                self._housekeeping()
        finally:
            self._close()
        return self.stopping

    def _work(self) -> None:
        """Do a little background work between two turns."""
        nodes = self.links.nodes_with_capacity()
        out = self.protocol.handle(m.Spare(nodes), time.monotonic())
        for instruction in out:
            self._carry_out(instruction)
        # Chunks that were queued wake the selector through their link; a digest does not.
        self._busy = any(isinstance(instruction, m.Digest) for instruction in out)

    def _turn(self, whose: Peer | Links | Link | None) -> None:
        if isinstance(whose, Links):
            whose.accept(time.monotonic())
        elif isinstance(whose, Link):
            self.links.ready(whose, time.monotonic())
        else:
            self._serve(whose)

    def _serve(self, peer: Peer | None) -> None:
        if peer is None:
            self._accept()
            return
        try:
            for frame in peer.receive():
                self._take(peer, frame)
            peer.flush()
        except (OSError, m.ProtocolViolation) as error:
            self._drop(peer, str(error))
        except Exception as error:
            # Its own error: this process does not end, because other ranks need what it holds.
            self._admit_failure(peer, error)
        else:
            self._watch(peer)

    def _admit_failure(self, peer: Peer, error: Exception) -> None:
        """Log an internal error, and tell the process whose request led to it."""
        self.failures += 1
        traceback.print_exception(error)
        sys.stderr.flush()
        _say(peer, frames.FAILED, {"reason": f"internal error {error!r}"[:_SHOWN_CHARACTERS]})
        self._watch(peer)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if frames.peer_uid(sock) != self.owner_uid or len(self._peers) >= _MAX_PEERS:
            self.refused += 1
            sock.close()
            return
        peer = Peer(sock, time.monotonic())
        self._peers[sock.fileno()] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _watch(self, peer: Peer) -> None:
        if peer.socket.fileno() < 0:
            return
        peer.watch(self._selector)
        stranger = peer.rank is None and peer.reader is None
        stalled = stranger or peer.decoder.pending or bool(peer.outgoing)
        if not stalled:
            peer.stalled_since = None
        elif peer.stalled_since is None:
            peer.stalled_since = time.monotonic()

    def _take(self, peer: Peer, frame: frames.Frame) -> None:
        if frame.verb == "status":
            _say(peer, "status", self.status())
        elif frame.verb == "stop":
            _say(peer, "bye", {})
            self._handle(m.StopRequested())
        elif frame.verb == "persist":
            self._handle(m.PersistRequested())
            _say(peer, "persist", self.status())
        elif frame.verb == "listen":
            _say(peer, "listening", self._listen(frame.header))
        elif frame.verb == "roster":
            roster = self.links.roster.encode() if self.links.roster else None
            _say(peer, "roster", {"roster": roster})
        elif frame.verb == "persist_to":
            if self.supervisor.assign(supervisor.from_header(frame.header), time.monotonic()):
                self.protocol.leases.forget_disk()
            _say(peer, "assigned", {})
        elif peer.rank is None and frame.verb in m.FromReader.by_verb:
            self._handle(m.parse(m.FromReader, frame.header, frame.blob, self._reader(peer)))
        else:
            event = m.parse(m.FromRank, frame.header, frame.blob, peer.rank)
            if not isinstance(event, m.Hello) or self._admit(peer, event):
                self._handle(event)
        if len(peer.outgoing) > _MAX_QUEUED:
            raise m.ProtocolViolation(f"{len(peer.outgoing)} answers were left unread")

    def _listen(self, asked: Mapping[str, object]) -> dict[str, object]:
        host, port = str(asked.get("host")), _number(asked.get("port", 0))
        if not 0 <= port < 2**16:
            raise m.ProtocolViolation(f"port {port} cannot be listened on")
        try:
            host, port = self.links.listen(host, port)
        except OSError as error:
            return {"error": f"cannot listen on {host}: {error.strerror or error}"}
        return {"host": host, "port": port, "epoch": self.protocol.cluster_commit.epoch}

    def _read_for(
        self, link: Link, asked: Mapping[str, object]
    ) -> tuple[dict[str, object], Buffer]:
        """Answer a rank of any node: bytes of a slot, or the manifest of a slot or a mirror."""
        verb, stamp = asked["verb"], Stamp(_number(asked["epoch"]), _number(asked["step"]))
        if verb == "pin":
            return {"verb": "pinned" if self._pin(link, stamp) else "gone"}, b""
        return read_held(self.protocol, self.memory, asked)

    def _pin(self, link: Link, stamp: Stamp) -> bool:
        holder = self._holders.setdefault(link, self._new_holder())
        self._handle(m.Pin(holder, *stamp))
        return self.protocol.leases.holds(holder)

    def _unpin(self, link: Link) -> None:
        holder = self._holders.pop(link, None)
        if holder is not None:
            self._handle(m.Gone(holder))

    def _reader(self, peer: Peer) -> int:
        if peer.reader is None:
            peer.reader = self._new_holder()
        return peer.reader

    def _new_holder(self) -> int:
        self._readers_seen += 1
        return self._readers_seen

    def _admit(self, peer: Peer, hello: m.Hello) -> bool:
        known = peer.rank is not None or peer.reader is not None
        reason = "this connection belongs to a rank or a reader already" if known else ""
        reason = reason or self.protocol.unfit(hello)
        if reason:
            _say(peer, "unfit", {"reason": reason})
            return False
        former = self._peer_of(hello.rank)
        if former is not None:
            self._drop(former, "another process took this rank")
        peer.rank = hello.rank
        peer.decoder.max_blob_bytes = frames.MAX_BLOB_BYTES
        return True

    def _peer_of(self, rank: int) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.rank == rank), None)

    def _handle(self, event: m.Event) -> None:
        for instruction in self.protocol.handle(event, time.monotonic()):
            self._carry_out(instruction)

    def _carry_out(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.Reply() | m.Answer():
                self._answer(instruction)
            case m.ToPeer(node, verb, fields, blob):
                self.links.send(node, verb, fields, blob)
            case m.Ship(node, rank, slot, start, nbytes, fields):
                chunk = self.memory.view(rank, slot)[start : start + nbytes]
                self.links.send(node, "chunk", fields, chunk)
            case m.Accumulate(rank, slot, start, coefficient, blob):
                target = self.memory.writable(rank, slot)[start : start + len(blob)]
                accumulate(target, blob, coefficient)
            case m.Digest(rank, slot, start, nbytes):
                bucket = self.memory.view(rank, slot)[start : start + nbytes]
                self._handle(m.Digested(rank, slot, digest_of(bucket)))
            case m.Connect(roster):
                self.links.connect(roster, time.monotonic())
            case m.Allocate(rank, slot, nbytes):
                self._handle(self._allocate(rank, slot, nbytes))
            case m.Free(rank, slot):
                self.memory.free(rank, slot)
            case m.Stop(reason):
                self.stopping = reason

    def _allocate(self, rank: int, slot: int, nbytes: int) -> m.Event:
        try:
            self.memory.allocate(rank, slot, nbytes)
        except NotEnoughMemory as error:
            return m.AllocationRefused(rank, slot, str(error))
        return m.Allocated(rank, slot, nbytes)

    def _answer(self, answer: m.Reply | m.Answer) -> None:
        fds = []
        if isinstance(answer, m.Reply):
            peer, writable = self._peer_of(answer.rank), answer.writable
        else:
            readers = (peer for peer in self._peers.values() if peer.reader == answer.holder)
            peer, writable = next(readers, None), False
        if peer is None:
            return
        if answer.slot is not None:
            fds.append(self.memory.open(answer.rank, answer.slot, writable=writable))
        peer.queue({"verb": answer.verb, **answer.fields}, answer.manifest, fds)
        # Sent in the peer's own turn, so that an error does not end another peer's request.
        peer.watch(self._selector)

    def _drop(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.socket.fileno(), None) is None:
            return
        if peer.rank is not None or peer.reader is not None:
            who = f"reader {peer.reader}" if peer.rank is None else f"rank {peer.rank}"
            print(f"{who} disconnected: {reason}", file=sys.stderr, flush=True)
        self._selector.unregister(peer.socket)
        peer.close()
        if peer.rank is not None:
            self._handle(m.Disconnected(peer.rank))
        if peer.reader is not None:
            self._handle(m.Gone(peer.reader))

    def _housekeeping(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.stalled_since is not None and now - peer.stalled_since > self._patience_s:
                self._drop(peer, f"stalled for {self._patience_s:g} s")
        self._handle(m.Tick())
        self.links.tend(now)
        self.supervisor.tend(now)
        if not self._run_dir_stands():
            self.stopping = f"the run directory {self.run_dir} is gone"

    def _run_dir_stands(self) -> bool:
        try:
            return os.stat(self.run_dir).st_ino == self._inode
        except OSError:
            return False

    def status(self) -> dict[str, object]:
        """Return the status of the protocol, the processes and the links."""
        now = time.monotonic()
        own = {
            "pid": os.getpid(),
            "uptime_s": now - self._started_s,
            "refused": self.refused + self.links.refused,
            "failures": self.failures,
            "peers": {str(node): state for node, state in self.links.states().items()},
            "age_s": now - self.protocol.node.committed_s if self.protocol.node.commits else None,
            "persister": self.supervisor.status(),
        }
        return self.protocol.status() | own

    def _close(self) -> None:
        # The file is removed first: after the listener is closed, a successor may bind the path.
        if self._run_dir_stands():
            (self.run_dir / frames.SOCKET_NAME).unlink(missing_ok=True)
        self._listener.close()
        deadline = time.monotonic() + _FAREWELL_S
        self.links.close(deadline)
        for peer in self._peers.values():
            peer.drain(deadline)
            peer.close()
        self._selector.close()
        self.memory.close()


def _say(peer: Peer, verb: str, fields: Mapping[str, object]) -> None:
    peer.queue({"verb": verb, **fields})


def _number(value: object) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        raise m.ProtocolViolation(f"{value!r} is not a number") from None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.snapshot.node.smp", description=__doc__
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True, help="ranks on this node")
    parser.add_argument("--keep", type=int, required=True, help="clean snapshots kept per rank")
    parser.add_argument("--linger-s", type=float, required=True, help="seconds without a trainer")
    return parser.parse_args(argv)


def read_held(
    protocol: Protocol, memory: SlotMemory, asked: Mapping[str, object]
) -> tuple[dict[str, object], Buffer]:
    """Answer a request of ``Remote``: bytes of a slot, or the manifest of a slot or a mirror."""
    stamp = Stamp(_number(asked["epoch"]), _number(asked["step"]))
    rank = _number(asked["rank"])
    found = protocol.node.find(rank, *stamp)
    index, number, slot = found or (0, 0, None)
    verb = asked["verb"]
    if verb == "manifest":
        cluster = protocol.cluster_commit.cluster
        mirror = cluster.mirrors.get((rank, stamp)) if cluster else None
        digest, blob = (slot.digest, slot.manifest) if slot else mirror or ("", b"")
        return {"verb": "manifest" if digest else "gone", "digest": digest}, blob
    if verb == "parities" and slot and slot.receiver and slot.receiver.complete:
        digests = slot.receiver.by_stripe()
        stripes = [[stripe, len(digest)] for stripe, digest in digests.items()]
        return {"verb": "parities", "stripes": stripes}, b"".join(digests.values())
    if verb != "read" or slot is None:
        return {"verb": "gone"}, b""
    view = memory.view(index, number)
    start, count = _number(asked["offset"]), _number(asked["nbytes"])
    if not 0 <= start <= start + count <= min(len(view), slot.capacity):
        raise m.ProtocolViolation(f"{count} bytes at {start} of a slot of {len(view)}")
    return {"verb": "bytes"}, view[start : start + count]


def _serve_as_daemon(arguments: argparse.Namespace, ready: int) -> None:
    os.setsid()
    known = {name: value for name, value in vars(arguments).items() if name != "run_dir"}
    protocol = Protocol(**known, now=time.monotonic())
    server = Server(arguments.run_dir, protocol, os.geteuid())
    print(f"SMP {os.getpid()} serves {arguments.run_dir}: {known}", file=sys.stderr, flush=True)
    os.write(ready, b"1")
    os.close(ready)
    print(f"SMP {os.getpid()} stops: {server.run()}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Fork the daemon; return 0 once it listens, 1 if it does not in time."""
    arguments = _arguments(argv)
    receiver, sender = os.pipe()
    if os.fork() == 0:
        os.close(receiver)
        _serve_as_daemon(arguments, sender)
        return 0
    os.close(sender)
    readable, _, _ = select.select([receiver], [], [], config.timeout_s())
    return 0 if readable and os.read(receiver, 1) == b"1" else 1


if __name__ == "__main__":
    sys.exit(main())

"""The snapshot management process: owns the slot memory of one node and outlives the trainer.

``python -m holdfast.snapshot.node.smp --run-dir DIR --world-size N --keep K --linger-s S`` forks a
daemon and returns at once. The daemon ends when all ranks have finished, when a client asks it to
stop, when no trainer was connected for ``linger-s`` seconds, or when its run directory was removed.
"""

import argparse
import os
import select
import selectors
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from holdfast import config
from holdfast.snapshot.node import limits, queries, record, supervisor
from holdfast.snapshot.node.memory import NotEnoughMemory, SlotMemory, accumulate, digest_of
from holdfast.snapshot.node.slot_reads import SlotReads
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.transport import frames, local
from holdfast.snapshot.transport.frames import Frame
from holdfast.snapshot.transport.links import Links
from holdfast.snapshot.transport.log import log
from holdfast.snapshot.transport.sockets import Sockets
from holdfast.snapshot.transport.tcp import TcpTransport
from holdfast.version import __version__

_POLL_S = 0.5
_FAREWELL_S = 2.0
_MAX_PEERS = 4096
_MAX_STRANGERS = 1024
# Connections that readers leave to ranks, besides one for each rank.
_RESERVED = 64
_MAX_QUEUED = 1024
_SHOWN_CHARACTERS = 1000
_RECOVERY_S = 0.05


@dataclass(eq=False)
class Peer:
    """A connection to the SMP's Unix socket: of a local rank, of a reader, or of neither yet."""

    number: int
    stalled_since: float | None
    rank: int | None = None
    reader: int | None = None

    def is_stranger(self) -> bool:
        """Return true if it has not said yet what it is for."""
        return self.rank is None and self.reader is None


class Server:
    """Carries out the decisions of :class:`Protocol` with sockets, memory and time.

    It receives the ``Happenings`` of the Unix socket.

    Args:
        run_dir: the directory with the socket; the server ends when it is removed.
        protocol: makes the decisions, with the clock ``time.monotonic``.
        owner_uid: the only user id that is served; connections of others are refused and counted.
    """

    def __init__(self, run_dir: Path, protocol: Protocol, owner_uid: int) -> None:
        self.run_dir, self.protocol, self.owner_uid = run_dir, protocol, owner_uid
        self.memory = SlotMemory()
        self.supervisor = supervisor.Supervisor(run_dir)
        self.new_number = count(1).__next__  # of connections to the Unix socket, and of readers
        self.refused = self.failures = 0
        self.last_refusal = self.stopping = ""
        self._busy = False
        self._started_s = time.monotonic()
        self._patience_s = config.timeout_s()
        self._peers: dict[int, Peer] = {}
        self._descriptors = limits.raise_descriptor_limit()
        self._oom_score = limits.lower_oom_score()
        self._max_peers = max(2 * _RESERVED, min(_MAX_PEERS, self._descriptors // 2))
        self._inode = os.stat(run_dir).st_ino
        self._selector = selectors.DefaultSelector()
        self.sockets = Sockets(self._selector, self)
        self.sockets.serve(frames.SOCKET_NAME, local.listen(run_dir))
        if (listener := local.listen_without_file(run_dir)) is not None:
            self.sockets.serve("without file", listener)
        self._reads = reads = SlotReads(protocol, self.memory, self._handle, self.new_number)
        tcp = partial(TcpTransport, self._selector)
        strangers = max(16, min(_MAX_STRANGERS, self._descriptors // 4))
        self.links = Links(tcp, self._handle, reads.answer, reads.gone, protocol.state, strangers)

    def run(self) -> str:
        """Serve until there is a reason to stop, and return the reason."""
        try:
            while not self.stopping:
                pause_s = 0 if self._busy else self.links.wait_s(time.monotonic()) or _POLL_S
                turns = [key.data for key, _ in self._selector.select(min(pause_s, _POLL_S))]
                for turn in (*turns, self._work, self._housekeeping):
                    self._guarded(turn)
        finally:
            self._close()
        return self.stopping

    def _guarded(self, turn: Callable[[], object]) -> None:
        """Do something; no error of its own may end this process, which holds what others need."""
        try:
            turn()
        except Exception as error:
            self._note_failure(error)
            time.sleep(_RECOVERY_S)

    def _work(self) -> None:
        """Do a little background work between two turns."""
        nodes = self.links.nodes_with_capacity(time.monotonic())
        out = self._handle(m.Spare(nodes))
        # Chunks that were queued wake the selector through their link; a digest does not.
        self._busy = any(isinstance(instruction, m.Digest) for instruction in out)

    def accepted(self, connection: int) -> None:
        """Take a process that connected; see ``Happenings``."""
        if local.peer_uid(self.sockets.channels[connection].socket) != self.owner_uid:
            self._refuse("a process of another user connected")
            self.sockets.close(connection)
            return
        self._peers[connection] = Peer(connection, time.monotonic())
        if len(self._peers) > self._max_peers:
            self.crowded()

    def received(self, connection: int, frame: Frame) -> None:
        """Handle a frame; see ``Happenings``."""
        peer = self._peers[connection]
        try:
            self._take(peer, frame)
        except m.ProtocolViolation as error:
            self.violated(connection, str(error))
        except (OSError, MemoryError):
            raise
        except Exception as error:
            # Its own error: this process does not end, because other ranks need what it holds.
            self._note_failure(error)
            reason = f"internal error {error!r}"[:_SHOWN_CHARACTERS]
            self._say(peer, frames.FAILED, {"reason": reason})

    def closed(self, connection: int, reason: str) -> None:
        """Note that a connection has ended; see ``Happenings``."""
        if (peer := self._peers.get(connection)) is not None:
            self._drop(peer, reason)

    def violated(self, connection: int, reason: str) -> None:
        """End a connection over which something wrong came; see ``Happenings``."""
        self._refuse(reason)
        self.closed(connection, reason)

    def crowded(self) -> None:
        """End the connection that has waited longest without saying what it is for."""
        strangers = [peer for peer in self._peers.values() if peer.is_stranger()]
        for oldest in strangers[:1]:
            self._turn_away(oldest, "more connections than this SMP can serve were open")

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        log("".join(traceback.format_exception(error)))

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        self.last_refusal = reason[:_SHOWN_CHARACTERS]

    def _turn_away(self, peer: Peer, reason: str) -> None:
        self._refuse(reason)
        advice = f"the SMP of {self.run_dir} lives and refused this connection: {reason}; end "
        advice += "processes that only hold connections"
        self._say(peer, frames.REFUSED, {"reason": advice})
        if peer.number in self._peers:
            self.sockets.channels[peer.number].drain(0.0)
        self._drop(peer, reason)

    def _take(self, peer: Peer, frame: Frame) -> None:
        header, blob = frame.header, frame.blob
        if frame.verb in queries.Query.by_verb:
            self._answer_query(peer, m.parse(queries.Query, header, blob))
        elif peer.rank is None and frame.verb in m.FromReader.by_verb:
            if (holder := self._reader(peer)) is not None:
                self._handle(m.parse(m.FromReader, header, blob, holder))
        else:
            event = m.parse(m.FromRank, header, blob, peer.rank)
            if not isinstance(event, m.Hello) or self._admit(peer, event):
                self._handle(event)
        channel = self.sockets.channels.get(peer.number)
        if channel is not None and len(channel.outgoing) > _MAX_QUEUED:
            raise m.ProtocolViolation(f"{len(channel.outgoing)} answers were left unread")

    def _answer_query(self, peer: Peer, query: queries.Query) -> None:
        match query:
            case queries.Status():
                self._say(peer, "status", self.status())
            case queries.Stop():
                self._say(peer, "bye", {})
                self.stopping = "asked to"
            case queries.Persist():
                self._handle(m.PersistRequested())
                self._say(peer, "persist", self.status())
            case queries.Listen(host, port):
                self._say(peer, "listening", self._listen(host, port))
            case queries.WhichRoster():
                roster = self.links.roster.encode() if self.links.roster else None
                self._say(peer, "roster", {"roster": roster})
            case queries.PersistTo(settings):
                if self.supervisor.assign(settings, time.monotonic()):
                    self.protocol.leases.forget_disk()
                self._say(peer, "assigned", {})

    def _listen(self, host: str, port: int) -> dict[str, object]:
        try:
            host, port = self.links.listen(host, port)
        except OSError as error:
            return {"error": f"cannot listen on {host}: {error.strerror or error}"}
        said = {"host": host, "port": port, "epoch": self.protocol.cluster_commit.epoch}
        # The group stays the same over restarts, as long as an SMP holds steps of it.
        roster = self.links.roster if self.protocol.cluster_commit.inventory()["slots"] else None
        held = {"group": roster.group, "run_nodes": roster.run_nodes} if roster else {}
        return {**said, **held}

    def _reader(self, peer: Peer) -> int | None:
        """Return the number of a reader; turn it away if readers would leave no room for ranks."""
        if peer.reader is None:
            readers = sum(other.reader is not None for other in self._peers.values())
            if readers >= self._max_peers - _RESERVED - len(self.protocol.node.ranks):
                self._turn_away(peer, f"{readers} processes read from it already")
                return None
            peer.reader = self.new_number()
        return peer.reader

    def _admit(self, peer: Peer, hello: m.Hello) -> bool:
        reason = self.protocol.unfit(hello)
        if not peer.is_stranger():
            reason = "this connection belongs to a rank or a reader already"
        if reason:
            self._say(peer, "unfit", {"reason": reason})
            return False
        if (former := self._peer_of(hello.rank)) is not None:
            self._drop(former, "another process took this rank")
        peer.rank = hello.rank
        self.sockets.trust(peer.number, frames.MAX_BLOB_BYTES)
        return True

    def _peer_of(self, rank: int) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.rank == rank), None)

    def _handle(self, event: m.Event) -> list[m.Instruction]:
        out = self.protocol.handle(event, time.monotonic())
        for instruction in out:
            self._carry_out(instruction)
        return out

    def _carry_out(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.Reply() | m.Answer():
                self._answer(instruction)
            case m.ToPeer(node, verb, fields, blob):
                self.links.send(node, verb, fields, blob)
            case m.Ship(node, rank, slot, start, nbytes, fields):
                chunk = self.memory.view(rank, slot)[start : start + nbytes]
                self.links.send_parity(node, fields, chunk)
            case m.Accumulate(rank, slot, start, coefficient, blob):
                target = self.memory.writable(rank, slot)[start : start + len(blob)]
                accumulate(target, blob, coefficient)
            case m.Digest(rank, slot, start, nbytes):
                bucket = self.memory.view(rank, slot)[start : start + nbytes]
                self._handle(m.Digested(rank, slot, digest_of(bucket)))
            case m.Connect(roster):
                self.links.connect(roster)
            case m.Allocate(rank, slot, nbytes):
                try:
                    self.memory.allocate(rank, slot, nbytes)
                except NotEnoughMemory as error:
                    self._handle(m.AllocationRefused(rank, slot, str(error)))
                else:
                    self._handle(m.Allocated(rank, slot, nbytes))
            case m.Free(rank, slot):
                self.memory.free(rank, slot)
            case m.SetAside():
                self.memory.set_aside()
            case m.Stop(reason):
                self.stopping = reason

    def _answer(self, answer: m.Reply | m.Answer) -> None:
        fds: tuple[int, ...] = ()
        if isinstance(answer, m.Reply):
            peer, writable = self._peer_of(answer.rank), answer.writable
        else:
            readers = (peer for peer in self._peers.values() if peer.reader == answer.holder)
            peer, writable = next(readers, None), False
        if peer is None:
            return
        if answer.slot is not None:
            fds = (self.memory.open(answer.rank, answer.slot, writable=writable),)
        self._say(peer, answer.verb, answer.fields, answer.manifest, fds)

    def _say(
        self, peer: Peer, verb: str, fields: m.Fields, blob: bytes = b"", fds: Sequence[int] = ()
    ) -> None:
        # It is sent in the peer's own turn, so that an error does not end another's request.
        try:
            self.sockets.send(peer.number, Frame.of({"verb": verb, **fields}, blob), fds)
        except OSError as error:
            self._drop(peer, str(error))

    def _drop(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        if not peer.is_stranger():
            who = f"reader {peer.reader}" if peer.rank is None else f"rank {peer.rank}"
            log(f"{who} disconnected: {reason}")
        self.sockets.close(peer.number)
        if peer.rank is not None:
            self._handle(m.Disconnected(peer.rank))
        if peer.reader is not None:
            self._handle(m.Gone(peer.reader))

    def _housekeeping(self) -> None:
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.number in self._peers and self._stalled_s(peer, now) > self._patience_s:
                self._drop(peer, f"stalled for {self._patience_s:g} s")
        self._handle(m.Tick())
        self.links.tend()
        self.supervisor.tend(now)
        self.sockets.tend(now)
        if not self._run_dir_stands():
            self.stopping = f"the run directory {self.run_dir} is gone"
        elif not (self.run_dir / frames.SOCKET_NAME).exists():
            log(f"{frames.SOCKET_NAME} was removed from {self.run_dir}: it is made anew")
            self.sockets.serve(frames.SOCKET_NAME, local.listen(self.run_dir))

    def _stalled_s(self, peer: Peer, now: float) -> float:
        """Return for how long a frame of this peer, or to it, or its purpose is incomplete."""
        channel = self.sockets.channels[peer.number]
        stalled = peer.is_stranger() or channel.decoder.pending or channel.outgoing
        peer.stalled_since = (peer.stalled_since or now) if stalled else None
        return now - (peer.stalled_since or now)

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
            "version": __version__,
            "refused": self.refused + self.links.refused,
            "last_refusal": self.last_refusal or self.links.last_refusal,
            "descriptors": self._descriptors,
            "oom_score_adj": self._oom_score,
            "address": self.links.address,
            "encrypted": config.tls_files() is not None,
            "failures": self.failures,
            "peers": {str(node): state for node, state in self.links.states().items()},
            "age_s": now - self.protocol.node.committed_s if self.protocol.node.commits else None,
            "persister": self.supervisor.status(),
        }
        return self.protocol.status() | own

    def _close(self) -> None:
        # The file is removed first: after the listener is closed, a successor may bind the path.
        if self._run_dir_stands():
            for name in (frames.SOCKET_NAME, record.NAME):
                (self.run_dir / name).unlink(missing_ok=True)
        deadline = time.monotonic() + _FAREWELL_S
        # Other nodes first: a local reader that has stopped must not use up the time.
        self.links.close(deadline)
        self.sockets.shut(deadline)
        self._selector.close()
        self.memory.close()


def _serve_as_daemon(arguments: argparse.Namespace, ready: int) -> None:
    os.setsid()
    known = {name: value for name, value in vars(arguments).items() if name != "run_dir"}
    protocol = Protocol(**known, now=time.monotonic())
    server = Server(arguments.run_dir, protocol, os.geteuid())
    record.write(arguments.run_dir)
    log(f"SMP {os.getpid()} of holdfast {__version__} serves {arguments.run_dir}: {known}")
    os.write(ready, b"1")
    os.close(ready)
    log(f"SMP {os.getpid()} stops: {server.run()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Fork the daemon; return 0 once it listens, 1 if it does not in time."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.snapshot.node.smp", description=__doc__
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--world-size", type=int, required=True, help="ranks on this node")
    parser.add_argument("--keep", type=int, required=True, help="clean snapshots kept per rank")
    parser.add_argument("--linger-s", type=float, required=True, help="seconds without a trainer")
    arguments = parser.parse_args(argv)
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

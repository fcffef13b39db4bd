"""Random and damaged frames against a real SMP: none may end it, and its memory stays bounded.

Frames are real ones with a changed field, flipped bits, a part missing, or nothing but noise. They
come over the Unix socket before and after hello, and over TCP before the proofs, and after them as
another node and as a rank. Most are handed to the SMP's code in this process, some sent to an SMP
in a process of its own. ``python -m bench.fuzz_frames`` records how many it survived.
"""

import argparse
import json
import os
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from bench.rows import record
from holdfast.snapshot.node import launch, queries, smp
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import ProtocolViolation, Roster
from holdfast.snapshot.protocol.state_machine import Protocol as StateMachine
from holdfast.snapshot.transport import frames, handshake, local
from holdfast.snapshot.transport.frames import Frame

BATCH = 8
KINDS = "local", "greeted", "stranger", "peer", "rank"
PATIENCE_S = 60.0
SECRET = "5e" * 32
RANKS = 2

# One frame of every message, by the process that sends it.
STEP = {"epoch": 1, "step": 5}
LOCAL: list[dict[str, Any]] = [
    {"verb": "hello", "rank": 0, "world_size": RANKS, "keep": 2, "version": "0"},
    {"verb": "begin", "step": 5, "nbytes": 4096},
    {"verb": "sizes", "step": 5, "nbytes": 100, "ranks": [0, 1]},
    {"verb": "withdraw"},
    {"verb": "skip_step", "step": 5},
    {"verb": "written", "step": 5, "digest": "d" * 32, "claims": ["c"], "seen": [[1, 0, "s"]]},
    {"verb": "restore", "before": 9},
    {"verb": "verified", "step": 5},
    {"verb": "corrupt", "step": 5, "reason": "bits"},
    {"verb": "recall", "step": 5, "found": True},
    {"verb": "join", "roster": {}},
    {"verb": "inventory"},
    {"verb": "resume", **STEP},
    {"verb": "lease", "before": 9},
    {"verb": "copied", "step": 5},
    {"verb": "due", "every": 10, "after": 3, "steps": [1, 2]},
    {"verb": "release"},
    {"verb": "persisted", "step": 5, "error": ""},
    {"verb": "status"},
    {"verb": "roster"},
    {"verb": "listen", "host": "127.0.0.1", "port": 0},
    {"verb": "persist_to", "settings": None},
]
PEER: list[dict[str, Any]] = [
    {"verb": "ping", "state": "CLEAN"},
    {"verb": "wrote", **STEP},
    {"verb": "passed", **STEP, "alive": [3], "firm": True},
    {"verb": "replaced", "epoch": 1},
    {"verb": "sealed", **STEP, "disk": [], "firm": True},
    {"verb": "void", **STEP, "firm": True},
    {"verb": "committed", **STEP, "disk": [1, 2, [3], True]},
    {"verb": "late", **STEP, "nodes": [1]},
    {"verb": "size", "rank": 1, **STEP, "nbytes": 100},
    {"verb": "mirror", "rank": 1, **STEP, "digest": "d" * 32},
    {"verb": "holds", **STEP},
    {"verb": "chunk", "rank": 1, "keeper": 0, **STEP, "start": 0, "coefficient": 3},
]
RANK: list[dict[str, Any]] = [
    {"verb": "pin", **STEP},
    {"verb": "manifest", "rank": 0, **STEP},
    {"verb": "parities", "rank": 0, **STEP},
    {"verb": "read", "rank": 0, **STEP, "offset": 0, "nbytes": 64},
]
HELD = b'[{"1":[["c"],[[0,0,"s"]]]},[1,2,[3],true]]'
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 99, 2**31, 2**62, 2**63, 2**64, 2**200, 1e308, 0.5, "", "0", "\0", "x"),
    *([], [[]], {}, {"a": []}, [None] * 50, "y" * 5000, "127.0.0.1", "::1", "ü\u2028"),
]
# Text that no encoder writes, in the place of a value.
ODD_JSON = [b"Infinity", b"1e400", b'"\\ud800"', b"NaN", b"[" * 500, b"-0", b"1e5", b"", b"\xff"]


class Target(Protocol):
    """An SMP that is fuzzed, node 0 of two."""

    roster: Roster

    def open(self, kind: str) -> tuple[Any, str, bytes]:
        """Begin a connection; return it, the nonce of the challenge and the key of its frames."""

    def send(self, connection: Any, parts: Iterator[bytes]) -> int:
        """Send frames until one ends the connection, and end it; return how many were sent."""


class Process:
    """An SMP in a process of its own, over real sockets."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "run"
        connection = launch.find_or_start(launch.SmpSettings(self.run_dir, RANKS, 2, 3600.0))
        connection.send("listen", host="127.0.0.1", port=0)
        said = connection.receive().header
        self._address = str(said["host"]), int(said["port"])
        connection.send("hello", **{k: v for k, v in LOCAL[0].items() if k != "verb"})
        connection.receive()
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            self.roster = roster([self._address, closed.getsockname()])
        connection.send("join", roster=self.roster.encode())
        connection.receive()
        connection.close()
        self.pid = int(self.status()["pid"])

    def status(self) -> Mapping[str, Any]:
        """Return its status."""
        status = launch.smp_status(self.run_dir)
        assert status is not None, "the SMP is gone"
        return status

    def open(self, kind: str) -> tuple[socket.socket, str, bytes]:
        """Begin a connection; see ``Target``."""
        if kind in ("local", "greeted"):
            found = local.connect(self.run_dir, timeout_s=PATIENCE_S)
            assert found is not None, "the SMP is gone"
            if kind == "greeted":
                found._socket.sendall(frames.encode(LOCAL[0]))
            return found._socket, "", b""
        sock = socket.create_connection(self._address, PATIENCE_S)
        nonce = str(frames.Connection(sock).receive(timeout_s=PATIENCE_S).header["nonce"])
        if kind == "stranger":
            return sock, nonce, b""
        answer, pledge = claim(kind, nonce)
        sock.sendall(frames.encode(answer))
        frames.Connection(sock).receive(timeout_s=PATIENCE_S)
        return sock, nonce, pledge.from_connecting

    def send(self, connection: socket.socket, parts: Iterator[bytes]) -> int:
        """Send frames; see ``Target``."""
        whole = list(parts)
        with connection:
            connection.settimeout(PATIENCE_S)
            with suppress(OSError):
                connection.sendall(b"".join(whole))
                connection.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while connection.recv(65536):
                    pass
        return len(whole)

    def close(self) -> None:
        """End it."""
        launch.stop_smp(self.run_dir)


class Inside:
    """The code of an SMP in this process, which is handed bytes without a connection between."""

    def __init__(self, directory: Path) -> None:
        (directory / "inside").mkdir()
        state = StateMachine(RANKS, 2, 3600.0, time.monotonic())
        self.server = smp.Server(directory / "inside", state, os.geteuid())
        self.roster = roster([("127.0.0.1", 1), ("127.0.0.1", 2)])
        self.server._handle(m.Hello(0, RANKS, 2, "0"))
        self.server._handle(m.Join(0, self.roster.encode()))

    def open(self, kind: str) -> tuple[Any, str, bytes]:
        """Begin a connection; see ``Target``."""
        if kind in ("local", "greeted"):
            ours, its = socket.socketpair()
            self.server.sockets.take(its)
            number = max(self.server._peers)
            if kind == "greeted":
                self._local(ours, number, frames.encode(LOCAL[0]))
            return (ours, number), "", b""
        links = self.server.links
        number, decoder = links.new_number(), frames.Decoder(0, 4096)
        links.accepted(number)
        nonce = links._links[number].nonce
        if kind == "stranger":
            return (number, decoder), nonce, b""
        answer, pledge = claim(kind, nonce)
        links.received(number, Frame.of(answer))
        decoder = frames.Decoder(2**20 if kind == "peer" else 0)
        return (number, decoder), nonce, pledge.from_connecting

    def send(self, connection: Any, parts: Iterator[bytes]) -> int:
        """Send frames; see ``Target``."""
        to, other = connection
        deliver = self._remote if isinstance(to, int) else self._local
        handled = 0
        for part in parts:
            handled += 1
            if not deliver(to, other, part):
                break
        if isinstance(to, int):
            self.server.links.closed(to, "")
        else:
            to.close()
            self.server.sockets.turn(other)
        return handled

    def _local(self, ours: socket.socket, number: int, part: bytes) -> bool:
        ours.sendall(part)
        self.server.sockets.turn(number)
        with suppress(BlockingIOError, ConnectionError):
            while ours.recv(65536, socket.MSG_DONTWAIT):
                pass
        return number in self.server._peers

    def _remote(self, number: int, decoder: frames.Decoder, part: bytes) -> bool:
        links = self.server.links
        decoder.feed(part)
        try:
            for frame in decoder.frames():
                links.received(number, frame)
        except ProtocolViolation as error:
            links.violated(number, str(error))
        return number in links._links

    def close(self) -> None:
        """End it."""
        self.server._close()


def claim(role: Any, nonce: str) -> tuple[dict[str, Any], handshake.Pledge]:
    """Return a right answer to a challenge."""
    return handshake.claim(SECRET, role, 1, 1, nonce)


def roster(addresses: list[tuple[str, int]]) -> Roster:
    """Return the roster of node 0 of two."""
    return Roster(
        epoch=1,
        node=0,
        run_nodes=2,
        group=(0, 1),
        addresses=dict(enumerate(addresses)),
        secret=SECRET,
        parities=1,
        first_rank=0,
        mirror_nodes=((1,), (1,)),
        mirrored_ranks=(2, 3),
        sets=(((0, 2),), ((1, 3),)),
    )


class Fuzzer:
    """Draws frames and sends them to a target, and counts them."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.draw = target, random.Random(seed)
        self.sent = Counter(dict.fromkeys(KINDS, 0))

    def run(self, count: int) -> None:
        """Send frames until there were so many, over connections of all kinds."""
        while self.sent.total() < count:
            kind = min(KINDS, key=lambda kind: self.sent[kind])
            connection, nonce, key = self.target.open(kind)
            size = self.draw.choice([1, 2, BATCH])
            if kind in ("local", "greeted"):
                parts = (self.bytes(LOCAL) for _ in range(size))
            elif kind == "stranger":
                answer = claim(self.draw.choice(["peer", "rank"]), nonce)[0]
                parts = (self.bytes([answer]) for _ in range(size))
            else:
                parts = self.all_sealed(PEER if kind == "peer" else RANK, size, key)
            self.sent[kind] += self.target.send(connection, parts)

    def all_sealed(self, samples: list[dict[str, Any]], count: int, key: bytes) -> Iterator[bytes]:
        """Yield frames of one connection, numbered."""
        for number in range(1, count + 1):
            yield self.sealed(samples, number, key)

    def sealed(self, samples: list[dict[str, Any]], number: int, key: bytes) -> bytes:
        """Return a frame with the right MAC, which is seldom damaged after that."""
        frame = Frame(self.text(samples), self.blob(), number=number).sealed(key)
        return self.damaged(frame.prefix() + frame.text + frame.blob, 0.05)

    def bytes(self, samples: list[dict[str, Any]]) -> bytes:
        """Return a frame that is likely damaged."""
        if self.draw.random() < 0.02:
            return self.draw.randbytes(self.draw.randrange(200))
        frame = Frame(self.text(samples), self.blob())
        return self.damaged(frame.prefix() + frame.text + frame.blob, 0.15)

    def blob(self) -> bytes:
        """Return the bytes of a frame."""
        return self.draw.choice([b"", b"", HELD, self.damaged(HELD, 1.0), b"manifest", b"[" * 999])

    def text(self, samples: list[dict[str, Any]]) -> bytes:
        """Return a header with a field changed, or none."""
        while True:
            header = dict(self.draw.choice(samples))
            if header["verb"] == "join":
                header["roster"] = self.target.roster.encode()
            text = self._changed(header)
            if not self._is_order(text):
                return text

    def _changed(self, header: dict[str, Any]) -> bytes:
        chance, name = self.draw.random(), self.draw.choice(list(header))
        if chance < 0.25:
            return json.dumps(header).encode()
        if chance < 0.6:
            inner = header
            if isinstance(header.get("roster"), dict):
                inner, name = header["roster"], self.draw.choice(list(header["roster"]))
            inner[name] = self.draw.choice(ODD)
        elif chance < 0.7:
            del header[name]
        elif chance < 0.8:
            header[self.draw.choice(["rank", "x", "verb", "blob", "node"])] = self.draw.choice(ODD)
        elif chance < 0.9:
            marked = json.dumps(header | {name: "@"}).encode()
            return marked.replace(b'"@"', self.draw.choice(ODD_JSON))
        else:
            return self.damaged(json.dumps(header).encode(), 1.0)
        return json.dumps(header).encode()

    def _is_order(self, text: bytes) -> bool:
        """Return true for a valid request that would end the SMP or spend the machine's memory."""
        try:
            header = Frame(text).header
            for sender in (queries.Query, m.FromRank):
                if header.get("verb") not in sender.by_verb:
                    continue
                match m.parse(sender, header, b"", 0 if sender is m.FromRank else None):
                    case queries.Stop() | m.Finished():
                        return True
                    case queries.PersistTo(settings):
                        return settings is not None
                    case queries.Listen(host, _):
                        return bool(host != "127.0.0.1")
                    case m.Join(_, roster):
                        return Roster.parse(roster).epoch > 1
                    case m.Begin(_, _, nbytes):
                        return 2**22 < nbytes < 2**50
        except (ProtocolViolation, TypeError):
            pass
        return False

    def damaged(self, data: bytes, chance: float) -> bytes:
        """Return bytes with flips, a piece missing or a piece repeated, by this chance."""
        if not data or self.draw.random() > chance:
            return data
        changed = bytearray(data)
        at = self.draw.randrange(len(changed))
        match self.draw.randrange(4):
            case 0 | 1:
                for _ in range(self.draw.choice([1, 1, 3])):
                    changed[self.draw.randrange(len(changed))] ^= 1 << self.draw.randrange(8)
            case 2:
                del changed[at : at + self.draw.randrange(1, 9)]
            case _:
                changed[at:at] = changed[at : at + 9]
        return bytes(changed)


def main() -> None:
    """Fuzz, and record a row."""
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz_frames", description=__doc__)
    parser.add_argument("--frames", type=int, default=10**6, help="handed to the SMP's code")
    parser.add_argument("--sockets", type=int, default=10**5, help="sent to a process over sockets")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as directory:
        row = fuzz_inside(Path(directory), args.frames, args.seed)
        row |= fuzz_process(Path(directory), args.sockets, args.seed)
    record("fuzz_frames", {"seed": args.seed, **row})


def fuzz_inside(directory: Path, count: int, seed: int) -> dict[str, Any]:
    """Hand frames to the SMP's code; an exception ends this. Return what was counted."""
    inside, started_s = Inside(directory), time.monotonic()
    fuzzer, own = Fuzzer(inside, seed), psutil.Process()
    fuzzer.run(count // 10)
    first = own.memory_info().rss
    fuzzer.run(count)
    status = inside.server.status()
    inside.close()
    return {
        "frames": fuzzer.sent.total(),
        **{f"frames_{kind}": number for kind, number in fuzzer.sent.items()},
        "refused": status["refused"],
        "internal_errors": status["failures"],
        "rss_mib_after_a_tenth": round(first / 2**20, 1),
        "rss_mib_at_the_end": round(own.memory_info().rss / 2**20, 1),
        "seconds": round(time.monotonic() - started_s),
    }


def fuzz_process(directory: Path, count: int, seed: int) -> dict[str, Any]:
    """Send frames to an SMP in a process; return what became of it."""
    target, started_s = Process(directory), time.monotonic()
    try:
        fuzzer = Fuzzer(target, seed)
        with_rss = psutil.Process(target.pid)
        fuzzer.run(count // 10)
        first = with_rss.memory_info().rss
        fuzzer.run(count)
        status = target.status()
        return {
            "sent": fuzzer.sent.total(),
            "sent_alive": status["pid"] == target.pid,
            "sent_refused": status["refused"],
            "sent_internal_errors": status["failures"],
            "sent_rss_mib_after_a_tenth": round(first / 2**20, 1),
            "sent_rss_mib_at_the_end": round(with_rss.memory_info().rss / 2**20, 1),
            "sent_descriptors": with_rss.num_fds(),
            "sent_seconds": round(time.monotonic() - started_s),
        }
    finally:
        target.close()


if __name__ == "__main__":
    main()

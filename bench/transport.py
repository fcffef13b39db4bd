"""The links between SMPs beside a raw TCP stream, ZeroMQ and TLS, between two network namespaces.

``python -m bench.transport`` makes two hosts (as root), sends chunks of parities from one to the
other over every kind of connection in turn, and records bytes per second as a share of the raw
stream's. ZeroMQ is measured if ``pyzmq`` can be imported. ``--readers N`` also lets so many ranks
read from one SMP at once.
"""

import argparse
import gc
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from holdfast import config
from holdfast.snapshot.node import launch, limits
from holdfast.snapshot.node.session import SmpSession
from holdfast.snapshot.protocol import messages as m
from holdfast.snapshot.protocol.roster import Roster, Stamp
from holdfast.snapshot.transport.links import Links
from holdfast.snapshot.transport.remote import Remote
from holdfast.snapshot.transport.tcp import TcpTransport
from holdfast_lab.trainer.hosts import Host, hosts
from holdfast_lab.trainer.namespaces import Switch, obstacle

CHUNK_BYTES = 2**20
PORT = 4711
PATIENCE_S = 120.0
ROOT = str(Path(__file__).parents[1])
SECRET = "5e" * 32
CURVE = b"holdfast holdfast holdfast bench"  # the same pair of keys on both sides


class Cpu:
    """The CPU time of this process since a transfer began, in seconds."""

    def begin(self) -> float:
        """Begin; return the wall clock."""
        self._began_s = time.process_time()
        return time.perf_counter()

    def seconds(self) -> float:
        """Return the time so far."""
        return time.process_time() - self._began_s


CPU = Cpu()


def main() -> None:
    """Measure, and record rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="sent in each run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--readers", type=int, default=0)
    parser.add_argument("--end", nargs=4, metavar=("KIND", "NODE", "ADDRESSES", "BYTES"))
    args = parser.parse_args()
    if args.end:
        kind, node, addresses, nbytes = args.end
        gc.freeze()  # an SMP has not imported torch, whose objects take a collection 0.1 s
        seconds = ENDS[kind](int(node), addresses.split(","), int(nbytes))
        print(json.dumps([seconds, CPU.seconds()]), flush=True)
        return
    from bench.rows import record

    if reason := obstacle():
        raise SystemExit(f"no network namespaces here: {reason}")
    for row in measured(args.mb * 2**20, args.pairs):
        record("transport", row)
    if args.readers:
        record("transport", readers(args.readers))


def measured(nbytes: int, pairs: int) -> list[dict[str, Any]]:
    """Return a row for each kind of connection: its share of a raw stream's speed."""
    with tempfile.TemporaryDirectory(prefix="holdfast-transport-") as name:
        folder = Path(name)
        tls = dict(zip(config.TLS_VARIABLES, certificate(folder), strict=True))
        kinds: dict[str, tuple[str, dict[str, str]]] = {"frames": ("frames", {})}
        kinds["frames, tls"] = "frames", tls
        try:
            import zmq  # noqa: F401

            kinds |= {"zeromq": ("zmq", {}), "zeromq, curve": ("curve", {})}
        except ImportError:
            print("pyzmq cannot be imported: ZeroMQ is not measured", file=sys.stderr)
        runs: dict[str, list[tuple[float, float]]] = {"raw": [], **{kind: [] for kind in kinds}}
        with hosts(2, folder / "hosts", kind=Switch.kind) as cluster:
            for _ in range(pairs):
                for kind, found in runs.items():
                    found.append(transfer(list(cluster), *kinds.get(kind, ("raw", {})), nbytes))
    rows = []
    for kind, found in runs.items():
        both = list(zip(found, runs["raw"], strict=True))
        shares = sorted(plain[0] / one[0] for one, plain in both)
        rows.append(
            {
                "kind": kind,
                "bytes": nbytes,
                "chunk_bytes": CHUNK_BYTES,
                "gb_s": round(nbytes / median(one for one, _ in found) / 1e9, 3),
                "share_of_raw": round(median(shares), 3),
                "shares": [round(share, 3) for share in shares],
                "gb_per_cpu_s": round(nbytes / median(cpu for _, cpu in found) / 1e9, 3),
                "cpu_share_of_raw": round(median(raw[1] / one[1] for one, raw in both), 3),
                "pairs": pairs,
                "load": round(os.getloadavg()[0], 1),
            }
        )
    return rows


def certificate(folder: Path) -> tuple[str, str, str]:
    """Make a certificate that is its own authority."""
    files = str(folder / "node.pem"), str(folder / "node.key")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    make += ["-subj", "/CN=node", "-out", files[0], "-keyout", files[1]]
    subprocess.run(make, check=True, capture_output=True, timeout=PATIENCE_S)
    return *files, files[0]


def transfer(ends: list[Host], kind: str, env: dict[str, str], nbytes: int) -> tuple[float, float]:
    """Send bytes from the first host to the second.

    Returns:
        The seconds that it took, and the CPU seconds of the busier side.
    """
    addresses = ",".join(host.address for host in ends)
    started = []
    for node, host in enumerate(ends):
        log = host.run_dir / f"{kind}.log"
        log.unlink(missing_ok=True)
        words = ["-m", "bench.transport", "--end", kind, str(node), addresses, str(nbytes)]
        paths = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
        started.append(
            host.run([sys.executable, *words], env={**env, "PYTHONPATH": paths}, log=log)
        )
    for process in started:
        process.wait(PATIENCE_S)
    said = [(end.run_dir / f"{kind}.log").read_text().splitlines() for end in ends]
    try:
        (seconds, sending), (_, receiving) = (json.loads(lines[-1]) for lines in said)
    except (IndexError, ValueError) as error:
        raise SystemExit(f"{kind} failed: {said}") from error
    return seconds, max(sending, receiving)


def raw(node: int, addresses: list[str], nbytes: int) -> float:
    """Send or receive a plain stream."""
    if node == 1:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with socket.create_server((addresses[1], PORT)) as listener:
            sock, left = listener.accept()[0], nbytes
            sock.sendall(b"x")
            CPU.begin()
            while left:
                left -= sock.recv_into(buffer)
            sock.sendall(b"x")
        return 0.0
    sock, data = connected((addresses[1], PORT)), bytes(CHUNK_BYTES)
    sock.recv(1)
    started_s = CPU.begin()
    for _ in range(nbytes // CHUNK_BYTES):
        sock.sendall(data)
    sock.recv(1)
    return time.perf_counter() - started_s


def connected(address: tuple[str, int]) -> socket.socket:
    """Connect, when the other side listens."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def frames(node: int, addresses: list[str], nbytes: int) -> float:
    """Send or receive chunks over links of SMPs."""
    selector, got, done, linked = selectors.DefaultSelector(), 0, False, False

    def handle(event: m.Event) -> None:
        nonlocal got, done, linked
        match event:
            case m.PeerChunk():
                got += len(event.blob)
            case m.PeerWrote():
                done = True
            case m.PeerLinked():
                linked = True

    tcp = partial(TcpTransport, selector)
    links = Links(tcp, handle, lambda *_: ({}, b""), lambda _: None, lambda: "CLEAN")
    links.listen(addresses[node], PORT)
    places = {other: (address, PORT) for other, address in enumerate(addresses)}
    links.connect(Roster(1, node, 2, (0, 1), places, SECRET, 1, node, ((1 - node,),), (), ()))

    def turn(until: Callable[[], bool]) -> None:
        while not until():
            for key, _ in selector.select(0.05):
                key.data()
            links.tend()

    turn(lambda: linked)
    if node == 1:
        CPU.begin()
        turn(lambda: got >= nbytes)
        links.send(0, "wrote", {"epoch": 1, "step": 1}, b"")
        turn(lambda: linked and not links.transport.queued_bytes(links.outlets()[0]))
        links.close(time.monotonic() + 1.0)
        return 0.0
    data = memoryview(bytes(CHUNK_BYTES))
    fields = {"rank": 0, "keeper": 1, "epoch": 1, "step": 1, "start": 0, "coefficient": 1}
    started_s, left = CPU.begin(), nbytes
    while left:
        while left and links.nodes_with_capacity(time.monotonic()):
            links.send_parity(1, fields, data)
            left -= len(data)
        turn(lambda: bool(links.nodes_with_capacity(time.monotonic())))
    turn(lambda: done)
    seconds = time.perf_counter() - started_s
    links.close(time.monotonic() + 1.0)
    return seconds


def zeromq(node: int, addresses: list[str], nbytes: int, *, curve: bool = False) -> float:
    """Send or receive messages of ZeroMQ."""
    import zmq
    from zmq.utils import z85

    context = zmq.Context()
    sock: Any = context.socket(zmq.PULL if node else zmq.PUSH)
    answers: Any = context.socket(zmq.PUSH if node else zmq.PULL)
    for one in (sock, answers):
        one.setsockopt(zmq.RCVHWM, 4)
        one.setsockopt(zmq.SNDHWM, 4)
        if curve:
            secret = z85.encode(CURVE)
            public = zmq.curve_public(secret)
            one.curve_publickey, one.curve_secretkey = public, secret
            if node:
                one.curve_server = True
            else:
                one.curve_serverkey = public
    for offset, one in enumerate((sock, answers)):
        place = f"tcp://{addresses[1]}:{PORT + offset}"
        one.bind(place) if node else one.connect(place)
    count, data = nbytes // CHUNK_BYTES, bytes(CHUNK_BYTES)
    if node:
        for _ in range(count + 1):
            sock.recv(copy=False)
            if not _:
                CPU.begin()
                answers.send(b"begin")
        answers.send(b"done")
        answers.close(5000)
        return 0.0
    sock.send(b"hello")
    answers.recv()
    started_s = CPU.begin()
    for _ in range(count):
        sock.send(data, copy=False)
    answers.recv()
    seconds = time.perf_counter() - started_s
    context.destroy(0)
    return seconds


ENDS: dict[str, Callable[[int, list[str], int], float]] = {
    "raw": raw,
    "frames": frames,
    "zmq": zeromq,
    "curve": lambda *given: zeromq(*given, curve=True),
}


def readers(count: int) -> dict[str, Any]:
    """Let ranks read from one SMP, all at once; return how many were served, and how long."""
    limits.raise_descriptor_limit()
    with tempfile.TemporaryDirectory(prefix="holdfast-readers-") as directory:
        run_dir = Path(directory) / "run"
        session = SmpSession(launch.SmpSettings(run_dir, 1, 1, 60.0), 0)
        said = session.listen("127.0.0.1")
        places = (said.host, said.port), ("127.0.0.1", 9)
        roster = Roster(1, 0, places, SECRET, 1, 0, ((1,),), (), ())
        session.join(roster)

        def read(_: int) -> bool:
            remote = Remote(roster, 0, attempts=6)
            try:
                return not remote.pin(Stamp(1, 0))
            except ConnectionError:
                return False
            finally:
                remote.close()

        started_s = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            served = sum(pool.map(read, range(count)))
        seconds = time.perf_counter() - started_s
        refused = (launch.smp_status(run_dir) or {})["refused"]
        session.close()
        launch.stop_smp(run_dir)
    row = {"kind": "readers", "readers": count, "served": served, "refused_at_first": refused}
    return row | {"seconds": round(seconds, 2), "load": round(os.getloadavg()[0], 1)}


if __name__ == "__main__":
    main()

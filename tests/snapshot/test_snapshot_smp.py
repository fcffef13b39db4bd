"""The SMP process: its start, its end, and clients that misbehave."""

import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from process_server import adopt_orphans
from snapshot_memory import slot_files
from snapshot_trainer import Tiny
from snapshot_waits import PATIENCE_S, alive, kill, smp_pids, until

from holdfast.errors import ConfigError, SmpUnavailable
from holdfast.snapshot.node import launch, memory
from holdfast.snapshot.node.session import SmpSession
from holdfast.snapshot.node.smp import Server
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.transport import frames, local

pytestmark = [pytest.mark.processes, pytest.mark.representative]


def settings(run_dir: Path, linger_s: float = 60.0) -> launch.SmpSettings:
    return launch.SmpSettings(run_dir, 1, 2, linger_s)


def started(run_dir: Path, linger_s: float = 60.0) -> int:
    launch.find_or_start(settings(run_dir, linger_s)).close()
    status = launch.smp_status(run_dir)
    return int(status["pid"])


def gone(pid: int) -> None:
    until(lambda: not alive(pid), f"SMP {pid} ends")


@pytest.mark.parametrize("finished", [True, False])
def test_an_smp_is_lost_unless_it_ended_with_its_last_rank(run_dir: Path, finished: bool) -> None:
    """Otherwise the thread that watches it would start another one for a run that has ended."""
    pid = started(run_dir)
    rank = SmpSession(settings(run_dir), 0)
    assert not rank.is_lost()
    if finished:
        rank.finished()
    else:
        kill(pid)
    gone(pid)
    assert rank.is_lost() != finished
    rank.close()


@pytest.fixture
def orphans_go_to_init() -> Iterator[None]:
    """This process adopts nobody, as any that starts an SMP."""
    adopt_orphans(False)
    yield
    adopt_orphans()


def test_starts_fast_without_torch_and_is_nobodys_child(
    run_dir: Path, orphans_go_to_init: None
) -> None:
    process = psutil.Process(started(run_dir))
    assert process.ppid() != os.getpid()
    assert os.getsid(process.pid) != os.getsid(0)
    assert not any("torch" in mapped.path for mapped in process.memory_maps())
    assert process not in psutil.Process().children(recursive=True)
    assert (run_dir / frames.SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    assert run_dir.stat().st_mode & 0o777 == 0o700


def test_ranks_that_race_get_one_smp(run_dir: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        starts = [pool.submit(launch.find_or_start, settings(run_dir)) for _ in range(8)]
        for start in starts:
            start.result(PATIENCE_S).close()
    assert len(smp_pids(run_dir.parent)) == 1


def test_the_socket_of_a_dead_smp_is_replaced(run_dir: Path) -> None:
    first = started(run_dir)
    kill(first)
    assert (run_dir / frames.SOCKET_NAME).exists()
    assert launch.smp_status(run_dir) is None
    second = started(run_dir)
    assert second != first
    assert launch.stop_smp(run_dir)
    gone(second)
    assert not launch.stop_smp(run_dir)


def test_a_run_dir_longer_than_a_socket_path_works(tmp_path: Path) -> None:
    run_dir = tmp_path / ("x" * 120) / ("y" * 120)
    run = Tiny()
    with run.snapshots(run_dir) as snapshots:
        digests = run.train(range(1, 2), snapshots)
        snapshots.wait_committed()
        run.train(range(2, 3))
        assert snapshots.rollback() == 1
        assert run.digest() == digests[1]


def test_finished_ranks_leave_no_process_and_no_memory(run_dir: Path) -> None:
    run = Tiny()
    with run.snapshots(run_dir) as snapshots:
        run.train(range(1, 3), snapshots)
        pid = snapshots.status()["pid"]
    gone(pid)
    assert not (run_dir / frames.SOCKET_NAME).exists()
    assert slot_files(os.getpid()) == []
    assert "all ranks finished" in (run_dir / launch.LOG_NAME).read_text()


def test_ends_when_nobody_comes_back(run_dir: Path) -> None:
    snapshots = Tiny().snapshots(run_dir, linger_s=0.7)
    pid = snapshots.status()["pid"]
    time.sleep(1.5)
    assert alive(pid)
    snapshots.close(finished=False)
    gone(pid)
    assert "no trainer was connected for 0.7 s" in (run_dir / launch.LOG_NAME).read_text()


def test_ends_when_its_run_directory_is_gone(run_dir: Path) -> None:
    pid = started(run_dir)
    assert alive(pid)
    shutil.rmtree(run_dir)
    gone(pid)
    assert smp_pids(run_dir.parent) == set()
    assert not run_dir.exists()


def test_a_start_that_fails_says_why(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use run_dir"):
        launch.find_or_start(settings(tmp_path / "file"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SmpUnavailable, match=r"did not start .*smp\.log"):
        launch.find_or_start(settings(run_dir))


def raw_socket(run_dir: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(run_dir / frames.SOCKET_NAME))
    return sock


def garbage() -> list[bytes]:
    noise = random.Random(0)
    hello = frames.encode({"verb": "hello", "rank": 0, "world_size": 1, "keep": 2})
    return [
        noise.randbytes(100),
        b"HFS2" + b"\xff" * 20,
        frames.encode({"verb": "begin", "step": 1, "nbytes": 1}),
        frames.encode({"verb": "hello", "rank": 99, "world_size": 1, "keep": 2, "x": []}),
        frames.encode({"verb": None}),
        frames.encode({"verb": "hello", "rank": "0"}),
        frames.encode({"verb": "status"}, b"blob before hello"),
        hello + frames.encode({"verb": "written", "step": -5, "digest": 3}),
        hello + frames.encode({"verb": "begin", "step": 1, "nbytes": 2**62}),
        hello + hello,
        frames._PREFIX.pack(b"HFS2", 5, 0, 0, 0, b"") + b"[[[[[",
        frames._PREFIX.pack(b"HFS2", 60000, 0, 0, 0, b"") + b"[" * 60000,
        b"H",
    ]


def test_garbage_does_not_stop_the_smp(run_dir: Path) -> None:
    pid = started(run_dir)
    for data in garbage():
        with raw_socket(run_dir) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    status = launch.smp_status(run_dir)
    assert status["pid"] == pid
    run = Tiny()
    with run.snapshots(run_dir) as snapshots:
        run.train(range(1, 3), snapshots)
        assert snapshots.wait_committed() == 2


def test_a_client_that_stalls_is_dropped_and_one_that_idles_is_not(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_TIMEOUT_S", "1")
    run = Tiny()
    snapshots = run.snapshots(run_dir)
    with raw_socket(run_dir) as silent, raw_socket(run_dir) as half:
        half.sendall(b"HFS2\x00")
        assert silent.recv(1) == b""
        assert half.recv(1) == b""
    run.train(range(1, 2), snapshots)
    assert snapshots.wait_committed() == 1
    snapshots.close(finished=True)


def test_a_reader_that_never_reads_is_dropped(run_dir: Path) -> None:
    started(run_dir)
    question = frames.encode({"verb": "status"})
    with raw_socket(run_dir) as sock, pytest.raises(ConnectionError):
        sock.sendall(question * 200_000)
    assert launch.smp_status(run_dir) is not None


def test_strangers_are_refused_and_counted(run_dir: Path) -> None:
    run_dir.mkdir()
    server = Server(run_dir, Protocol(1, 2, 60.0, time.monotonic()), os.geteuid() + 1)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with raw_socket(run_dir) as sock:
            assert sock.recv(1) == b""
        assert server.refused == 1
        assert server.status()["refused"] == 1
    finally:
        server.stopping = "the test is over"
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_slot_memory_is_faulted_in_sealed_and_read_only_for_readers() -> None:
    slots = memory.SlotMemory()
    slots.allocate(0, 1, 8 * 2**20)
    try:
        reader = slots.open(0, 1, writable=False)
        assert os.fstat(reader).st_blocks * 512 >= 8 * 2**20
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(reader, b"x", 0)
        os.close(reader)
        writer = slots.open(0, 1, writable=True)
        with pytest.raises(PermissionError):
            os.ftruncate(writer, 0)
        os.close(writer)
        with pytest.raises(memory.NotEnoughMemory, match=r"needs \d+ bytes and \d+ are available"):
            slots.allocate(0, 2, 2**50)
    finally:
        slots.close()


@pytest.mark.parametrize(
    ("modules", "numpy"), [("node.smp", "False"), ("parity.erasure_code, layout.groups", "True")]
)
def test_the_smp_side_and_the_coding_import_no_torch(modules: str, numpy: str) -> None:
    names = ", ".join(f"holdfast.snapshot.{name}" for name in modules.split(", "))
    code = f"import sys, {names}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert ran.stdout.split() == ["False", numpy]


def test_an_error_of_the_smps_own_is_logged_and_costs_nobody_the_connection(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.mkdir()
    server = Server(run_dir, Protocol(1, 2, 60.0, time.monotonic()), os.geteuid())
    thread = threading.Thread(target=server.run)
    thread.start()

    def broken() -> dict[str, object]:
        raise ValueError("a bug of the SMP")

    try:
        connection = local.connect(run_dir, timeout_s=PATIENCE_S)
        assert connection is not None
        with monkeypatch.context() as bug:
            bug.setattr(server, "status", broken)
            connection.send({"verb": "status"}, timeout_s=PATIENCE_S)
            answer = connection.receive(timeout_s=PATIENCE_S)
            assert (answer.verb, server.failures) == (frames.FAILED, 1)
            with pytest.raises(SmpUnavailable, match="a bug of the SMP"):
                launch.smp_status(run_dir)
        connection.send({"verb": "status"}, timeout_s=PATIENCE_S)
        assert connection.receive(timeout_s=PATIENCE_S).header["failures"] == 2
        # What a client does wrong still costs its connection, and is no failure.
        connection.send({"verb": "listen", "port": "none"}, timeout_s=PATIENCE_S)
        with pytest.raises(ConnectionError):
            connection.receive(timeout_s=PATIENCE_S)
        assert server.failures == 2
        connection.close()
    finally:
        server.stopping = "the test is over"
        thread.join(PATIENCE_S)
    said = capsys.readouterr().err
    assert said.count("Traceback") == 2
    assert said.count("ValueError: a bug of the SMP") == 2

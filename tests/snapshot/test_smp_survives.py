"""What would end an SMP or lock trainers out of it, and does not: descriptors, files, memory."""

import errno
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from snapshot_nodes import roster_of
from snapshot_trainer import Tiny
from snapshot_waits import PATIENCE_S, until

from holdfast.errors import SmpUnavailable, SnapshotMismatch
from holdfast.snapshot.node import launch, limits, record, session
from holdfast.snapshot.node.session import NotEnoughMemory, SmpSession
from holdfast.snapshot.node.smp import Server
from holdfast.snapshot.protocol.roster import Stamp
from holdfast.snapshot.protocol.state_machine import Protocol
from holdfast.snapshot.restore.reader import Reader
from holdfast.snapshot.transport import frames, local
from holdfast.snapshot.transport.log import log
from holdfast.snapshot.transport.remote import Remote

pytestmark = [pytest.mark.processes, pytest.mark.representative, pytest.mark.timeout(120)]

READERS = 300


def settings(run_dir: Path) -> launch.SmpSettings:
    return launch.SmpSettings(run_dir, 1, 2, 60.0)


def pid_of(run_dir: Path) -> int:
    status = launch.smp_status(run_dir)
    assert status is not None
    return int(status["pid"])


@contextmanager
def served(run_dir: Path) -> Iterator[Server]:
    """An SMP in a thread of this process."""
    run_dir.mkdir()
    server = Server(run_dir, Protocol(1, 2, 60.0, time.monotonic()), os.geteuid())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stopping = "the test is over"
        thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_removed_socket_is_made_anew_and_until_then_the_smp_is_found_without(
    run_dir: Path,
) -> None:
    launch.find_or_start(settings(run_dir)).close()
    pid = pid_of(run_dir)
    for name in (frames.SOCKET_NAME, launch.LOCK_NAME, record.NAME):
        (run_dir / name).unlink()
        launch.find_or_start(settings(run_dir)).close()
        assert pid_of(run_dir) == pid
    until((run_dir / frames.SOCKET_NAME).exists, "the socket is back")
    assert (run_dir / frames.SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    assert pid_of(run_dir) == pid


def test_without_its_second_socket_a_removed_file_would_lose_the_smp(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "listen_without_file", lambda _: None)
    with served(run_dir):
        assert launch.smp_status(run_dir) is not None
        (run_dir / frames.SOCKET_NAME).unlink()
        assert local.connect(run_dir, timeout_s=1.0) is None
        until((run_dir / frames.SOCKET_NAME).exists, "the socket is back")
        assert launch.smp_status(run_dir) is not None


def test_idle_connections_do_not_lock_the_trainer_out(run_dir: Path) -> None:
    with served(run_dir) as server, ExitStack() as crowd:
        server._max_peers = 70
        for _ in range(100):
            idle = local.connect(run_dir, timeout_s=PATIENCE_S)
            assert idle is not None
            crowd.callback(idle.close)
        until(lambda: server.refused >= 30, "the oldest are turned away")
        SmpSession(settings(run_dir), 0).close()
        assert "more connections" in server.last_refusal


def test_readers_leave_room_for_ranks_and_one_too_many_is_told_why(run_dir: Path) -> None:
    with served(run_dir) as server, ExitStack() as crowd:
        server._max_peers = 70
        for _ in range(70 - 64 - 1):
            reader = Reader(run_dir)
            crowd.callback(reader.close)
            assert reader.lease() is None
        with Reader(run_dir) as late, pytest.raises(SmpUnavailable, match="lives and refused"):
            late.lease()
        SmpSession(settings(run_dir), 0).close()


def test_without_a_free_descriptor_the_smp_goes_on_when_there_are_some_again(
    run_dir: Path,
) -> None:
    launch.find_or_start(settings(run_dir)).close()
    process = psutil.Process(pid_of(run_dir))
    assert process.rlimit(resource.RLIMIT_NOFILE)[0] == process.rlimit(resource.RLIMIT_NOFILE)[1]
    until(lambda: process.num_fds() < 15, "it is idle")
    few = process.num_fds() + 3
    process.rlimit(resource.RLIMIT_NOFILE, (few, process.rlimit(resource.RLIMIT_NOFILE)[1]))
    crowd = [raw(run_dir) for _ in range(20)]
    # Those that it cannot serve are closed, so that their processes learn of it.
    until(lambda: sum(is_closed(sock) for sock in crowd) > 10, "most are turned away")
    for sock in crowd:
        sock.close()
    until(lambda: answers(run_dir), "it answers again")
    assert pid_of(run_dir) == process.pid


def raw(run_dir: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(run_dir / frames.SOCKET_NAME))
    sock.setblocking(False)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1000, socket.MSG_PEEK) == b"" or True
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def answers(run_dir: Path) -> bool:
    try:
        return launch.smp_status(run_dir) is not None
    except (SmpUnavailable, OSError):
        return False


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), MemoryError(), OSError(errno.EMFILE, "Fds")]
)
def test_memory_that_cannot_be_had_refuses_the_copy(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object) -> int:
        raise error

    with served(run_dir) as server:
        rank = SmpSession(settings(run_dir), 0)
        with monkeypatch.context() as short:
            short.setattr(os, "memfd_create", failing)
            with pytest.raises(NotEnoughMemory, match="allocating 4096 bytes failed"):
                rank.begin(1, 4096)
        assert rank.begin(2, 4096) is not None
        assert server.failures == 0
        rank.close()


def test_an_error_of_its_own_outside_any_request_is_counted_and_survived(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(run_dir) as server:
        with monkeypatch.context() as broken:
            broken.setattr(server, "_housekeeping", lambda: 1 / 0)
            until(lambda: server.failures >= 2, "it fails")
        assert answers(run_dir)


def test_a_log_on_a_full_disk_costs_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    log("lost")
    with pytest.raises(OSError, match="No space"):
        full.close()


def test_an_smp_of_another_wire_version_is_told_apart(run_dir: Path) -> None:
    run_dir.mkdir()
    listener = local.listen(run_dir)
    listener.setblocking(True)

    def hang_up() -> None:
        for _ in range(3):
            listener.accept()[0].close()

    for about, who in (
        ('{"pid": 7, "version": "9.0", "wire": 9}', "SMP 7 of holdfast 9.0"),
        ("", "older"),
    ):
        (run_dir / record.NAME).write_text(about) if about else (run_dir / record.NAME).unlink()
        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(SnapshotMismatch, match=f"{who}.*go on with"):
            SmpSession(settings(run_dir), 0)
        thread.join(PATIENCE_S)
    listener.close()


def test_another_version_of_holdfast_restores_bit_for_bit_from_an_smp_of_the_same_wire_version(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Tiny()
    snapshots = run.snapshots(run_dir)
    digests = run.train(range(1, 3), snapshots)
    snapshots.wait_committed()
    snapshots.close(finished=False)
    monkeypatch.setattr(session, "__version__", "99.0")
    again = Tiny()
    assert again.digest() != digests[2]
    with again.snapshots(run_dir) as snapshots:
        assert snapshots.restore() == 2
        assert again.digest() == digests[2]


def test_many_readers_at_once_are_all_served(run_dir: Path) -> None:
    limits.raise_descriptor_limit()
    rank = SmpSession(settings(run_dir), 0)
    said = rank.listen("127.0.0.1")
    roster = roster_of(0, [(said.host, said.port), ("127.0.0.1", 9)], epoch=1)
    rank.join(roster)
    gate = threading.Barrier(READERS)

    def read(_: int) -> bool:
        remote = Remote(roster, 0, attempts=6)
        gate.wait(PATIENCE_S)
        try:
            return remote.pin(Stamp(1, 0))
        finally:
            remote.close()

    with ThreadPoolExecutor(READERS) as pool:
        assert list(pool.map(read, range(READERS))) == [False] * READERS
    rank.close()


def test_the_score_by_which_the_kernel_chooses_is_lowered_or_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score: Any = tmp_path / "score"
    monkeypatch.setattr(limits, "_OOM_FILE", score)
    for inherited, lowered in (("0", -500), ("-800", -999), ("200", -300)):
        score.write_text(inherited)
        assert limits.lower_oom_score() == lowered == int(score.read_text())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(type(score), "write_text", lambda *_: os.stat("/nonexistent"))
    assert limits.lower_oom_score() == -300
    assert "may end this process before the trainer" in capsys.readouterr().err
